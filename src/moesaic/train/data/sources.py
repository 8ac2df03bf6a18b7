"""Where the text of a job is, and what shows without reading it; torch is not needed for that."""

from __future__ import annotations

from moesaic.facts.job import DataConfig
from moesaic.models.tokenizer import open_tokenizer
from moesaic.train.data.chat import Chat
from moesaic.train.data.text import TextSource, find_text


def check_text(config: DataConfig) -> None:
    """Raise what opening `config` would, as far as that shows without reading text."""
    find_sources(config)
    if config.format == "chat":
        Chat(config, open_tokenizer(config.tokenizer, config.end_token))


def find_sources(config: DataConfig) -> list[TextSource]:
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
