"""Settings of the site: `make docs` builds it into docs/_build/html."""

import os
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # a build asks no hub

DOCS = Path(__file__).parent
sys.path[:0] = [str(DOCS / "tools"), str(DOCS.parent)]

import docstrings
import gallery
import inventories
import reference
import stored_outputs

import fbuf

gallery.write()
reference.write()

project, author, copyright = "fbuf", "the authors of fbuf", "the authors of fbuf"
version = release = fbuf.__version__
extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.intersphinx", "sphinx.ext.napoleon"]
exclude_patterns = ["_build", "tools", "outputs"]

# ---------------------------------------------------------------------- pages
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4
default_role = "py:obj"  # `Buffer` in a docstring is a link where there is such a name, and code elsewhere

# Tutorials train for minutes. Their outputs are stored beside them; the build executes those whose code has changed.
nb_execution_mode = "cache"
nb_execution_cache_path = str(stored_outputs.cache(DOCS / "_build" / "executed"))
nb_execution_timeout = 900
nb_execution_raise_on_error = True
nb_merge_streams = True

# ---------------------------------------------------------------------- reference
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
autodoc_class_signature = "mixed"
python_maximum_signature_line_length = 100
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # attributes of a class as a list, as arguments are
add_module_names = False
toc_object_entries_show_parents = "hide"

# The inventories of other projects are made from a list in the repository: a build without a network is the same build.
intersphinx_mapping = inventories.mapping(DOCS / "_build" / "inventories")

# ---------------------------------------------------------------------- HTML
html_theme = "furo"
html_title = "fbuf"
html_show_sourcelink = False
html_copy_source = False
html_search_scorer = str(DOCS / "tools" / "search_scorer.js")


def setup(app):
    app.connect("autodoc-process-docstring", docstrings.process, priority=400)  # before napoleon
    app.connect("autodoc-process-signature", docstrings.process_signature)
