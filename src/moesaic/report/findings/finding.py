"""One finding of a report."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Severity = Literal["problem", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """Event, severity and advice."""

    kind: str
    """Machine-readable name."""
    severity: Severity
    """problem: results or work are lost. warning: change something. note: good to know."""
    title: str
    """Sentence on what happened, to which layer, rank or step."""
    text: str
    """Numbers, and what to do: key and value."""
