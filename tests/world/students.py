"""Students of the tiny job, for tests of distillation."""

from __future__ import annotations

from typing import Any

from moesaic.testing.jobs import TINY

DENSE: dict[str, Any] = {
    "family": "llama", "vocab": 61, "hidden": 16, "layers": 1, "heads": 2, "kv_heads": 2,
    "head_dim": 4, "ffn": 20, "init_std": 0.2,
}  # fmt: skip
"""Model of a student with other heads than the teacher."""
SPARSE: dict[str, Any] = {**TINY["model"], "layers": 1, "experts": 4}
"""Model of a student with half of the teacher's experts."""

ALL = {"text": 0.7, "logits": 0.5, "attention": 1.1, "relations": 0.3, "hidden": 0.9}
"""Weights of all losses."""
ASSISTANT: dict[str, Any] = {
    "name": "assistant", "model": {**TINY["model"], "top_k": 1, "layers": 1, "experts": 2},
    "losses": {**ALL, "hidden": 0.0}, "lr": 0.01,
}  # fmt: skip
SMALL: dict[str, Any] = {
    "name": "small", "model": DENSE, "teacher": "assistant", "losses": ALL,
    "divergence": "reverse", "temperature": 2.0,
}  # fmt: skip
STUDENTS: list[dict[str, Any]] = [
    SMALL,
    ASSISTANT,
    {
        "name": "sparse", "model": SPARSE, "losses": {"logits": 1.0}, "divergence": "jensen",
    },
    {"name": "quiet", "model": DENSE, "losses": {"attention": 2.0}},
    {
        "name": "rare", "model": {**DENSE, "tied": True}, "interval": 2,
        "losses": {"text": 1.0, "logits": 0.5},
    },
]  # fmt: skip
"""Five students: one behind an assistant, one without a loss on logits, one with an interval."""
