"""HTML pages as single files that contain their styles, scripts and data.

Text of users is always data and never markup: a page stores its data in blocks of JSON, and no text can end such a
block. In addition, the page's content security policy allows only the scripts and styles with a listed hash.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path

from crosscut.config.conventions import LOOK

_SCRIPT = re.compile(r'<script src="([\w./]+)"></script>')
_STYLE = re.compile(r'<link rel="stylesheet" href="([\w./]+)">')
_ICON = re.compile(r'"(icon\.svg)"')
_DATA = re.compile(r'(<script type="application/json" id="(\w+)">)(</script>)')
_CHARSET = '<meta charset="utf-8">'


def inline_page(path: Path, data: Mapping[str, object], *, connects: bool = False) -> str:
    """Return the HTML file `path` with everything that it names in its folder. `data` has the content of each block of
    JSON by its id. The page may send requests to its own server only if `connects` is true, and none elsewhere.
    """

    def read(name: str) -> str:
        return (LOOK if name == LOOK.name else path.parent / name).read_text(encoding="utf-8")

    html = path.read_text(encoding="utf-8")
    scripts = [read(name) for name in _SCRIPT.findall(html)]
    styles = [read(name) for name in _STYLE.findall(html)]
    html = _STYLE.sub(lambda match: f"<style>{read(match[1])}</style>", html)
    html = _ICON.sub(lambda match: f'"{_data_url(path.parent / match[1])}"', html)
    html = html.replace(_CHARSET, f"{_CHARSET}\n  {_policy(scripts, styles, connects=connects)}")
    html = _SCRIPT.sub(lambda match: f"<script>{read(match[1])}</script>", html)
    return _DATA.sub(lambda match: f"{match[1]}{_embedded(data[match[2]])}{match[3]}", html)


def _policy(scripts: list[str], styles: list[str], *, connects: bool) -> str:
    allowed = {
        "default-src": ["'none'"],
        "img-src": ["data:"],
        "script-src": [_digest(text) for text in scripts],
        "style-src": [_digest(text) for text in styles],
        **({"connect-src": ["'self'"]} if connects else {}),
    }
    content = "; ".join(f"{kind} {' '.join(sources)}" for kind, sources in allowed.items())
    return f'<meta http-equiv="Content-Security-Policy" content="{content}">'


def _digest(text: str) -> str:
    return f"'sha256-{_base64(hashlib.sha256(text.encode()).digest())}'"


def _data_url(path: Path) -> str:
    return f"data:image/svg+xml;base64,{_base64(path.read_bytes())}"


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _embedded(data: object) -> str:
    """Convert data to JSON without `<`, so that no text can end the block or begin a comment. Lone surrogates are
    escaped.
    """
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
