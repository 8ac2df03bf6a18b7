"""Look-ups and updates of a table against torch, and against plain loops."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moesaic.base.errors import ConfigError, DivergedError
from moesaic.facts.job.table import TableConfig, TableOptimizer
from moesaic.ps.table import Table

DIM = 19
"""Two blocks and a rest."""
KEYS = np.array([3, -7, 2**62, 11, -(2**63), 40, 41, 42, 43, 44, 45, 46])


class RowwiseAdagrad:
    """Row-wise AdaGrad of one row, written out."""

    def __init__(self, rows: list[Tensor], lr: float, eps: float) -> None:
        self.row, self.lr, self.eps, self.sum = (
            rows[0],
            lr,
            eps,
            torch.zeros((), dtype=rows[0].dtype),
        )

    def step(self) -> None:
        assert self.row.grad is not None
        self.sum += self.row.grad.square().mean()
        with torch.no_grad():
            self.row -= self.lr * self.row.grad / (self.sum.sqrt() + self.eps)


class SparseAdam(torch.optim.SparseAdam):
    def step(self, closure: None = None) -> None:
        for row in self.param_groups[0]["params"]:
            row.grad = row.grad.to_sparse(1)
        super().step(closure)


OPTIMIZERS: dict[TableOptimizer, Callable[[list[Tensor]], object]] = {
    "sgd": lambda rows: torch.optim.SGD(rows, lr=0.05),
    "adagrad": lambda rows: torch.optim.Adagrad(rows, lr=0.05, eps=1e-8),
    "adam": lambda rows: SparseAdam(rows, lr=0.05, betas=[0.8, 0.99], eps=1e-8),
    "rowwise-adagrad": lambda rows: RowwiseAdagrad(rows, 0.05, 1e-8),
}


def batches(count: int, seed: int = 0) -> Iterator[tuple[np.ndarray, np.ndarray, Tensor]]:
    """Yield indices into KEYS, offsets of 9 bags of 0 to 5 keys, and targets."""
    draw = np.random.default_rng(seed)
    for _ in range(count):
        offsets = np.concatenate([[0], np.cumsum(draw.integers(0, 6, 9))])
        numbers = draw.integers(0, len(KEYS), offsets[-1]) % draw.integers(1, len(KEYS) + 1)
        yield numbers, offsets, torch.from_numpy(draw.standard_normal((9, DIM)))


def loss(sums: Tensor, target: Tensor) -> Tensor:
    return (sums * target).sum() + sums.square().sum() / 2


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_thirty_steps_equal_torch(optimizer: TableOptimizer) -> None:
    config = TableConfig(optimizer=optimizer, lr=0.05, betas=[0.8, 0.99], init_std=0.5)
    table = Table(config, DIM, seed=1, dtype="float64")
    rows = [torch.from_numpy(table.pull(KEYS[[n]])).requires_grad_() for n in range(len(KEYS))]
    optimizers = [OPTIMIZERS[optimizer]([row]) for row in rows]
    for numbers, offsets, target in batches(30):
        lookup = table.look_up(KEYS[numbers], offsets, training=True)
        sums = F.embedding_bag(
            torch.from_numpy(numbers), torch.cat(rows), torch.from_numpy(offsets), mode="sum",
            include_last_offset=True,
        )  # fmt: skip
        np.testing.assert_allclose(lookup.sums, sums.detach(), rtol=0, atol=1e-9)
        loss(sums, target).backward()
        ours = torch.from_numpy(lookup.sums).requires_grad_()
        loss(ours, target).backward()
        lookup.push(ours.grad.numpy())
        table.step()
        for number in set(numbers.tolist()):
            optimizers[number].step()
        for row in rows:
            row.grad = None
        np.testing.assert_allclose(
            table.pull(KEYS), torch.cat(rows).detach(), rtol=0, atol=1e-9, err_msg=optimizer
        )
    assert table.num_rows == len(KEYS)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_float32_is_close_to_float64(optimizer: TableOptimizer) -> None:
    config = TableConfig(optimizer=optimizer, init_std=0.5)
    one, other = Table(config, DIM), Table(config, DIM, dtype="float64")
    draw = np.random.default_rng(0)
    for _ in range(10):
        keys, grads = KEYS[draw.integers(0, 12, 20)], draw.standard_normal((20, DIM))
        one.push(keys, grads)
        other.push(keys, grads)
    assert one.pull(KEYS).dtype == np.float32
    np.testing.assert_allclose(one.pull(KEYS), other.pull(KEYS), rtol=0, atol=2e-6)


def test_gradients_of_equal_keys_are_summed_in_the_order_given() -> None:
    table = Table(TableConfig(optimizer="sgd", lr=1.0, init_std=0), DIM)
    draw = np.random.default_rng(0)
    keys = draw.integers(0, 5, 300)
    grads = draw.standard_normal((300, DIM), np.float32)
    grads *= np.float32(10) ** draw.integers(-3, 4, (300, 1))
    table.push(keys, grads)
    for key in range(5):
        expected = np.zeros(DIM, np.float32)
        for grad in grads[keys == key]:
            expected = expected + grad
        assert (table.pull([key])[0] == -expected).all()


def test_a_step_applies_all_look_ups_since_the_last_one() -> None:
    """Gradients of micro-batches are summed; a look-up without a push changes nothing."""
    config = TableConfig(optimizer="adagrad")
    whole, parts = (Table(config, DIM, dtype="float64") for _ in range(2))
    (one, one_ends, one_grads), (two, two_ends, two_grads) = batches(2)
    for _ in range(3):
        lookups = [
            parts.look_up(KEYS[numbers], ends, training=True)
            for numbers, ends in ((one, one_ends), (two, two_ends), (one, one_ends))
        ]
        lookups[0].push(one_grads.numpy())
        lookups[1].push(two_grads.numpy())
        parts.step()
        keys = KEYS[np.concatenate([one, two])]
        ends = np.concatenate([one_ends, two_ends[1:] + one_ends[-1]])
        lookup = whole.look_up(keys, ends, training=True)
        lookup.push(torch.cat([one_grads, two_grads]).numpy())
        whole.step()
        np.testing.assert_allclose(parts.pull(KEYS), whole.pull(KEYS), rtol=0, atol=1e-12)
    before = parts.read(KEYS)
    parts.step()
    assert (parts.read(KEYS) == before).all()


def test_rows_found_before_other_changes_are_found_again() -> None:
    table = Table(TableConfig(optimizer="sgd", lr=1.0, init_std=0), DIM)
    ends, grads = np.array([0, 1]), np.ones((1, DIM), np.float32)
    early = table.look_up([5], ends, training=True)
    table.push([5], grads)
    early.push(grads)
    table.step()
    assert (table.pull([5]) == -2).all()
    early = table.look_up([5], ends, training=True)
    table.remove(np.array([5]))
    table.push([6], grads)  # The new row takes the place of the removed one.
    early.push(grads)
    table.step()
    assert (table.pull([5, 6]) == -1).all()
    assert table.num_rows == 2


def test_bits_do_not_depend_on_threads() -> None:
    keys = np.random.default_rng(0).zipf(1.3, 40_000) % 9000
    grads = np.random.default_rng(1).standard_normal((20_000, 8), np.float32)
    offsets = np.arange(20_001) * 2
    found = []
    threads = torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            table = Table(TableConfig(), 8)
            for _ in range(2):
                lookup = table.look_up(keys, offsets, training=True)
                lookup.push(grads, np.arange(20_000) % 2)
                table.step()
            found.append((lookup.sums, table.pull(keys), table.read(np.unique(keys))))
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*found, strict=True):
        assert (one == other).all()


def test_shows_and_clicks_count_samples_with_a_key() -> None:
    table = Table(TableConfig(decay=0.5), DIM)
    lookup = table.look_up([1, 1, 2, 2, 3], [0, 3, 3, 5], training=True)
    lookup.push(np.zeros((3, DIM)), clicks=[1, 0, 0])
    table.step()
    assert counts(table, [1, 2, 3]) == [(1, 1, 0), (2, 1, 0), (1, 0, 0)]
    table.end_day()
    table.end_day()
    table.push([2, 3], np.zeros((2, DIM)), clicks=[1, 1])
    assert counts(table, [1, 2, 3]) == [(1, 1, 0), (1.5, 1.25, 2), (1.25, 1, 2)]


def counts(table: Table, keys: list[int]) -> list[tuple[float, float, int]]:
    """Return show, click and last day."""
    records, place = table.read(np.array(keys)), table.layout.counters
    counters = records.view(np.float32)[:, place : place + 2].tolist()
    days = records.view(np.int32)[:, place + 2].tolist()
    return [(show, click, day) for (show, click), day in zip(counters, days, strict=True)]


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_gradients_that_are_not_finite_are_refused(bad: float) -> None:
    table = Table(TableConfig(), DIM)
    table.push([1, 2], np.ones((2, DIM)))
    before = table.read(np.array([1, 2]))
    grads = np.ones((3, DIM))
    grads[1, 4] = bad
    with pytest.raises(DivergedError, match="key 77 of table 'table' is not finite") as caught:
        table.push([1, 77, 2], grads)
    assert not caught.value.is_on_all_ranks
    lookup = table.look_up([1, 1, 77], [0, 2, 3, 3], training=True)
    with pytest.raises(DivergedError, match="key 77 "):
        lookup.push(grads)
    table.step()
    assert table.num_rows == 2
    assert (table.read(np.array([1, 2])) == before).all()
    grads[[1, 2]] = grads[[2, 1]]
    lookup.push(grads)  # The bad gradient is that of an empty bag.
    table.step()
    assert table.num_rows == 3


def test_large_gradients_are_finite() -> None:
    table = Table(TableConfig(optimizer="sgd", lr=1.0, init_std=0), DIM)
    table.push([1], np.full((1, DIM), 1e30))
    assert (table.pull([1]) == np.float32(-1e30)).all()
    with pytest.raises(DivergedError, match="key 1 "):  # Their sum is not.
        table.push([1, 1], np.full((2, DIM), 3e38))


def test_empty_batches_and_bags_work() -> None:
    table = Table(TableConfig(), DIM)
    none = np.empty(0, np.int64)
    assert table.pull(none).shape == (0, DIM)
    table.push(none, np.empty((0, DIM)))
    for offsets in ([0], [0, 0, 0]):
        lookup = table.look_up([], offsets, training=True)
        assert lookup.sums.shape == (len(offsets) - 1, DIM)
        assert not lookup.sums.any()
        lookup.push(np.ones_like(lookup.sums))
        table.step()
    assert table.num_rows == 0


def test_bad_arguments_are_named() -> None:
    table = Table(TableConfig(), DIM)
    with pytest.raises(ConfigError, match="keys have the type float64: pass int64"):
        table.pull([1.0])
    with pytest.raises(ConfigError, match=r"shape \(2, 3\).*pass \(2, 19\)"):
        table.push([1, 2], np.ones((2, 3)))
    for offsets in ([], [1, 2], [0, 1], [0, 3], [0, 2, 1, 2], [0, -1, 2], [[0, 2]]):
        with pytest.raises(ConfigError, match=r"offsets of 2 keys are .*the last bag is 2$"):
            table.look_up([1, 2], offsets, training=False)
    with pytest.raises(ConfigError, match="'served' is read-only: open it"):
        Table(TableConfig(), DIM, name="served", read_only=True).push([1], np.ones((1, DIM)))


def test_tensors_are_keys_and_gradients() -> None:
    table, other = (Table(TableConfig(), DIM) for _ in range(2))
    keys, grads = torch.tensor([4, 5]), torch.ones(2, DIM)
    table.push(keys, grads, torch.tensor([0, 1]))
    other.push(keys.numpy(), grads.numpy(), [0, 1])
    assert (table.read(keys.numpy()) == other.read(keys.numpy())).all()
