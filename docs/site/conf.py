"""Sphinx's settings of the site. `make site` builds it."""

from pathlib import Path

from markdown_docstrings import Markdown, as_markdown, without_objects
from reference import anchor_of, definitions, home_of

ROOT = Path(__file__).parents[2]
project = "Crosscut"
html_title = "Crosscut"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.linkcode"]
source_suffix = {".md": "markdown"}
myst_heading_anchors = 6
myst_url_schemes = {"http": None, "https": None, "site": "{{path}}#{{fragment}}"}

autodoc_default_options = {"member-order": "bysource"}
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
add_module_names = False
python_maximum_signature_line_length = 120
toc_object_entries_show_parents = "hide"

html_theme = "furo"
pygments_dark_style = "github-dark"
html_static_path = ["static"]
html_extra_path = [str(page) for page in (ROOT / "docs").glob("*.html")]
html_css_files = ["site.css"]
html_copy_source = False
html_show_copyright = False


def linkcode_resolve(_, info):
    """Address of the source of a name, from a page of the reference. Fields and methods have no link of their own."""
    name = info["fullname"]
    if "." in name:
        return None
    path = home_of(ROOT, info["module"], name)
    has_anchor = name in definitions((ROOT / path).read_text(encoding="utf-8"))
    return f"../source/{path}.html" + (f"#{anchor_of(path, name)}" if has_anchor else "")


def setup(app):
    """Register the directive of docstrings and the shorter navigation."""
    app.add_directive("markdown", Markdown)
    app.connect("autodoc-process-docstring", as_markdown)
    app.connect("autodoc-process-signature", without_objects)
    app.connect("html-page-context", only_titles, priority=400)  # before furo's
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def only_titles(*event):
    """Leave the headings of other pages out of the navigation before they are copied. Copies took most of the build."""
    context = event[3]
    if toctree := context.get("toctree"):
        context["toctree"] = lambda **options: toctree(**options | {"maxdepth": 2})
