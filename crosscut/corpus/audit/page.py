"""Report of a corpus as a single HTML file that contains its style, scripts and data.

Text from documents is always data and never markup: the page stores all text in a block of JSON, and no text can end
this block. In addition, the page's content security policy allows only scripts and styles with a listed hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from crosscut.config.conventions import LOOK
from crosscut.config.system.files import write_whole

PAGE = Path(__file__).parent / "page"

_SCRIPT = re.compile(r'<script src="([\w.]+)"></script>')
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w.]+)">')
_ICON = re.compile(r'"(icon\.svg)"')
_DATA = re.compile(r'(<script type="application/json" id="(\w+)">)(</script>)')
_CHARSET = '<meta charset="utf-8">'


def write_page(report: Mapping[str, object], timings: Mapping[str, object], path: Path) -> None:
    """Write the report as an HTML page. The file is written atomically."""
    write_whole(path, make_page(report, timings))


def make_page(report: Mapping[str, object], timings: Mapping[str, object]) -> str:
    """Build the HTML page of a report."""
    html = _read("report.html")
    scripts = [_read(name) for name in _SCRIPT.findall(html)]
    styles = [_read(name) for name in _STYLE.findall(html)]
    html = _STYLE.sub(lambda match: f"<style>{_read(match[1])}</style>", html)
    html = _ICON.sub(lambda match: f'"data:image/svg+xml;base64,{_base64((PAGE / match[1]).read_bytes())}"', html)
    html = html.replace(_CHARSET, f"{_CHARSET}\n  {_policy(scripts, styles)}")
    html = _SCRIPT.sub(lambda match: f"<script>{_read(match[1])}</script>", html)
    data = {"report": report, "timings": timings}
    return _DATA.sub(lambda match: f"{match[1]}{_embedded(data[match[2]])}{match[3]}", html)


def _policy(scripts: list[str], styles: list[str]) -> str:
    allowed = {
        "default-src": ["'none'"],
        "img-src": ["data:"],
        "script-src": [_digest(text) for text in scripts],
        "style-src": [_digest(text) for text in styles],
    }
    content = "; ".join(f"{kind} {' '.join(sources)}" for kind, sources in allowed.items())
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def _read(name: str) -> str:
    return (LOOK if name == LOOK.name else PAGE / name).read_text(encoding="utf-8")


def _digest(text: str) -> str:
    return f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _embedded(data: Mapping[str, object]) -> str:
    """Convert data to JSON without `<`, so that no text can end the block or begin a comment. Lone surrogates are
    escaped.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
