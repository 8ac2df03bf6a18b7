"""Shell of a report: one self-contained HTML file.

Style, script and Plotly are inlined. A content security policy allows exactly these scripts and
forbids every request, so markup in the names of a run cannot execute.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from importlib.resources import files
from typing import Any

MARK = (
    '<svg class="mark" viewBox="0 0 40 40" width="40" height="40" role="img" '
    'aria-label="moesaic: mosaic tiles">'
    '<rect class="m0" x="1" y="1" width="11" height="11" rx="2"/>'
    '<rect class="m1" x="14.5" y="1" width="11" height="11" rx="2"/>'
    '<rect class="m2" x="28" y="1" width="11" height="11" rx="2"/>'
    '<rect class="m3" x="1" y="14.5" width="11" height="11" rx="2"/>'
    '<rect class="m4" x="14.5" y="14.5" width="11" height="11" rx="2"/>'
    '<rect class="m0" x="28" y="14.5" width="11" height="11" rx="2"/>'
    '<rect class="m2" x="1" y="28" width="11" height="11" rx="2"/>'
    '<rect class="m5" x="14.5" y="28" width="11" height="11" rx="2"/>'
    '<rect class="m1" x="30" y="29" width="9" height="9" rx="2" transform="rotate(14 34 33)"/>'
    "</svg>"
)
"""Logo of the page as SVG."""

_ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 40 40">'
    '<rect x="2" y="2" width="16" height="16" rx="3" fill="#2a6fbb"/>'
    '<rect x="22" y="2" width="16" height="16" rx="3" fill="#e07b1a"/>'
    '<rect x="2" y="22" width="16" height="16" rx="3" fill="#12876f"/>'
    '<rect x="23" y="23" width="14" height="14" rx="3" fill="#8e5aa8" '
    'transform="rotate(12 30 30)"/>'
    "</svg>"
)


def document(title: str, body: str, data: dict[str, Any]) -> str:
    """Return the whole file: `body` is HTML, `title` is text, `data` is what `page.js` draws."""
    plotly, script = _inline(plotly_source()), _inline(_asset("page.js"))
    policy = (
        f"default-src 'none'; script-src {_hash(plotly)} {_hash(script)}; "
        "style-src 'unsafe-inline'; img-src data: blob:"
    )
    icon = base64.b64encode(_ICON.encode()).decode()
    return "".join(
        [
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
            f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n',
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
            '<meta name="color-scheme" content="light dark">\n',
            f"<title>{html.escape(title)}</title>\n",
            f'<link rel="icon" href="data:image/svg+xml;base64,{icon}">\n',
            f"<style>\n{_asset('page.css')}</style>\n</head>\n<body>\n",
            body,
            f'\n<script type="application/json" id="page-data">{embed(data)}</script>\n',
            f"<script>{plotly}</script>\n<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def embed(data: Any) -> str:
    """Return `data` as JSON that is safe inside a script element, whatever its strings hold."""
    text = json.dumps(data, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def plotly_source() -> str:
    """Return the plot library: the cartesian bundle of plotly.js, vendored in `assets/`."""
    return _asset("plotly-cartesian.min.js")


def _asset(name: str) -> str:
    return (files("moesaic.report") / "assets" / name).read_text(encoding="utf-8")


def _inline(script: str) -> str:
    # These sequences occur only in strings and regular expressions, where "<\/" means "</".
    return script.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _hash(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return f"'sha256-{digest}'"
