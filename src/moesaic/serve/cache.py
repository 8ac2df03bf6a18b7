"""Paged key-value cache of many requests, and the prefix cache in its free pages.

A page holds the positions of `page_tokens` tokens in every layer. The pages of one request are
neighbours, so that attention reads its keys in place. Pages that a request leaves keep their
content and a key, which is a hash of all tokens up to the page's end. A later request with the same
tokens copies them. Free pages are reused in the order of their last use.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from moesaic.facts.job import ModelConfig

_BLANK = -1
"""Last use of a free page without content."""
_RESERVED, _OWNED = 1 << 61, 1 << 62
"""Costs, above every last use, of a page that a request may grow into, and of a page in use."""

CopyPages = Callable[[Sequence[int], Sequence[int]], None]
"""Function that copies the content of pages to other pages, all at once."""


def page_keys(tokens: Sequence[int], page_tokens: int, known: Sequence[bytes] = ()) -> list[bytes]:
    """Return a key for each full page of `tokens`, which covers all tokens up to the page's end.

    `known` are the keys of the first pages, if they were computed before.
    """
    keys = list(known)
    for start in range(len(keys) * page_tokens, len(tokens) - page_tokens + 1, page_tokens):
        page = array("q", tokens[start : start + page_tokens]).tobytes()
        keys.append(blake2b(page, digest_size=16, key=keys[-1] if keys else b"").digest())
    return keys


class PagePool:
    """Pages of requests and of the prefix cache.

    It decides places only; `copy` moves the content.
    """

    def __init__(self, num_pages: int, copy: CopyPages) -> None:
        self._copy = copy
        self._ranges: dict[int, range] = {}
        """Pages of each request."""
        self._wanted: dict[int, int] = {}
        """Pages that each request needs at most."""
        self._keys: list[bytes | None] = [None] * num_pages
        """Key of each page's content; None if it is incomplete."""
        self._page_of: dict[bytes, int] = {}
        """Page of each key; other pages may have the same content."""
        self._last_use: NDArray[np.int64] = np.full(num_pages, _BLANK, np.int64)
        """Time of the last use of free pages with content; `_BLANK` for others."""
        self._now = 0

    @property
    def num_pages(self) -> int:
        """Pages in total."""
        return len(self._keys)

    @property
    def num_used(self) -> int:
        """Pages of requests."""
        return sum(map(len, list(self._ranges.values())))

    @property
    def num_cached(self) -> int:
        """Free pages whose content can be found."""
        return int((self._last_use != _BLANK).sum())

    def pages(self, request: int) -> range:
        """Return the pages of a request."""
        return self._ranges[request]

    def count_found(self, keys: Iterable[bytes]) -> int:
        """Return how many leading keys have a page."""
        number = 0
        for key in keys:
            if key not in self._page_of:
                break
            number += 1
        return number

    def place(self, request: int, num_pages: int, wanted: int, keys: Sequence[bytes] = ()) -> int:
        """Give pages to a new request, copy those of its leading keys, and return their number.

        There must be `num_pages` free pages.

        Args:
            request: number of the request.
            num_pages: pages that it gets.
            wanted: pages that it needs at most, which are left free behind it if there is room.
            keys: keys of its leading pages.
        """
        self._touch([self._page_of[key] for key in keys[: self.count_found(keys)]])
        place = self._find_place(num_pages, wanted)
        if place is None:
            self._compact({})
            place = self._find_place(num_pages, wanted)
            assert place is not None, f"there are no {num_pages} free pages"
        found = keys[: self.count_found(keys)]
        sources = [self._page_of[key] for key in found]
        self._own(request, place, wanted)
        self._copy(sources, place[: len(found)])
        for index, key in enumerate(found):
            self.record(request, index, key)
        return len(found)

    def grow(self, request: int, num_pages: int) -> None:
        """Give a request more pages, up to `num_pages`; it moves if its neighbours are in use."""
        old, wanted = self._ranges[request], self._wanted[request]
        extra = range(old.stop, old.start + num_pages)
        if not extra:
            return
        if extra.stop <= self.num_pages and not self._is_owned()[extra.start : extra.stop].any():
            self._own(request, range(old.start, extra.stop), wanted)
            return
        place = self._find_place(num_pages, wanted, request)
        if place is None:
            self._compact({request: num_pages})
        else:
            self._move({request: place})

    def record(self, request: int, index: int, key: bytes) -> None:
        """Record that a page of a request is complete, and its key."""
        page = self._ranges[request][index]
        self._keys[page] = key
        self._page_of.setdefault(key, page)

    def release(self, request: int) -> None:
        """Take the pages of a request; complete ones become part of the prefix cache."""
        pages = self._ranges.pop(request, range(0))
        self._wanted.pop(request, None)
        kept = list[int]()
        for page in pages:
            key = self._keys[page]
            if key is not None:
                kept.append(self._page_of.setdefault(key, page))
                if kept[-1] != page:
                    self._keys[page] = None
        self._touch(kept)

    def _touch(self, pages: Sequence[int]) -> None:
        """Record a use of free pages of one text; its first pages are the most recent, because
        later pages are useless without them."""
        is_owned = self._is_owned()
        for page in reversed(pages):
            if not is_owned[page]:
                self._now += 1
                self._last_use[page] = self._now

    def _is_owned(self) -> NDArray[np.bool_]:
        is_owned = np.zeros(self.num_pages, np.bool_)
        for pages in self._ranges.values():
            is_owned[pages.start : pages.stop] = True
        return is_owned

    def _find_place(self, num_pages: int, wanted: int, moving: int | None = None) -> range | None:
        """Return the best place for a request: neighbouring pages, used longest ago.

        Args:
            num_pages: pages of the place.
            wanted: pages that would best be free from its start on.
            moving: request that leaves its own pages, if it has any.
        """
        costs = self._last_use.copy()
        others = {one: pages for one, pages in self._ranges.items() if one != moving}
        for one, pages in others.items():
            costs[pages.stop : pages.start + self._wanted[one]] = _RESERVED
        for pages in others.values():
            costs[pages.start : pages.stop] = _OWNED
        for size, limit in ((max(wanted, num_pages), _RESERVED), (num_pages, _OWNED)):
            if size <= self.num_pages:
                highest = _window_max(costs, size)
                start = int(highest.argmin())
                if highest[start] < limit:
                    return range(start, start + num_pages)
        return None

    def _compact(self, sizes: dict[int, int]) -> None:
        """Move all requests to the front, in order, so that the free pages are neighbours.

        `sizes` are the new numbers of pages of requests that grow.
        """
        places, start = dict[int, range](), 0
        for request, pages in sorted(self._ranges.items(), key=lambda item: item[1].start):
            places[request] = range(start, start + sizes.get(request, len(pages)))
            start = places[request].stop
        assert start <= self.num_pages, "there are too few free pages"
        self._move(places)

    def _move(self, places: dict[int, range]) -> None:
        """Move requests to new places, at least as large as their own."""
        moves = [
            (source, target)
            for request, place in places.items()
            for source, target in zip(self._ranges[request], place, strict=False)
        ]
        try:
            self._copy([source for source, _ in moves], [target for _, target in moves])
        except BaseException:
            for page in range(self.num_pages):  # Some layers may have been copied, others not.
                self._forget(page)
            raise
        keys = [self._keys[source] for source, _ in moves]
        is_named = [
            key is not None and self._page_of.get(key) == source
            for key, (source, _) in zip(keys, moves, strict=True)
        ]
        for source, _ in moves:
            self._forget(source)
        for request, place in places.items():
            del self._ranges[request]
            self._own(request, place, self._wanted[request])
        for (_, target), key, named in zip(moves, keys, is_named, strict=True):
            self._keys[target] = key
            if key is not None and (named or key not in self._page_of):
                self._page_of[key] = target

    def _own(self, request: int, place: range, wanted: int) -> None:
        """Give `place` to a request; the pages that are new to it lose their content."""
        old = self._ranges.get(request, range(0))
        for page in place:
            if page not in old:
                self._forget(page)
        self._ranges[request], self._wanted[request] = place, wanted

    def _forget(self, page: int) -> None:
        """Forget the content of a page."""
        key, self._keys[page], self._last_use[page] = self._keys[page], None, _BLANK
        if key is not None and self._page_of.get(key) == page:
            del self._page_of[key]


