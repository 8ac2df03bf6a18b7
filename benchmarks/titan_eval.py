"""Part of the theme `titan`: lm-eval on the inference engine against its own `hf` model.

Both score the same questions about Python's help texts, in one process, on one mixture of experts
with random weights. Each round has questions of its own, so that no cache holds them.
"""

from __future__ import annotations

import random
import re
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from importlib.metadata import version
from itertools import count
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import lm_eval.api.instance
import transformers
from lm_eval.models.huggingface import HFLM

from benchmarks import measure
from moesaic import Engine
from moesaic.base.config import parse
from moesaic.facts.job import ModelConfig
from moesaic.facts.job.model import PRESETS
from moesaic.models.hf.shards import InMemoryTensors
from moesaic.models.hf.writer import write_model
from moesaic.models.init import InitialSource
from moesaic.models.lm import LanguageModel
from moesaic.models.state import tensor_shards
from moesaic.models.tokenizer import ByteTokenizer
from moesaic.serve.harness import HarnessModel

SHAPE = {
    "hidden": 512, "layers": 6, "heads": 8, "kv_heads": 8, "head_dim": 64, "ffn": 256,
    "experts": 16, "top_k": 4, "vocab": 8192, "max_positions": 1024,
}  # fmt: skip
QUESTIONS, CHOICES, GENERATED = 8, 4, 4
SETTINGS = {"until": ["\n"], "max_gen_toks": 32, "do_sample": False}
BATCHES = (1, 8)
"""Batch sizes of the `hf` model; the quickest one counts."""
MODES = ("eager", "grouped_mm")
"""Expert kernels of transformers; the quickest one counts."""
TOLERANCE = 1e-4
LENGTH = 32
"""Characters of a choice. lm-eval adds up log-probabilities in fp32, which limits longer ones."""
Request = lm_eval.api.instance.Instance
Score = tuple[float, bool]


def export(directory: Path) -> None:
    """Write the model as a Hugging Face directory with a tokenizer of bytes."""
    config = parse(ModelConfig, {**PRESETS["tiny-olmoe"], **SHAPE}, "titan_eval")
    model = LanguageModel(config)
    InitialSource(1, 0.02).fill(tensor_shards(model))
    files = directory.with_name("tokenizer")
    files.mkdir()
    for name, content in ByteTokenizer().files().items():
        (files / name).write_bytes(content)
    write_model(
        directory, config, InMemoryTensors(tensor_shards(model)), companions=[*files.iterdir()],
        special_token_ids={"eos_token_id": ByteTokenizer.end_id},
    )  # fmt: skip


def sentences() -> list[str]:
    """Return the sentences of Python's help topics, of 40 to 200 characters."""
    text = re.sub(r"\s+", " ", " ".join(topics.values()))
    return [one for one in re.split(r"(?<=\.) ", text) if 40 <= len(one) <= 200]


def questions(seed: int, texts: Sequence[str]) -> list[Request]:
    """Return requests: which sentence follows three others?"""
    draws, requests = random.Random(seed), list[Request]()
    for number in range(QUESTIONS):
        at = draws.randrange(len(texts) - 4)
        context = f"{seed}.{number}: {' '.join(texts[at : at + 3])}"
        choices = [texts[at + 3], *draws.sample(texts, CHOICES - 1)]
        requests += [
            Request("loglikelihood", {}, (context, f" {choice[:LENGTH]}"), index)
            for index, choice in enumerate(choices)
        ]
    return requests


def prompts(seed: int, texts: Sequence[str]) -> list[Request]:
    """Return requests to continue sentences."""
    found = random.Random(seed).sample(texts, GENERATED)
    return [Request("generate_until", {}, (text, SETTINGS), 0) for text in found]


def hf_model(directory: Path, batch: int, mode: str) -> HFLM:
    """Return lm-eval's own model."""
    model = HFLM(pretrained=str(directory), device="cpu", dtype="float32", batch_size=batch)
    model.model.set_experts_implementation(mode)
    return model


