"""The settings of Sphinx. ``scripts/docs`` builds the site; ``docs/site/`` has the modules that make parts of it."""

import os
import sys
from datetime import UTC, datetime
from pathlib import Path

DOCS = Path(__file__).parent
sys.path.insert(0, str(DOCS / "site"))

import docstrings
import generate
import keywords

import crossreduce

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # before autodoc imports TensorFlow, here and in the notebooks
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "0")

project = "crossreduce"
author = "the crossreduce developers"
version = release = crossreduce.__version__
copyright = f"{datetime.now(UTC):%Y}, {author}. Apache-2.0"  # noqa: A001 - Sphinx's name

extensions = [
    "myst_nb",  # Markdown, and notebooks that are executed
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
exclude_patterns = ["_generated/*.md", "_static", "site"]
templates_path = ["_templates"]
smartquotes = False  # quotation marks are often code: "auto"
nitpicky = True  # every reference must have a target; scripts/docs makes warnings errors
nitpick_ignore_regex = [  # signatures name classes of other projects, whose sites cannot be read at every build
    ("py:class", r"(collections\.abc|datetime|fractions|numpy|os|torch)\..*"),
    ("py:class", "Fraction"),
    # and classes that the reference has in crossreduce.torch
    ("py:class", r"(crossreduce\.observe\.counters\.)?(CollectiveStats|WaitStats)"),
    # and classes of this library that are not public: arguments of constructors that users do not call
    ("py:class", r"crossreduce\.planning\.(requests\.Request|optimal\.bounds\.certificate\.Cut)"),
    ("py:class", r"crossreduce\.planning\.groups\.groups_bound\.(GroupNeed|RateLevel)"),
    ("py:class", r"crossreduce\.(torch\.elastic|processes\.rank_group)\.Result"),
    ("py:class", r"crossreduce\.ranks\.(communicator\.Communicator|transports\.mpi\.MpiTransport)"),
    ("py:class", r"crossreduce\.ranks\.connections\.(rendezvous\.Origin|store\.StoreClient)"),
    ("py:class", r"crossreduce\.strategy\.(base\.Strategy|extended\.Extended|replica_group\.ReplicaGroup)"),
    ("py:class", r"crossreduce\.values\.DistributedValues|Pair"),
]

# Markdown and notebooks
myst_heading_anchors = 4
myst_enable_extensions = ["colon_fence", "deflist"]
nb_execution_mode = "force"
nb_execution_in_temp = True
nb_execution_timeout = 300  # seconds per cell: long, since other work may use the machine
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_merge_streams = True
nb_mime_priority_overrides = [(builder, "text/plain", 10) for builder in ("spelling", "linkcheck")]
nb_ipywidgets_js = {}  # would load scripts from a network

# The interface, from docstrings
autodoc_mock_imports = ["torchft"]  # no extra installs it
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_rtype = False
napoleon_use_param = False
napoleon_use_ivar = True

# HTML
html_theme = "pydata_sphinx_theme"
html_title = f"crossreduce {release}"
html_static_path = ["_static"]
html_extra_path = ["_generated/extra"]  # pages of the plan explorer
html_css_files = ["site.css"]
html_js_files = ["versions.js", "tables.js"]
html_search_scorer = str(DOCS / "site" / "scorer.js")
html_show_sourcelink = False
html_copy_source = False
html_permalinks_icon = "#"
html_theme_options = {
    "logo": {"text": "crossreduce"},
    "navbar_center": ["navbar-nav"],
    "navbar_end": ["versions", "theme-switcher"],
    "navbar_align": "left",
    "header_links_before_dropdown": 7,
    "show_toc_level": 2,
    "navigation_with_keys": False,
    "footer_start": ["copyright"],
    "footer_end": ["sphinx-version"],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {"index": []}

# Spelling: `scripts/docs --spelling`. The same extensions for every builder: else pages would be read again.
try:
    import enchant

    enchant.Dict("en_GB")
except Exception:  # noqa: BLE001 - no library or no dictionary, each with an error of its own
    pass
else:
    extensions.append("sphinxcontrib.spelling")
    spelling_lang = "en_GB"
    spelling_word_list_filename = "words.txt"
    spelling_show_suggestions = True
    spelling_warning = True

# Links: `scripts/docs --links`
linkcheck_anchors = False
linkcheck_timeout = 20


def prepare(_app, name, source):
    """Add the words of ``keywords.py`` to the index."""
    source[0] = keywords.with_entries(name, source[0])


def setup(app):
    """Write the files that are made from the library and the results, before pages are read."""
    app.connect("config-inited", lambda _app, _config: generate.write(DOCS / "_generated"))
    app.connect("source-read", prepare)
    app.connect("autodoc-process-docstring", docstrings.prepare, priority=400)  # napoleon has 500
