"""TableBag in the place of nn.EmbeddingBag."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from moesaic.base.errors import ConfigError
from moesaic.facts.job.table import TableConfig
from moesaic.nn.embedding import ParameterRows, Rows, TableBag
from moesaic.ps.table import Table

ROWS, DIM = 30, 6


def table() -> Table:
    return Table(TableConfig(optimizer="sgd", lr=0.1, init_std=0.5), DIM, dtype="float64")


def embedding_bag(**options: bool) -> nn.EmbeddingBag:
    """Return torch's module with the first values of `table`."""
    bag = nn.EmbeddingBag(ROWS, DIM, mode="sum", dtype=torch.float64, **options)
    with torch.no_grad():
        bag.weight.copy_(torch.from_numpy(table().pull(range(ROWS))))
    return bag


KEYS = torch.tensor([3, 3, 7, 0, 29, 7, 5, 5])
INPUTS: dict[str, tuple[tuple[Tensor, ...], dict[str, bool]]] = {
    "two dimensions": ((KEYS.view(4, 2),), {}),
    "starts of bags": ((KEYS, torch.tensor([0, 0, 3, 8])), {}),
    "last offset": ((KEYS, torch.tensor([0, 2, 2, 8])), {"include_last_offset": True}),
    "no keys": ((KEYS[:0], torch.tensor([0, 0])), {}),
    "no bags": ((KEYS[:0].view(0, 3),), {}),
}


@pytest.mark.parametrize("name", INPUTS)
@pytest.mark.parametrize("fused", [False, True])
def test_a_table_trains_as_an_embedding_bag(name: str, fused: bool) -> None:
    """A layer on top gets the same gradients, and the rows the same values."""
    inputs, options = INPUTS[name]
    rows, expected = table(), embedding_bag(**options)
    bag = TableBag(rows, fused=fused, **options)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    top = nn.Linear(DIM, 3, dtype=torch.float64)
    for _ in range(3):
        grads = list[Tensor]()
        for module in (expected, bag):
            sums = module(*inputs)
            top.zero_grad()
            top(sums).square().sum().backward()
            grads.append(top.weight.grad.clone())
        torch.testing.assert_close(grads[1], grads[0], rtol=0, atol=1e-9)
        optimizer.step()
        optimizer.zero_grad()
        if not fused:
            rows.step()
        found = torch.from_numpy(rows.pull(range(ROWS)))
        torch.testing.assert_close(found, expected.weight.detach(), rtol=0, atol=1e-9)


def test_rows_of_a_parameter_train_as_a_table() -> None:
    weight = nn.Parameter(torch.from_numpy(table().pull(range(ROWS))))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    ours: list[Rows] = [table(), ParameterRows(weight)]
    bags = [TableBag(rows) for rows in ours]
    for _ in range(3):
        sums = [bag(KEYS.view(4, 2)) for bag in bags]
        torch.testing.assert_close(*sums, rtol=0, atol=1e-12)
        for bag, one in zip(bags, sums, strict=True):
            one.square().sum().backward()
            bag.rows.step()
        optimizer.step()
        optimizer.zero_grad()


def test_clicks_reach_the_rows() -> None:
    rows = table()
    bag = TableBag(rows)
    bag(torch.tensor([[1, 2], [2, 2]]), clicks=torch.tensor([1.0, 0.0])).sum().backward()
    rows.step()
    keys, scores, _ = rows.ages()
    assert dict(zip(keys.tolist(), scores.tolist(), strict=True)) == pytest.approx({1: 1.0, 2: 1.1})


def test_without_gradients_nothing_stays() -> None:
    rows = table()
    with torch.no_grad():
        sums = TableBag(rows)(KEYS.view(4, 2))
    assert not sums.requires_grad
    assert not len(rows.pinned_rows())
    assert rows.num_rows == 0


def test_bad_inputs_are_named() -> None:
    bag = TableBag(table())
    for inputs in ((KEYS,), (KEYS.view(4, 2), torch.tensor([0])), (KEYS.view(2, 2, 2),)):
        with pytest.raises(ConfigError, match=r"keys have shape .*: pass flat keys with offsets"):
            bag(*inputs)
    with pytest.raises(ConfigError, match="keys are a list: pass a torch tensor"):
        bag(KEYS.tolist(), torch.tensor([0]))
    with pytest.raises(ConfigError, match="offsets fall from 5 to 2 at 2, so they do not"):
        bag(KEYS, torch.tensor([0, 5, 2]))
    with pytest.raises(ConfigError, match="keys have the type int32: pass int64"):
        bag(KEYS.view(4, 2).int())
    with pytest.raises(ConfigError, match=r"clicks have shape \(3,\): .* each of the 4 bags"):
        bag(KEYS.view(4, 2), clicks=torch.ones(3))


@pytest.mark.parametrize("offsets", [[0, 9], [1, 4], [0, 3, 2], [-1, 4], [0, 4], []])
@pytest.mark.parametrize("includes_last", [False, True])
def test_offsets_that_leave_the_keys_are_refused(offsets: list[int], includes_last: bool) -> None:
    bag = TableBag(table(), include_last_offset=includes_last)
    bag(KEYS, torch.tensor([0, 3, 3, len(KEYS)]))
    if includes_last or offsets != [0, 4]:
        with pytest.raises(ConfigError, match="so they do not divide 8 keys into bags: pass"):
            bag(KEYS, torch.tensor(offsets, dtype=torch.int64))
    with pytest.raises(ConfigError, match="offsets have the type float32"):
        bag(KEYS, torch.zeros(2))
