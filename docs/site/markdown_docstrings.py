"""Docstrings in Markdown, as the package has them, in pages that Sphinx's autodoc writes."""

import re
from pathlib import Path

from docutils import nodes
from docutils.utils import new_document
from myst_parser.parsers.sphinx_ import MystParser
from sphinx.util.docutils import SphinxDirective

_PAGE = re.compile(r"(?<![\w/])(`?)docs/([\w/-]+\.md)\b\1")
_ENUMERATED = re.compile(r"<([A-Z]\w*\.\w+): [^<>]*>")
_OBJECT = re.compile(r"<[\w.]+(?: [\w. ]+)?(?: at 0x[0-9a-f]+)?>")


class Markdown(SphinxDirective):
    """Directive of reStructuredText whose content is Markdown."""

    has_content = True

    def run(self) -> list[nodes.Node]:
        """Parse the content as Markdown of the same page."""
        source, _ = self.get_source_info()
        document = new_document(source, self.state.document.settings)
        MystParser().parse("\n".join(self.content), document)
        return document.children


def as_markdown(*event):
    """Wrap the lines of a docstring into the directive `markdown`, in place, with links to the pages that it names."""
    lines = event[-1]
    if any(lines):
        linked = (_PAGE.sub(_link, line) for line in lines)
        lines[:] = [".. markdown::", "", *(f"   {line}".rstrip() for line in linked), ""]


def _link(page: re.Match[str]) -> str:
    """Link to a page of `docs/` from the reference. Other projects have pages with such names, too."""
    return f"[{page[0]}](../{page[2]})" if (Path(__file__).parents[1] / page[2]).is_file() else page[0]


def without_objects(*event):
    """Write default values that are no Python, such as `<factory>`, so that Sphinx can read the signature."""
    signature, returns = event[-2:]
    if signature is None:
        return None
    return _OBJECT.sub("...", _ENUMERATED.sub(r"\1", signature)), returns
