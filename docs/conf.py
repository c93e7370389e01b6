"""Sphinx's settings: the site is of the repository's own Markdown, where it lies. tools/site builds it."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tools"))

project = "Hocket"
author = "the Hocket developers"
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "docs/atlas/README.md", "examples/*.md", "packages/*/*.md"]
# What is written about folders lies in them.
include_patterns += ["packages/core-runtime/src/hocket/**/README.md", "integration-tests/README.md"]
exclude_patterns = [".*", "build", "dist", "runs", "**/tests", "**/template"]

extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_click",
    "sphinxcontrib.mermaid",
    "site_pages",
]

myst_enable_extensions = ["colon_fence"]
myst_fence_as_directive = ["mermaid"]
myst_heading_anchors = 4  # links such as choosing.md#words, as forges make them
suppress_warnings = ["myst.header"]  # a README's headings may begin below the first level

autodoc_member_order = "bysource"
python_maximum_signature_line_length = 80  # an argument a line
autodoc_typehints = "signature"
autoclass_content = "both"  # what __init__ says of its arguments, too
smartquotes_action = "D"  # dashes, and quotes as they are written
default_role = "code"  # docstrings write `names` as Markdown does

html_theme = "furo"
html_title = "Hocket"
html_static_path = ["static"]
html_css_files = ["hocket.css"]
html_js_files = ["tables.js"]
html_search_scorer = str(ROOT / "docs/static/search.js")
html_additional_pages = {"index": "to_index.html"}
templates_path = ["templates"]
html_show_copyright = False
html_copy_source = False
html_show_sourcelink = False
html_use_index = html_domain_indices = False  # search finds names; the index fits no phone
