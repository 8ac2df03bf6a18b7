"""One finding: a sentence that a person can act on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["problem", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """What was found, how grave it is, and what to do."""

    kind: str
    """Machine-readable name."""
    severity: Severity
    """problem: figures or work are being lost. warning: worth a change. note: good to know."""
    title: str
    text: str
