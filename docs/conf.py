"""How Sphinx builds the site: ``make docs``. What it makes from the code is in ``docs/builder``."""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent))  # tests.public_api, for the list of public names

import muster  # noqa: E402

project = "Muster"
author = "The Muster authors"
copyright = f"2026, {author}"
release = version = muster.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "builder.pages",
    "builder.reference",
    "builder.pictures",
]
exclude_patterns = ["builder"]
source_suffix = {".rst": "restructuredtext", ".md": "myst-nb"}

html_theme = "furo"
html_title = f"Muster {release}"
html_static_path = ["_static"]
html_favicon = "_static/muster.svg"
html_css_files = ["muster.css"]
html_search_scorer = str(HERE / "builder" / "scorer.js")
html_copy_source = True  # llms.txt names these files
html_theme_options = {"navigation_with_keys": False}
smartquotes = False  # they change --out to a dash
pygments_style = "friendly"
pygments_dark_style = "monokai"

myst_enable_extensions = ["attrs_block", "colon_fence", "deflist"]
myst_heading_anchors = 4
nb_execution_mode = "force"
nb_execution_timeout = 600  # seconds per cell; a busy machine is no error
nb_execution_raise_on_error = True
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_inherit_docstrings = False  # those of Gymnasium are no reStructuredText
autodoc_typehints = "none"  # names of types are in the signatures, and where parameters have a list of their own
autodoc_default_options = {"members": True, "inherited-members": False}
napoleon_use_ivar = (
    True  # "Attributes:" with their texts, without an index entry for each
)
napoleon_custom_sections = [
    ("Args passed on", "params_style")
]  # muster.collectors.signatures
napoleon_numpy_docstring = False
python_display_short_literal_types = True
maximum_signature_line_length = 88
