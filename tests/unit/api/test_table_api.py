"""Tables of the Python API: rows as numpy arrays and torch tensors, in anyone's own loop."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import moesaic
from moesaic.api.inspection import inspect_path
from moesaic.base.errors import ConfigError, StoreError

KEYS = [3, -7, 3, 2**62]


def test_numpy_and_torch_give_equal_rows() -> None:
    tables = [moesaic.Table.open(dim=4, optimizer="sgd", lr=0.5, seed=1) for _ in range(2)]
    grads = np.arange(16, dtype=np.float32).reshape(4, 4)
    before = tables[0].pull(np.array(KEYS))
    tables[0].push(np.array(KEYS), grads, clicks=np.array([1, 0, 0, 1]))
    tables[1].push(torch.tensor(KEYS), torch.from_numpy(grads), clicks=torch.tensor([1, 0, 0, 1]))
    rows, tensor = tables[0].pull(np.array(KEYS)), tables[1].pull(torch.tensor(KEYS))
    assert isinstance(rows, np.ndarray)
    assert isinstance(tensor, Tensor)
    np.testing.assert_array_equal(rows, tensor.numpy())
    total = grads.copy()
    total[[0, 2]] = grads[0] + grads[2]  # Equal keys.
    np.testing.assert_allclose(rows, before - 0.5 * total, rtol=1e-6)
    assert len(tables[0]) == len(tables[1]) == 3


def train_bag(bag: Any, step: Any, batches: list[tuple[Tensor, Tensor, Tensor]]) -> list[float]:
    """Train a network over the sums of a bag; return the losses."""
    torch.manual_seed(0)
    network = nn.Linear(4, 1, dtype=torch.float64)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    losses = []
    for keys, offsets, labels in batches:
        optimizer.zero_grad()
        loss = nn.functional.binary_cross_entropy_with_logits(
            network(bag(keys, offsets)).squeeze(1), labels
        )
        loss.backward()
        optimizer.step()
        step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("fused", [False, True])
def test_a_bag_trains_like_embedding_bag(fused: bool) -> None:
    generator = torch.Generator().manual_seed(2)
    batches = [
        (
            torch.randint(0, 20, (24,), generator=generator),
            torch.arange(8) * 3,
            torch.randint(0, 2, (8,), generator=generator).double(),
        )
        for _ in range(5)
    ]
    table = moesaic.Table.open(dim=4, dtype="float64", optimizer="adagrad", lr=0.3, epsilon=1e-10)
    plain = nn.EmbeddingBag.from_pretrained(
        table.pull(torch.arange(20)), mode="sum", freeze=False, sparse=True
    )
    optimizer = torch.optim.Adagrad(plain.parameters(), lr=0.3)

    def update() -> None:
        optimizer.step()
        optimizer.zero_grad()

    losses = train_bag(
        moesaic.TableBag(table, fused=fused), (lambda: None) if fused else table.step, batches
    )
    assert losses == pytest.approx(train_bag(plain, update, batches), rel=1e-9)
    rows = table.pull(torch.arange(20))
    np.testing.assert_allclose(rows.numpy(), plain.weight.detach().numpy(), rtol=1e-9)


def change(table: moesaic.Table, seed: int) -> None:
    """Push random gradients with clicks, and end a day."""
    random = np.random.default_rng(seed)
    keys = random.integers(0, 60, 40)
    table.push(keys, random.normal(size=(40, 3)).astype(np.float32), random.integers(0, 2, 40))
    table.end_day()


SETTINGS: dict[str, Any] = {"optimizer": "adam", "admit_count": 2, "evict_days": 3, "init_std": 0.5}


def test_a_saved_table_goes_on_as_if_it_had_never_closed(tmp_path: Path) -> None:
    whole = moesaic.Table.open(dim=3, seed=5, **SETTINGS)
    for seed in range(6):
        with moesaic.Table.open(tmp_path / "rows", dim=3, seed=5, **SETTINGS) as table:
            change(table, seed)
            table.save()
            change(table, 99)  # Not saved.
        change(whole, seed)
    with moesaic.Table.open(tmp_path / "rows", read_only=True) as table:
        assert len(table) == len(whole) > 10
        np.testing.assert_array_equal(table.pull(range(60)), whole.pull(range(60)))
        for forbidden in (partial(change, table, 0), table.step, table.end_day, table.save):
            with pytest.raises(ConfigError, match="read-only"):
                forbidden()


def test_two_saves_of_one_opening(tmp_path: Path) -> None:
    with moesaic.Table.open(tmp_path / "rows", dim=3) as table:
        for seed in range(2):
            change(table, seed)
            table.save()
        rows = table.pull(range(60))
    with moesaic.Table.open(tmp_path / "rows", lr=0.5) as table:
        np.testing.assert_array_equal(table.pull(range(60)), rows)


def test_threads_pull_from_a_read_only_table(tmp_path: Path) -> None:
    with moesaic.Table.open(tmp_path / "rows", dim=8) as table:
        table.push(np.arange(5000), np.ones((5000, 8)))
        table.save()
    with moesaic.Table.open(tmp_path / "rows", read_only=True) as table:
        batches = list(np.random.default_rng(0).integers(0, 9000, (40, 5000)))
        expected = [table.pull(keys) for keys in batches]
        with ThreadPoolExecutor(4) as pool:
            for rows, found in zip(expected, pool.map(table.pull, batches), strict=True):
                np.testing.assert_array_equal(found, rows)


def test_rows_beyond_memory_are_on_the_drive(tmp_path: Path) -> None:
    keys, grads = np.arange(20_000), np.ones((20_000, 64), np.float32)
    drive: dict[str, Any] = {"host": "5MiB", "ssd": str(tmp_path / "ssd")}
    plain = moesaic.Table.open(dim=64)
    parts = [slice(start, start + 1000) for start in range(0, len(keys), 1000)]

    def check(table: moesaic.Table) -> None:
        for part in parts:
            np.testing.assert_array_equal(table.pull(keys[part]), plain.pull(keys[part]))

    with moesaic.Table.open(tmp_path / "rows", dim=64, **drive) as table:
        for part in parts:
            table.push(keys[part], grads[part])
            plain.push(keys[part], grads[part])
        assert len(table) == 20_000 > 2 * table.stats().rows_in_memory
        check(table)
        table.save()
    with moesaic.Table.open(tmp_path / "rows", read_only=True, **drive) as table:
        assert len(table) == 20_000 > 2 * table.stats().rows_in_memory
        check(table)
    with pytest.raises(ConfigError, match="the table is closed: open it again"):
        table.pull(keys)
    with moesaic.Table.open(tmp_path / "rows") as table:
        check(table)


def test_mistakes_name_the_key(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("text")
    with moesaic.Table.open(tmp_path / "rows", dim=3, **SETTINGS) as table:
        table.save()
        with pytest.raises(StoreError, match="is used by process"):
            moesaic.Table.open(tmp_path / "rows")
    mistakes: list[tuple[dict[str, Any], str]] = [
        ({}, "dim is missing"),
        ({"dim": 0}, "dim = 0: a row needs an integer from 1"),
        ({"dim": "3"}, "dim = '3': a row needs an integer from 1"),
        ({"dim": 3, "dtype": "float16"}, "dtype = 'float16': use 'float32' or 'float64'"),
        ({"dim": 3, "lr": -1}, "lr = -1"),
        ({"dim": 3, "rate": 1}, "unknown key 'rate'"),
        ({"read_only": True}, "read_only needs path"),
        ({"path": tmp_path / "none", "read_only": True}, "holds no table"),
        ({"path": tmp_path / "none"}, "none' holds no table yet: check the path, or pass dim"),
        ({"path": tmp_path, "dim": 3}, "holds no table: give"),
        ({"path": tmp_path / "file", "dim": 3}, "holds no table: give"),
        ({"path": tmp_path / "rows", "dim": 4}, "dim = 4, but the table in .* has 3: remove dim"),
        ({"path": tmp_path / "rows", "optimizer": "sgd"}, "optimizer = sgd, but"),
        ({"path": tmp_path / "rows", "init_std": 0.1}, "init_std = 0.1, but"),
    ]
    for arguments, text in mistakes:
        with pytest.raises(ConfigError, match=text):
            moesaic.Table.open(**arguments)
    with pytest.raises(ConfigError, match="in memory alone"):
        moesaic.Table.open(dim=3).save()
    table = moesaic.Table.open(dim=3)
    for clicks in (float("nan"), 2.0, -1.0):
        with pytest.raises(ConfigError, match=f"clicks of table 'table' hold {clicks}: pass 1"):
            table.push([1, 2], np.ones((2, 3)), [1.0, clicks])
    moesaic.TableBag(table)(torch.tensor([[1], [2]])).sum().backward()
    for call in (table.save, table.end_day):
        with pytest.raises(ConfigError, match=r"gradients of 1 look-ups wait for step\(\)"):
            call()


def test_a_saved_table_is_inspected(tmp_path: Path) -> None:
    with moesaic.Table.open(tmp_path / "rows", dim=3) as table:
        keys = moesaic.hash_ids(["a", "b", "c"], slot=1)
        table.push(torch.from_numpy(keys), torch.ones(3, 3, dtype=torch.bfloat16), [1, 0, 0])
        table.save()
    facts = inspect_path(tmp_path / "rows", verify=True)
    assert (facts["kind"], facts["verified"], facts["table"]["rows"]) == ("table", True, 3)
    assert facts["table"]["hottest"][0]["key"] == keys[0]
