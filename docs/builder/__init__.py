"""Extensions of Sphinx for this site: pages that lie elsewhere, reference pages made from the code, plots."""
