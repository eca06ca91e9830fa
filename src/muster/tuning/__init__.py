"""Which setup of a collector is fastest here: what things cost (``measure``), and what follows (``model``)."""
