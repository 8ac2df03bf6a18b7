"""The text of a job: opened once per run, on every rank, and from then on a function of indices."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from moesaic.base.errors import DataError
from moesaic.dist.world import World
from moesaic.facts.job import DataConfig
from moesaic.models.tokenizer import Tokenizer, check_vocabulary, open_tokenizer
from moesaic.nn.randomness import uniform
from moesaic.train.data.agreement import work_in_turn
from moesaic.train.data.batch import PackedSamples, Samples, make_stream
from moesaic.train.data.chat import Chat
from moesaic.train.data.corpus import DEFAULT_CACHE, Beat, Corpus, open_corpus
from moesaic.train.data.text import TextSource, find_text
from moesaic.train.data.whole import WholeSamples

_CHUNK = 1 << 20
_MESSAGE_S = 2.0


@dataclass(frozen=True)
class TextData:
    """Everything a run needs of its text."""

    tokenizer: Tokenizer
    train: Samples
    validation: Samples | None
    digest: str
    """Hash of all that decides what sample an index stands for: text, tokenizer, seed, packing."""

    @classmethod
    def open(
        cls,
        config: DataConfig,
        seed: int,
        world: World,
        progress: Callable[[str], None] | None = None,
    ) -> TextData:
        """Open the text of `config`, tokenising it first if the cache does not have it.

        Args:
            config: the job's data section.
            seed: of the order of samples and of the choice of validation documents.
            world: the ranks; all of them call this.
            progress: told on rank 0, in words, how tokenising goes.
        """
        tell = progress if progress is not None and world.leads else lambda _: None
        return work_in_turn(
            world,
            f"data.path = '{config.path}'",
            lambda beat: _open(config, seed, beat, tell),
            lambda data: data.digest,
        )

    def check_vocab(self, vocab: int) -> None:
        """Raise unless a model with `vocab` embeddings can take every token."""
        check_vocabulary(vocab, self.tokenizer)


def check_text(config: DataConfig) -> None:
    """Raise what opening `config` would, as far as that shows without reading text."""
    _find_sources(config)
    if config.format == "chat":
        Chat(config, open_tokenizer(config.tokenizer, config.end_token))


def _open(
    config: DataConfig, seed: int, beat: Callable[[], None], tell: Callable[[str], None]
) -> TextData:
    tokenizer = open_tokenizer(config.tokenizer, config.end_token)
    cache = Path(config.cache or DEFAULT_CACHE).expanduser()
    sources = _find_sources(config)
    chat = Chat(config, tokenizer) if config.format == "chat" else None
    corpora = [
        open_corpus(source, tokenizer, cache, _watch(source, beat, tell), chat)
        for source in sources
    ]
    samples = [_sample(config, seed, *part, tell) for part in _parts(config, seed, corpora)]
    validation = samples[1] if len(samples) > 1 else None
    decisive = [
        tokenizer.digest, *(corpus.digest for corpus in corpora),
        seed, config.validation_share, config.sequence, config.packing,
    ]  # fmt: skip
    digest = hashlib.sha256("\n".join(map(str, decisive)).encode()).hexdigest()
    return TextData(tokenizer, samples[0], validation, digest)


def _find_sources(config: DataConfig) -> list[TextSource]:
    """The training text and, if it is separate, the validation text."""
    kind, text_key = config.format, config.text_key
    sources = [find_text("data.path", config.path, kind, text_key, config.split)]
    if config.validation_path is not None:
        sources.append(
            find_text(
                "data.validation_path", config.validation_path, kind, text_key,
                config.validation_split,
            )
        )  # fmt: skip
    return sources


def _watch(source: TextSource, beat: Callable[[], None], tell: Callable[[str], None]) -> Beat:
    last = time.monotonic()

    def watch(num_documents: int, num_tokens: int) -> None:
        nonlocal last
        beat()
        now = time.monotonic()
        if now - last > _MESSAGE_S:
            last = now
            tell(f"tokenising '{source.path}': {num_documents:,} documents, {num_tokens:,} tokens")

    return watch


def _parts(
    config: DataConfig, seed: int, corpora: list[Corpus]
) -> list[tuple[str, Corpus, NDArray[np.bool_] | None]]:
    """What to train on and what to validate on: origin in words, corpus, chosen documents."""
    path, share = f"data.path = '{config.path}'", config.validation_share
    if len(corpora) > 1:
        other = f"data.validation_path = '{config.validation_path}'"
        return [(path, corpora[0], None), (other, corpora[1], None)]
    if not share:
        return [(path, corpora[0], None)]
    held_out = choose_documents(corpora[0].num_documents, seed, share)
    num_held = int(held_out.sum())
    rest = f"{path} without {num_held} of its {len(held_out)} documents (data.validation_share)"
    other = f"data.validation_share = {share} ({num_held} of {len(held_out)} documents)"
    return [(rest, corpora[0], ~held_out), (other, corpora[0], held_out)]


def choose_documents(num_documents: int, seed: int, share: float) -> NDArray[np.bool_]:
    """Which documents are held out: each by a draw of its own, whatever the others are."""
    chosen = np.empty(num_documents, np.bool_)
    zero = torch.zeros(1, dtype=torch.int64)
    for start in range(0, num_documents, _CHUNK):
        index = torch.arange(start, min(start + _CHUNK, num_documents))
        chosen[start : start + _CHUNK] = (
            uniform(seed, "validation", 0, index, zero) < share
        ).numpy()
    return chosen


def _sample(
    config: DataConfig,
    seed: int,
    origin: str,
    corpus: Corpus,
    chosen: NDArray[np.bool_] | None,
    tell: Callable[[str], None],
) -> Samples:
    if chosen is not None and not chosen.any():
        raise DataError(
            f"{origin} gives no text: a document is held out whole or not at all (a text file is "
            "one); change data.validation_share, or name data.validation_path"
        )
    if corpus.counted is not None:
        return _sample_talks(config, seed, origin, corpus, chosen, tell)
    stream = make_stream(corpus, chosen)
    samples = PackedSamples(stream, config.sequence, config.packing, seed)
    if not len(samples):
        raise DataError(
            f"{origin} gives {stream.num_tokens} tokens, but one sample takes data.sequence + 1 = "
            f"{config.sequence + 1}: give more text, or shorten data.sequence"
        )
    return samples


def _sample_talks(
    config: DataConfig,
    seed: int,
    origin: str,
    corpus: Corpus,
    chosen: NDArray[np.bool_] | None,
    tell: Callable[[str], None],
) -> WholeSamples:
    """The samples of conversations, and a word on what became of these."""
    samples = WholeSamples(corpus, chosen, config.sequence, seed)
    if not len(samples):
        raise DataError(
            f"{origin}: none of {samples.num_conversations} conversations comes to an answer "
            f"within data.sequence = {config.sequence} tokens: raise it"
        )
    told = (
        f"{origin}: {samples.num_conversations:,} conversations ({', '.join(corpus.forms)}) in "
        f"{len(samples):,} samples, {samples.filled:.0%} full"
    )
    if samples.num_cut or samples.num_left_out:
        told += (
            f"; longer than data.sequence = {config.sequence}: {samples.num_cut:,} lose the end "
            f"of their answers, {samples.num_left_out:,} have none within it and are left out "
            "(raise it to have them whole)"
        )
    tell(told)
    return samples
