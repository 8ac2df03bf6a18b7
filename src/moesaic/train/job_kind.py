"""Kind of job by name: each is imported when a job of this kind trains."""

from __future__ import annotations

from typing import Any

from moesaic.train.trainer import JobKind


def job_kind(name: str) -> JobKind[Any]:
    """Return the kind of job that `kind = name` of a job file means."""
    if name == "ctr":
        from moesaic.train.ctr import CtrKind

        return CtrKind()
    from moesaic.train.lm import LanguageModelKind

    return LanguageModelKind()
