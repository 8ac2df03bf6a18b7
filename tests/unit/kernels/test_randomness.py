"""Counter-based randomness: known answers, and independence of order and slicing."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch

from moesaic.kernels.randomness import normal, philox, uniform

ONES = 0xFFFFFFFF
# Known answers of Philox 4x32-10 as published with the Random123 library (kat_vectors).
KNOWN = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN)
def test_known_answers(
    counter: tuple[int, ...], key: tuple[int, int], answer: tuple[int, ...]
) -> None:
    words = philox(tuple(torch.tensor([c]) for c in counter), key)  # type: ignore[arg-type]
    assert [int(word) for word in words] == list(answer)


# Published answer of Philox 4x64-10 for counter and key zero.
KNOWN_WIDE = [0x16554D9ECA36314C, 0xDB20FE9D672D0FDC, 0xD7E772CEE186176B, 0x7E68B68AEC7BA23B]
WIDE = (1 << 64) - 1


def philox_wide(counter: int, key: int) -> list[int]:
    """Reference Philox 4x64-10 in Python integers."""
    c0, c1, c2, c3 = (counter >> 64 * word & WIDE for word in range(4))
    k0, k1 = key & WIDE, key >> 64
    for _ in range(10):
        left, right = 0xD2E7470EE14C6C93 * c0, 0xCA5A826395121157 * c2
        c0, c1, c2, c3 = right >> 64 ^ c1 ^ k0, right & WIDE, left >> 64 ^ c3 ^ k1, left & WIDE
        k0, k1 = k0 + 0x9E3779B97F4A7C15 & WIDE, k1 + 0xBB67AE8584CAA73B & WIDE
    return [c0, c1, c2, c3]


def test_reference_has_the_known_answer() -> None:
    assert philox_wide(0, 0) == KNOWN_WIDE


@pytest.mark.parametrize("start", [0, 1, 6, (1 << 15) - 5, 1 << 40, (1 << 66) + 3])
def test_normal_equals_the_reference(start: int) -> None:
    key = int.from_bytes(hashlib.blake2b(b"3/x", digest_size=16).digest(), "little")
    found = normal(3, "x", start, start + 11).tolist()
    for index, value in enumerate(found, start=start):
        words = philox_wide(index // 4, key)[index % 4 // 2 * 2 :]
        unit, turn = ((word >> 12) + 0.5 for word in words[:2])
        radius = math.sqrt(-2.0 * math.log(unit * 2.0**-52))
        angle = turn * 2.0**-52 * 2.0 * math.pi
        expected = radius * (math.sin(angle) if index % 2 else math.cos(angle))
        assert value == pytest.approx(expected, rel=1e-13, abs=1e-14)


def test_uniform_depends_on_every_argument_alone() -> None:
    sample, position = torch.arange(4)[:, None], torch.arange(8)
    base = uniform(1, "noise", 5, sample, position)
    assert base.shape == (4, 8)
    assert bool(((base > 0) & (base < 1)).all())
    assert base.unique().numel() == base.numel()
    assert torch.equal(base[2:3, 3:5], uniform(1, "noise", 5, sample[2:3], position[3:5]))
    for other in (
        uniform(2, "noise", 5, sample, position),
        uniform(1, "other", 5, sample, position),
        uniform(1, "noise", 6, sample, position),
        uniform(1, "noise", 5, sample + (1 << 32), position),
    ):
        assert not (other == base).any()
