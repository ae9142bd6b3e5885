"""The site: Markdown pages, and a reference made from the docstrings. `make docs` builds it, warnings as errors."""

import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from bridge import __version__

project = "kernel-bridge"
release = version = __version__
html_title = f"{project} {release}"
html_theme = "furo"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx_copybutton"]
exclude_patterns = ["performance/*"]

myst_heading_anchors = 3
copybutton_prompt_text = r">>> "

default_role = "code"
autodoc_member_order = "bysource"
autodoc_typehints = "none"
autodoc_default_options = {"members": True, "exclude-members": "__init__, __new__"}


def as_text(app, what, name, obj, options, lines):
    """Docstrings are text, and not reStructuredText: what is indented is a formula or a list, and stars mean products."""
    written: list[str] = []
    for before, line in zip(["", *lines], lines, strict=False):
        if line.startswith(" ") and not before.strip() and line.strip() and not _inside(written):
            written += ["::", ""]
        written.append(line if line.startswith(" ") else _escaped(line))
    lines[:] = written


def _inside(written):
    """Whether the last line that says something is indented."""
    said = [line for line in written if line.strip()]
    return bool(said) and said[-1].startswith(" ")


def _escaped(line):
    return "`".join(re.sub(r"([*|_])", r"\\\1", part) if i % 2 == 0 else part for i, part in enumerate(line.split("`")))


def setup(app):
    app.connect("autodoc-process-docstring", as_text)
