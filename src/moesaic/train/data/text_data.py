"""Text data of a job: opened once per run on every rank, then indexed by sample."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.base.errors import DataError
from moesaic.dist.world import World
from moesaic.facts.job import ControlConfig, DataConfig
from moesaic.facts.job.credibility import LABELS
from moesaic.kernels.randomness import uniform
from moesaic.models.control import ControlPrompts
from moesaic.models.hf.origin import TOKENIZER
from moesaic.models.tokenizer import Tokenizer, open_tokenizer
from moesaic.train.data.batch import PackedSamples, Samples
from moesaic.train.data.chat import ChatEncoder
from moesaic.train.data.chat_packing import ConversationSamples
from moesaic.train.data.control import ControlEncoder, open_control
from moesaic.train.data.control_samples import ControlSamples
from moesaic.train.data.corpus import (
    DEFAULT_CACHE,
    Corpus,
    ProgressCallback,
    encode,
    open_corpus,
)
from moesaic.train.data.labelled import LabelEncoder, LabelledSamples
from moesaic.train.data.rank_zero_first import make_progress_log, run_rank_zero_first
from moesaic.train.data.sources import TextSource, find_sources
from moesaic.train.data.text import NO_LABEL

_CHUNK = 1 << 20
_CHARACTERS_PER_TOKEN = 4
"""Characters of a typical token."""


@dataclass(frozen=True)
class TextData:
    """Text of a run, ready to sample."""

    tokenizer: Tokenizer
    train: Samples
    validation: Samples | None
    digest: str
    """Hash of everything that determines a sample by its index: text, tokenizer, seed and packing.
    """

    @classmethod
    def open(
        cls,
        config: DataConfig,
        seed: int,
        world: World,
        progress: Callable[[str], None] | None = None,
        control: ControlConfig | None = None,
    ) -> TextData:
        """Open the text of `config`; tokenise it first if the cache lacks it.

        Args:
            config: the job's data section.
            seed: seed of the sample order and of the choice of validation documents.
            world: the ranks; all of them call this.
            progress: receives messages about tokenising, on rank 0.
            control: attributes that prompts name; None: there are no prompts.
        """
        log = progress if progress is not None and world.is_rank_zero else lambda _: None
        return run_rank_zero_first(
            world,
            f"data.path = '{config.path}'",
            lambda beat: _open(config, seed, beat, log, control),
            lambda data: data.digest,
        )

    def files(self) -> dict[str, bytes]:
        """Return the tokenizer's files, by path in a run's directory."""
        return {f"{TOKENIZER}/{name}": data for name, data in self.tokenizer.files().items()}


def _open(
    config: DataConfig,
    seed: int,
    heartbeat: Callable[[], None],
    log: Callable[[str], None],
    control: ControlConfig | None,
) -> TextData:
    sources = find_sources(config)
    tokenizer, encoder = _open_encoder(config, control, sources[0])
    cache = Path(config.cache or DEFAULT_CACHE).expanduser()
    report = make_progress_log(heartbeat, log)
    corpora = [
        open_corpus(source, tokenizer, cache, _progress_callback(source, report), encoder)
        for source in sources
    ]
    prompts = None
    if isinstance(encoder, ControlEncoder):
        encoder.check(corpora[0])
        prompts = encoder.prompts
    samples = [
        _make_samples(config, seed, *part, log, prompts)
        for part in _split_validation(config, seed, corpora, log)
    ]
    validation = samples[1] if len(samples) > 1 else None
    fields = [
        tokenizer.digest, *(corpus.digest for corpus in corpora),
        seed, config.validation_share, config.sequence, config.packing,
    ]  # fmt: skip
    if prompts is not None:
        fields += ["prompts", *prompts.genres]
    digest = hashlib.sha256("\n".join(map(str, fields)).encode()).hexdigest()
    return TextData(tokenizer, samples[0], validation, digest)


def _open_encoder(
    config: DataConfig, control: ControlConfig | None, train: TextSource
) -> tuple[Tokenizer, ChatEncoder | ControlEncoder | LabelEncoder | None]:
    """Return the tokenizer, and the encoder of documents that are more than a text."""
    if control is not None:
        return open_control(config, control, train)
    tokenizer = open_tokenizer(config.tokenizer, config.end_token)
    if config.format == "chat":
        return tokenizer, ChatEncoder(config, tokenizer)
    return tokenizer, LabelEncoder(tokenizer) if config.format == "labelled" else None


def read_start(
    config: DataConfig, control: ControlConfig | None, cache: Path, num_characters: int
) -> Iterator[str]:
    """Read and encode the first documents of each text, with about `num_characters`, and yield a
    clause about each; raise as opening would."""
    sources = find_sources(config)
    tokenizer, encoder = _open_encoder(config, control, sources[0])
    for source in sources:
        label, documents, tokens = f"{source.key} = '{source.path}'", 0, 0
        try:
            for chunk in encode(source, tokenizer, cache, encoder, num_characters):
                documents, tokens = documents + len(chunk.lengths), tokens + len(chunk.tokens)
                if tokens >= num_characters // _CHARACTERS_PER_TOKEN:
                    break
        except DataError as error:
            raise DataError(f"{label}: {error}") from None
        yield f"the first {tokens:,} tokens of {label} ({documents:,} documents)"


def _progress_callback(source: TextSource, report: Callable[[str], None]) -> ProgressCallback:
    def watch(num_documents: int, num_tokens: int) -> None:
        report(f"tokenising '{source.path}': {num_documents:,} documents, {num_tokens:,} tokens")

    return watch


def _split_validation(
    config: DataConfig, seed: int, corpora: list[Corpus], log: Callable[[str], None]
) -> list[tuple[str, Corpus, NDArray[np.bool_] | None]]:
    """Return training and validation data: origin for messages, corpus, selected documents."""
    path, fraction = f"data.path = '{config.path}'", config.validation_share
    if len(corpora) > 1:
        validation_origin = f"data.validation_path = '{config.validation_path}'"
        return [(path, corpora[0], None), (validation_origin, corpora[1], None)]
    if not fraction:
        return [(path, corpora[0], None)]
    held_out = select_held_out(corpora[0].num_documents, seed, fraction)
    if corpora[0].labels is not None:
        held_out = keep_pairs(held_out, corpora[0].labels)
    if corpora[0].is_plain and (not held_out.any() or len(held_out) == 1):
        return _split_end(config, corpora[0], log)
    num_held_out = int(held_out.sum())
    train_origin = (
        f"{path} without {num_held_out} of its {len(held_out)} documents (data.validation_share)"
    )
    validation_origin = (
        f"data.validation_share = {fraction} ({num_held_out} of {len(held_out)} documents)"
    )
    return [(train_origin, corpora[0], ~held_out), (validation_origin, corpora[0], held_out)]


def _split_end(
    config: DataConfig, corpus: Corpus, log: Callable[[str], None]
) -> list[tuple[str, Corpus, NDArray[np.bool_] | None]]:
    """Return training and validation data as `_split_validation` does, cut near the end of a text
    with too few documents to draw from."""
    total = int(corpus.bounds[-1])
    num_held_out = min(max(round(total * config.validation_share), 1), total - 1)
    cut = total - num_held_out
    parts = replace(corpus, bounds=np.unique(np.append(corpus.bounds, cut)))
    held_out = parts.bounds[:-1] >= cut
    share = f"data.validation_share = {config.validation_share}"
    last = f"last {num_held_out:,} of {total:,} tokens"
    documents = "1 document" if corpus.num_documents == 1 else f"{corpus.num_documents} documents"
    log(f"{share}: the text has {documents}, so its {last} are held out")
    path = f"data.path = '{config.path}' without its {last} (data.validation_share)"
    return [(path, parts, ~held_out), (f"{share} (the {last})", parts, held_out)]


def select_held_out(num_documents: int, seed: int, share: float) -> NDArray[np.bool_]:
    """Return true for held-out documents; each is drawn independently of the others."""
    held_out = np.empty(num_documents, np.bool_)
    zero = torch.zeros(1, dtype=torch.int64)
    for start in range(0, num_documents, _CHUNK):
        index = torch.arange(start, min(start + _CHUNK, num_documents))
        held_out[start : start + _CHUNK] = (
            uniform(seed, "validation", 0, index, zero) < share
        ).numpy()
    return held_out


def keep_pairs(held_out: NDArray[np.bool_], labels: NDArray[np.int8]) -> NDArray[np.bool_]:
    """Return held-out documents, of which a generated text follows the original before it.

    Both begin alike, so one half in training would give away the other.
    """
    is_second = np.zeros(len(labels), np.bool_)
    is_second[1:] = (labels[:-1] == LABELS.index("original")) & (
        labels[1:] == LABELS.index("generated")
    )
    return np.where(is_second, np.roll(held_out, 1), held_out)


def _make_samples(
    config: DataConfig,
    seed: int,
    origin: str,
    corpus: Corpus,
    selected: NDArray[np.bool_] | None,
    log: Callable[[str], None],
    prompts: ControlPrompts | None,
) -> Samples:
    if selected is not None and not selected.any():
        raise DataError(
            f"{origin} gives no text: documents are held out as a whole; change "
            "data.validation_share, or name data.validation_path"
        )
    if corpus.labels is not None:
        return _make_labelled(config, seed, origin, corpus, selected, log)
    if prompts is not None:
        return _make_control_samples(config, seed, origin, corpus, selected, prompts, log)
    if corpus.loss_mask is None:
        packed = PackedSamples(corpus, selected, config.sequence, config.packing, seed)
        samples: Samples = packed
        more = "raise it" if origin.startswith("data.validation_share") else "give more text"
        problem = (
            f"gives {packed.num_tokens} tokens, but one sample takes data.sequence + 1 = "
            f"{config.sequence + 1}: {more}, or shorten data.sequence"
        )
    else:
        samples = conversations = ConversationSamples(corpus, selected, config.sequence, seed)
        problem = (
            f"has {conversations.num_conversations} conversations, none with an answer within "
            f"data.sequence = {config.sequence} tokens: raise it"
        )
        if len(samples):
            log(f"{origin}: {_describe_conversations(conversations, config.sequence)}")
    if not len(samples):
        raise DataError(f"{origin} {problem}")
    return samples


def _make_labelled(
    config: DataConfig,
    seed: int,
    origin: str,
    corpus: Corpus,
    selected: NDArray[np.bool_] | None,
    log: Callable[[str], None],
) -> LabelledSamples:
    try:
        samples = LabelledSamples(corpus, selected, config.sequence, seed)
    except DataError as error:
        raise DataError(f"{origin} {error}") from None
    generated, original, others = (samples.counts[label] for label in (0, 1, NO_LABEL))
    if not (generated and original):
        raise DataError(
            f"{origin} has {original} original and {generated} generated texts: give some of both "
            "('label' 1 and 0), as moesaic generate --adversarial writes them"
        )
    more = f", {others:,} pieces of text without a label" if others else ""
    log(
        f"{origin}: {original:,} original and {generated:,} generated texts{more} in "
        f"{len(samples):,} samples, {samples.fill_ratio:.0%} full"
    )
    return samples


def _make_control_samples(
    config: DataConfig,
    seed: int,
    origin: str,
    corpus: Corpus,
    selected: NDArray[np.bool_] | None,
    prompts: ControlPrompts,
    log: Callable[[str], None],
) -> Samples:
    samples = ControlSamples(corpus, selected, prompts, config.sequence, seed)
    if samples.num_too_long:
        raise DataError(
            f"{origin}: {samples.num_too_long:,} of {samples.num_texts:,} texts are longer with "
            f"their prompts than data.sequence = {config.sequence}, and samples hold whole texts: "
            f"set data.sequence to {samples.longest}, or split these texts"
        )
    log(f"{origin}: {samples.num_texts:,} texts in {len(samples):,} samples")
    return samples


def _describe_conversations(samples: ConversationSamples, sequence: int) -> str:
    """Return how many conversations there are, and how many were truncated or dropped."""
    text = (
        f"{samples.num_conversations:,} conversations in {len(samples):,} samples, "
        f"{samples.fill_ratio:.0%} full"
    )
    if samples.num_truncated or samples.num_dropped:
        text += (
            f"; longer than data.sequence = {sequence}: {samples.num_truncated:,} have "
            f"truncated answers, {samples.num_dropped:,} have no answer left and are dropped "
            "(raise it to keep them whole)"
        )
    return text
