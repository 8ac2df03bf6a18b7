"""Page to chat in and to see where the experts are; it loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib.resources import files
from types import MappingProxyType

from moesaic.serve.http.api_model import ApiModel

_TEMPLATE = (files(__package__) / "page.html").read_text(encoding="utf-8")


def _hash_of(tag: str) -> str:
    """Return the content security policy's source for the inline element `tag`."""
    found = re.search(rf"<{tag}>(.*?)</{tag}>", _TEMPLATE, re.DOTALL)
    assert found is not None, tag
    digest = hashlib.sha256(found[1].encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


HEADERS = MappingProxyType({
    "content-security-policy": (
        f"default-src 'none'; connect-src 'self'; img-src data:; style-src {_hash_of('style')}; "
        f"script-src {_hash_of('script')}; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
})  # fmt: skip
"""Headers of the page: scripts and styles are its own, and requests go to this server alone."""


def render(model: ApiModel, *, needs_key: bool) -> str:
    """Return the page of a model; with `needs_key` it asks for an API key."""
    name = html.escape(model.name)
    body = (
        f'<body data-model="{name}" data-chat="{model.template is not None}" '
        f'data-key="{needs_key}" data-context="{model.context}">'
    )
    page = _TEMPLATE.replace("<title>", f"<title>{name} - ", 1)
    return page.replace("<body>", body, 1)