@contextmanager
def sides(directory: Path) -> Iterator[dict[str, Any]]:
    """Yield moesaic's model and those of lm-eval, by name."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    with ExitStack() as stack:
        engine = stack.enter_context(Engine(directory, device="cpu"))
        found: dict[str, Any] = {"moesaic": HarnessModel(engine)}
        for mode in MODES:
            for batch in BATCHES:
                found[f"hf, batch {batch}, {mode}"] = hf_model(directory, batch, mode)
        yield found


def scorer(model: Any, texts: Sequence[str]) -> Callable[[], list[Score]]:
    """Return a function that scores the questions of the next round."""
    rounds = count(1)

    def score() -> list[Score]:
        found: list[Score] = model.loglikelihood(questions(next(rounds), texts), disable_tqdm=True)
        return found

    return score


def answers(scores: Sequence[Score]) -> list[int]:
    """Return the choice of each question."""
    rows = [scores[at : at + CHOICES] for at in range(0, len(scores), CHOICES)]
    return [max(range(CHOICES), key=lambda choice: row[choice][0]) for row in rows]


def evaluation(rounds: int) -> Iterator[measure.Row]:
    """Compare log-likelihoods, answers and speed."""
    texts, against = sentences(), f"lm-eval {version('lm_eval')}"
    with tempfile.TemporaryDirectory() as home:
        directory = Path(home) / "model"
        export(directory)
        with sides(directory) as models:
            best = quickest(models, texts)
            yield from equalities(models["moesaic"], models[best], texts, f"{against}, {best}")
            times = measure.interleave(
                {name: scorer(models[name], texts) for name in ("moesaic", best)}, rounds, warmup=1
            )
    ratio, interval = times.ratio(best, "moesaic")
    number = QUESTIONS * CHOICES
    said = ", ".join(f"{name} {number / times.median(name):.1f}" for name in times.seconds)
    yield measure.row(
        "eval: speed over lm-eval's hf model, mixture of experts", ratio, "ratio", bar=">= 1.0",
        against=f"{against}, {best}; continuations/s: {said}", interval=interval,
        repeats=times.rounds,
    )  # fmt: skip


def quickest(models: dict[str, Any], texts: Sequence[str]) -> str:
    """Return the name of the quickest `hf` model."""
    others = {name: scorer(one, texts) for name, one in models.items() if name != "moesaic"}
    times = measure.interleave(others, 2, warmup=1, patience_s=60.0)
    return min(others, key=times.median)


def equalities(
    ours: HarnessModel, theirs: HFLM, texts: Sequence[str], against: str
) -> Iterator[measure.Row]:
    """Yield the largest difference of log-likelihoods, and the share of equal answers."""
    asked = [one for seed in range(100, 102) for one in questions(seed, texts)]
    own, other = (model.loglikelihood(asked, disable_tqdm=True) for model in (ours, theirs))
    difference = max(abs(a[0] - b[0]) for a, b in zip(own, other, strict=True))
    yield measure.row(
        f"eval: largest difference of {len(asked)} log-likelihoods", difference, "nats",
        bar=f"<= {TOLERANCE}", against=against, repeats=1,
    )  # fmt: skip
    asked = prompts(100, texts)
    own_texts, other_texts = (m.generate_until(asked, disable_tqdm=True) for m in (ours, theirs))
    pairs = [*zip(answers(own), answers(other), strict=True)]
    pairs_of_texts = [*zip(own_texts, other_texts, strict=True)]
    same = sum(a == b for a, b in pairs) + sum(a == b for a, b in pairs_of_texts)
    total = len(pairs) + len(pairs_of_texts)
    yield measure.row(
        f"eval: equal answers of {total}, choices and greedy texts", same / total, "share",
        bar="== 1", against=against, repeats=1,
    )  # fmt: skip


PARTS = {"evaluation": evaluation}
