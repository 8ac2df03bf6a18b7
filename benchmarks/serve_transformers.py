"""transformers on the theme's models, whole in memory or with layers on disk by accelerate.

`python serve_transformers.py SETTINGS-AS-JSON` prints a line when it is ready. For each line of
JSON that it reads, it processes prompts and given continuations, and prints seconds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import torch
import transformers


def load(settings: dict[str, Any]) -> Any:
    """Return the model; with `offload`, its layers stay on disk."""
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(settings["threads"])
    dtype = getattr(torch, settings["dtype"])
    if "offload" not in settings:
        model = transformers.AutoModelForCausalLM.from_pretrained(settings["path"], dtype=dtype)
    else:
        layers = transformers.AutoConfig.from_pretrained(settings["path"]).num_hidden_layers
        places = dict.fromkeys(("model.embed_tokens", "model.norm", "model.rotary_emb"), "cpu")
        places |= {f"model.layers.{layer}": "disk" for layer in range(layers)}
        model = transformers.AutoModelForCausalLM.from_pretrained(
            settings["path"], dtype=dtype, device_map={**places, "lm_head": "cpu"},
            offload_folder=settings["offload"],
        )  # fmt: skip
    model.set_experts_implementation("eager")
    return model.eval()


@torch.inference_mode()
def run(model: Any, work: dict[str, Any]) -> dict[str, float]:
    """Process prompts of one length, then a token of each stream at a time; return seconds."""
    began = time.perf_counter()
    out = model(input_ids=torch.tensor(work["prompts"]), use_cache=True, logits_to_keep=1)
    prefill_s = time.perf_counter() - began
    began = time.perf_counter()
    for step in range(len(work["texts"][0])):
        tokens = torch.tensor([[text[step]] for text in work["texts"]])
        out = model(input_ids=tokens, past_key_values=out.past_key_values, use_cache=True)
    return {"prefill_s": prefill_s, "decode_s": time.perf_counter() - began}


def main() -> None:
    """Serve requests from standard input."""
    model = load(json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(run(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