def _window_max(values: NDArray[np.int64], size: int) -> NDArray[np.int64]:
    """Return the largest of each `size` neighbouring values."""
    width = 1
    while 2 * width <= size:
        values = np.maximum(values[:-width], values[width:])
        width *= 2
    rest = size - width
    return np.maximum(values[: len(values) - rest], values[rest:])


class PagedCache:
    """Keys and values of all layers in one pool, [layers, positions, heads, channels].

    Latent attention caches its compressed key-value vector and the rotary key instead.
    """

    def __init__(self, model: ModelConfig, num_pages: int, page_tokens: int, like: Tensor) -> None:
        """Allocate the pool, in the dtype and on the device of `like`."""
        self.page_tokens, self.pages = page_tokens, PagePool(num_pages, self._copy_pages)
        num_positions = num_pages * page_tokens
        self._pools = [
            like.new_empty((model.layers, num_positions, *shape)) for shape in model.cache_shapes
        ]
        self._views = [
            tuple(pool[layer].transpose(0, 1)[None] for pool in self._pools)
            for layer in range(model.layers)
        ]
        self._positions: Tensor | None = None

    def write_to(self, positions: Tensor) -> None:
        """Set the positions of the next pass's tokens in the pool, [tokens]."""
        self._positions = positions

    def extend(self, layer: int, *new: Tensor) -> tuple[Tensor, ...]:
        """Write the keys and values of the pass's tokens, and return those of the whole pool."""
        assert self._positions is not None, "the pass has no positions"
        for pool, values in zip(self._pools, new, strict=True):
            pool[layer].index_copy_(0, self._positions, values[0].transpose(0, 1))
        return self._views[layer]

    def _copy_pages(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        moves = [(s, t) for s, t in zip(sources, targets, strict=True) if s != t]
        if not moves:
            return
        device = self._pools[0].device
        pages = torch.tensor(moves, device=device).T
        positions = pages[:, :, None] * self.page_tokens
        positions = (positions + torch.arange(self.page_tokens, device=device)).flatten(1)
        for layer in self._layers():
            layer.index_copy_(0, positions[1], layer.index_select(0, positions[0]))

    def _layers(self) -> Iterator[Tensor]:
        """Yield the pool of each layer, so that a copy needs memory for one of them."""
        for pool in self._pools:
            yield from pool.unbind(0)
