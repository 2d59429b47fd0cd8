"""How Sphinx builds these pages: `python -m sphinx -W -n --keep-going docs build/docs`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE / "_extensions")]  # this tree's mtx, installed or not

import mtx  # noqa: E402

project, author, copyright = "mtx", "the authors of mtx", "the authors of mtx"
version = release = mtx.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.viewcode",
    "api_reference",
    "option_reference",
    "schedule_gallery",
]
exclude_patterns = ["package.md", "_extensions", "_static", "notebooks/.ipynb_checkpoints"]

nb_execution_mode = "off"  # notebooks hold their outputs: see notebooks/execute.py and its test
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autodoc_typehints_format = "short"
python_maximum_signature_line_length = 88
# Types in signatures that have no page here: other libraries' and those internal to our code.
nitpick_ignore_regex = [("py:.*", ".*")]

smartquotes = False  # --out stays --out

html_theme = "sphinx_book_theme"
html_title = "mtx"
html_static_path = ["_static"]
html_css_files = ["mtx.css"]
html_theme_options = {"show_toc_level": 2, "home_page_in_toc": True}
html_copy_source = False
