"""Models of the theme `serve`: random weights as a Hugging Face directory, and the same as GGUF.

`python benchmarks/serve_models.py DIRECTORY` writes the GGUF file of a Mixtral directory; it needs
the package `gguf` and runs in the environment of llama.cpp. serve.md says how to make that.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

GGUF = "model.gguf"
SEED = 5


@dataclass(frozen=True)
class Shape:
    """Shape of a model; the first is about 2.2 GB in bf16, of which a token uses 0.2."""

    family: str = "mixtral"
    layers: int = 12
    hidden: int = 1024
    ffn: int = 896
    experts: int = 32
    top_k: int = 2
    heads: int = 16
    kv_heads: int = 4
    vocab: int = 4096

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in bf16."""
        head_dim = self.hidden // self.heads
        attention = 2 * self.hidden * (self.hidden + self.kv_heads * head_dim)
        experts = self.experts * (3 * self.ffn + 1) * self.hidden
        return 2 * (self.layers * (attention + experts) + 2 * self.vocab * self.hidden)


def write_model(directory: Path, shape: Shape) -> None:
    """Write a model with random weights as a Hugging Face directory, in bf16."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    torch.manual_seed(SEED)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        model = _make(transformers, shape)
        # The token, and not the mean of its context, decides the routing.
        model.get_input_embeddings().weight.data.mul_(50.0)
        model.save_pretrained(directory)
    finally:
        torch.set_default_dtype(default)


def _make(transformers: Any, shape: Shape) -> Any:
    sizes = {
        "hidden_size": shape.hidden, "intermediate_size": shape.ffn, "vocab_size": shape.vocab,
        "num_hidden_layers": shape.layers, "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads, "num_experts_per_tok": shape.top_k,
        "max_position_embeddings": 4096, "tie_word_embeddings": False,
    }  # fmt: skip
    if shape.family == "olmoe":
        config = transformers.OlmoeConfig(**sizes, num_experts=shape.experts)
        return transformers.OlmoeForCausalLM(config)
    config = transformers.MixtralConfig(
        **sizes, num_local_experts=shape.experts, sliding_window=None
    )
    return transformers.MixtralForCausalLM(config)


def write_gguf(directory: Path) -> None:
    """Write the Mixtral model in `directory` as a GGUF file beside it."""
    import gguf
    from safetensors import safe_open

    config = json.loads((directory / "config.json").read_text())
    files = [safe_open(path, "pt") for path in sorted(directory.glob("*.safetensors"))]
    where = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def read(name: str) -> Tensor:
        tensor: Tensor = where[name].get_tensor(name)
        return tensor

    out = gguf.GGUFWriter(str(directory / GGUF), "llama")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    _write_settings(out, config, gguf)

    def matrix(name: str, tensor: Tensor) -> None:
        raw = tensor.contiguous().view(torch.uint8).numpy()
        out.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType.BF16)

    def vector(name: str, tensor: Tensor) -> None:
        out.add_tensor(name, tensor.float().numpy())

    matrix("token_embd.weight", read("model.embed_tokens.weight"))
    matrix("output.weight", read("lm_head.weight"))
    vector("output_norm.weight", read("model.norm.weight"))
    for layer in range(config["num_hidden_layers"]):
        there, here = f"model.layers.{layer}.", f"blk.{layer}."
        vector(here + "attn_norm.weight", read(there + "input_layernorm.weight"))
        vector(here + "ffn_norm.weight", read(there + "post_attention_layernorm.weight"))
        for one, other, number in (
            ("q_proj", "attn_q", heads), ("k_proj", "attn_k", kv_heads),
            ("v_proj", "attn_v", 0), ("o_proj", "attn_output", 0),
        ):  # fmt: skip
            weight = read(f"{there}self_attn.{one}.weight")
            if number:  # GGUF has the two halves of rotary channels side by side.
                weight = weight.unflatten(0, (number, 2, -1)).transpose(1, 2).flatten(0, 2)
            matrix(f"{here}{other}.weight", weight)
        experts = f"{there}block_sparse_moe."
        vector(here + "ffn_gate_inp.weight", read(experts + "gate.weight"))
        for one, other in (("w1", "gate"), ("w3", "up"), ("w2", "down")):
            every = range(config["num_local_experts"])
            stacked = [read(f"{experts}experts.{expert}.{one}.weight") for expert in every]
            matrix(f"{here}ffn_{other}_exps.weight", torch.stack(stacked))
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


def _write_settings(out: Any, config: dict[str, Any], gguf: Any) -> None:
    """Write sizes, and a vocabulary that names every id."""
    vocab, hidden = config["vocab_size"], config["hidden_size"]
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(hidden)
    out.add_block_count(config["num_hidden_layers"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(config["num_attention_heads"])
    out.add_head_count_kv(config["num_key_value_heads"])
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_dimension_count(hidden // config["num_attention_heads"])
    out.add_rope_freq_base(config["rope_parameters"]["rope_theta"])
    out.add_expert_count(config["num_local_experts"])
    out.add_expert_used_count(config["num_experts_per_tok"])
    out.add_vocab_size(vocab)
    out.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    special = ["<unk>", "<s>", "</s>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    words = [f"t{index}" for index in range(vocab - len(special) - len(bytes_))]
    out.add_tokenizer_model("llama")
    out.add_token_list([*special, *bytes_, *words])
    out.add_token_scores([0.0] * vocab)
    out.add_token_types([2, 3, 3] + [6] * len(bytes_) + [1] * len(words))
    out.add_bos_token_id(1)
    out.add_eos_token_id(2)


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]))
