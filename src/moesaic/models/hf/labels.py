"""Keys of config.json for a sequence classifier, in transformers *ForSequenceClassification.

An export of a model with a classifier holds its language-modelling head too. transformers takes
the one that it needs: AutoModelForSequenceClassification or AutoModelForCausalLM.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from moesaic.facts.job import ModelConfig
from moesaic.facts.job.credibility import LABELS
from moesaic.models.hf.special_tokens import EOS_KEY, token_ids

LABEL_KEYS = frozenset({"id2label", "label2id", "num_labels"})
"""Keys that export writes anew for a classifier."""

_CAUSAL, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"
"""Ends of the names of model classes in transformers."""
_DEFAULT_LABELS = 2
"""Classes of a classifier in transformers if its config.json names none."""


def num_labels(raw: Mapping[str, Any]) -> int:
    """Return the classes of the sequence classifier in a config.json; 0 for another model."""
    classes, names = raw.get("architectures"), raw.get("id2label")
    if not isinstance(classes, list) or not str(classes[:1]).count(_CLASSIFIER):
        return 0
    return len(names) if isinstance(names, dict) and names else _DEFAULT_LABELS


def label_keys(model: ModelConfig, architecture: str) -> dict[str, Any]:
    """Return the keys of a classifier, whose language model has the class `architecture`.

    transformers reads the last token that is no padding, so padding is a token that no text has.
    """
    names = LABELS if model.labels == len(LABELS) else [str(i) for i in range(model.labels)]
    ends = token_ids(model.extras.get(EOS_KEY), EOS_KEY, "model.extras")
    padding = model.extras.get("pad_token_id")
    return {
        "architectures": [architecture.replace(_CAUSAL, _CLASSIFIER)],
        "id2label": {str(number): name for number, name in enumerate(names)},
        "label2id": {name: number for number, name in enumerate(names)},
        "pad_token_id": (ends[0] if ends else None) if padding is None else padding,
    }
