"""Train rows of an embedding table in a plain PyTorch loop, save them, and serve them.

`moesaic.TableBag` stands where `torch.nn.EmbeddingBag(mode="sum")` stood. Keys are any int64, such
as hashes of strings: there is no vocabulary, and the table grows as keys appear.

Run it with a directory for the table: python own_loop.py rows
"""

import sys

import torch
from torch import nn

import moesaic

SLOTS, DIM, BATCH = 3, 8, 512
generator = torch.Generator().manual_seed(0)
tastes = torch.randn(10_000, generator=generator)  # What each key really adds to the logit.


def next_batch() -> tuple[torch.Tensor, torch.Tensor]:
    """Return the keys of a batch, one for each sample and slot, and clicks."""
    ids = (10_000 ** torch.rand(BATCH, SLOTS, generator=generator)).long()  # Few are frequent.
    clicks = torch.rand(BATCH, generator=generator) < tastes[ids].sum(1).sigmoid()
    keys = ids * SLOTS + torch.arange(SLOTS)  # A key for each id and slot.
    return keys, clicks.float()


def train(directory: str) -> None:
    """Train for 200 steps, and save the table twice."""
    with moesaic.Table.open(directory, dim=DIM, optimizer="rowwise-adagrad", lr=0.1) as table:
        bag = moesaic.TableBag(table)
        network = nn.Sequential(nn.Linear(SLOTS * DIM, 16), nn.ReLU(), nn.Linear(16, 1))
        optimizer = torch.optim.Adam(network.parameters(), lr=3e-3)
        losses = []
        for step in range(1, 201):
            keys, clicks = next_batch()
            sums = bag(keys.reshape(-1, 1)).view(BATCH, -1)  # A bag for each sample and slot.
            logits = network(sums).squeeze(1)
            loss = nn.functional.binary_cross_entropy_with_logits(logits, clicks)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            table.step()  # Each row is updated once, by the sum of its gradients.
            losses.append(loss.item())
            if step % 50 == 0:
                print(f"step {step}: loss {sum(losses[-50:]) / 50:.3f}, {len(table):,} rows")
            if step % 100 == 0:
                table.save()  # Only rows that changed are written.


def serve(directory: str) -> None:
    """Read rows; a key that was never seen has its first value."""
    with moesaic.Table.open(directory, read_only=True) as table:
        keys, _ = next_batch()
        print(f"{len(table):,} rows; norms {table.pull(keys[:2, 0]).norm(dim=1).tolist()}")


if __name__ == "__main__":
    place = sys.argv[1] if len(sys.argv) > 1 else "rows"
    train(place)
    serve(place)
