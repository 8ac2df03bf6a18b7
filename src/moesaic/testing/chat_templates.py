"""Byte tokenizers with chat templates and a few special tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

SPECIAL_TOKENS = ("<s>", "</s>", "<|start|>", "<|end|>")


def write_tokenizer(directory: Path, template: object = None, **settings: Any) -> Path:
    """Write a tokenizer of bytes and `SPECIAL_TOKENS`, 260 ids, with its config to `directory`."""
    directory.mkdir(exist_ok=True)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    stated = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"}, **settings,
    }  # fmt: skip
    if template is not None:
        stated["chat_template"] = template
    (directory / "tokenizer_config.json").write_text(json.dumps(stated))
    return directory


CHATML = """{%- for message in messages %}
{{- '<|start|>' + message.role + '\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content + '<|end|>' }}{% endgeneration %}
{%- else %}
{{- message.content + '<|end|>' }}
{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant\\n' }}{% endif %}"""

HEADERS = """{%- for message in messages %}
{%- if loop.first %}{{ bos_token }}{% endif %}
{{- '<|start|>' + message.role + '<|end|>\\n\\n' }}
{%- if message.role == 'assistant' %}
{%- generation %}{{ message.content | trim + '</s>' }}{% endgeneration %}
{%- else %}
{{- message.content | trim + '</s>' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|end|>\\n\\n' }}{% endif %}"""

SYSTEM_FIRST = """{%- set ns = namespace(system='') %}
{%- for message in messages if message.role == 'system' %}
{%- set ns.system = ns.system + message.content %}
{%- endfor %}
{{- bos_token + ns.system }}
{%- for message in messages %}
{%- if message.role == 'user' %}{{ '<|start|>' + message.content }}{% endif %}
{%- if message.role == 'assistant' %}{{ '<|end|>' }}
{%- generation %}{{ message.content + eos_token }}{% endgeneration %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|end|>' }}{% endif %}"""

BRACKETS = """{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content + '\\n\\n' %}{% set rest = messages[1:] %}
{%- else %}
{%- set system = '' %}{% set rest = messages %}
{%- endif %}
{{- bos_token }}
{%- for message in rest %}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
{{- raise_exception('user and assistant must take turns') }}
{%- endif %}
{%- if message.role == 'user' %}
{{- '[INST] ' + (system if loop.first else '') + message.content + ' [/INST]' }}
{%- else %}
{%- generation %}{{ ' ' + message.content + eos_token }}{% endgeneration %}
{%- endif %}
{%- endfor %}"""

TEMPLATES = {
    "chatml": CHATML, "headers": HEADERS, "system first": SYSTEM_FIRST, "brackets": BRACKETS,
}  # fmt: skip
"""Templates in the styles of ChatML, Llama 3, DeepSeek and Mistral, with generation marks."""


def without_generation_marks(template: str) -> str:
    """Return `template` without its generation marks."""
    return template.replace("{%- generation %}", "{#- #}").replace("{% endgeneration %}", "{# #}")
