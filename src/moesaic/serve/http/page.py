"""Page to chat in and to see where the experts are; it loads nothing from elsewhere."""

from __future__ import annotations

import base64
import hashlib
import html
import re
from importlib.resources import files
from types import MappingProxyType

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


def render(model: str, *, is_chat: bool, needs_key: bool) -> str:
    """Return the page.

    Args:
        model: name of the model.
        is_chat: whether the model has a chat template.
        needs_key: whether requests need an API key.
    """
    body = f'<body data-model="{html.escape(model)}" data-chat="{is_chat}" data-key="{needs_key}">'
    return _TEMPLATE.replace("<title>", f"<title>{html.escape(model)} - ", 1).replace(
        "<body>", body, 1
    )
