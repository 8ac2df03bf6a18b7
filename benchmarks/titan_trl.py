"""TRL's GKD trainer on the CPU, in an environment of its own.

`python -m benchmarks.titan_trl DIRECTORY STUDENT THREADS` reads DIRECTORY/settings.json and the
models DIRECTORY/model and DIRECTORY/STUDENT. It prints a line when it is ready. For each line that
it reads, it takes a training step, and prints its seconds and its loss.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl.experimental.gkd import GKDConfig, GKDTrainer


class Trainer(GKDTrainer):
    """TRL's trainer, which keeps the loss of its last step."""

    loss: Tensor

    def compute_loss(self, *arguments: Any, **settings: Any) -> Any:
        """Return the loss."""
        self.loss = super().compute_loss(*arguments, **settings)
        return self.loss


class Turns(TrainerCallback):
    """Wait before each step for a line of standard input; the end of input ends training."""

    trainer: Trainer
    began = 0.0

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        """Wait for a request."""
        if not sys.stdin.readline():
            sys.exit()
        self.began = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        """Answer it."""
        seconds = time.perf_counter() - self.began
        loss = float(self.trainer.loss.detach())
        print(json.dumps({"seconds": seconds, "loss": loss}), flush=True)


def collate(samples: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Return a batch."""
    tokens = torch.tensor([one["input_ids"] for one in samples])
    labels = tokens.clone()
    labels[:, 0] = -100  # No target, and the trainer divides by the number of targets.
    return {"input_ids": tokens, "labels": labels, "attention_mask": torch.ones_like(tokens)}


def main() -> None:
    """Train until standard input ends."""
    directory, student, threads = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])
    torch.set_num_threads(threads)
    transformers.utils.logging.set_verbosity_error()
    settings = json.loads((directory / "settings.json").read_text())
    models = {
        name: AutoModelForCausalLM.from_pretrained(directory / name, dtype=torch.float32)
        for name in ("model", student)
    }
    for model in models.values():
        model.config.use_cache = False
    turns = Turns()
    config = GKDConfig(
        output_dir=str(directory / f"{student}-trl"), lmbda=0.0, beta=0.0, temperature=1.0,
        use_cpu=True, bf16=False, gradient_checkpointing=False, lr_scheduler_type="constant",
        train_sampling_strategy="sequential", logging_strategy="no", save_strategy="no",
        report_to="none", disable_tqdm=True, **settings["trainer"],
    )  # fmt: skip
    tokens = torch.load(directory / "tokens.pt").tolist()  # Epochs repeat them in order.
    turns.trainer = Trainer(
        models[student], models["model"], config, data_collator=collate, callbacks=[turns],
        train_dataset=Dataset.from_dict({"input_ids": tokens}),
        processing_class=AutoTokenizer.from_pretrained(directory / "tokenizer"),
    )  # fmt: skip
    print(json.dumps({"ready": True}), flush=True)
    turns.trainer.train()


if __name__ == "__main__":
    main()
