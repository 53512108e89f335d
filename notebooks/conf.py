"""Configuration of the documentation site: ``sphinx-build -W notebooks SITE`` (extra ``docs``)."""

import importlib.metadata
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
sys.path.insert(0, str(FOLDER))
import site_pages  # noqa: E402

project = "nnxmoe"
author = "the nnxmoe developers"
release = version = importlib.metadata.version("nnxmoe")

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
if "READTHEDOCS" in os.environ:
    extensions.append("sphinx.ext.viewcode")  # pages with the sources: a third of the build time
exclude_patterns = ["README.md", "**.ipynb_checkpoints"]

suppress_warnings = ["ref.python"]  # several classes have attributes of the same name

# The tutorials are executed and stored with their outputs. `tests/test_notebooks.py` runs them again.
nb_execution_mode = "off"
myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
autosummary_imported_members = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_preserve_defaults = True
autodoc_typehints_description_target = "documented"
autodoc_default_options = {"members": True, "show-inheritance": True}
napoleon_numpy_docstring = False
napoleon_use_ivar = True
napoleon_attr_annotations = False  # shapes such as "*rows X" are not valid reStructuredText
add_module_names = False

# The copy button leaves out prompts. A command that continues on the next line is copied as a whole.
copybutton_prompt_text = r"\$ |>>> "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"

html_theme = "sphinx_book_theme"
html_title = "nnxmoe"
html_static_path = ["static"]
html_css_files = ["site.css"]
html_theme_options = {"show_navbar_depth": 1, "show_toc_level": 2, "use_download_button": False}


def setup(app):
    """Write the generated pages before Sphinx reads the folder, and the Markdown of all pages after it has written."""
    site_pages.write_pages(FOLDER)
    app.connect("autodoc-process-docstring", site_pages.mark_code_blocks, priority=100)  # before napoleon
    app.connect("build-finished", site_pages.write_markdown)
