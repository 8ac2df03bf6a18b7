"""Hash index: 64-bit keys to locations of their records.

Entries are pairs (hash, location), 16 bytes each, sorted by hash in one array with gaps. The hash
is a bijection of the key, so keys need no space of their own. An entry stands at the first free
slot from hash * slots / 2**64 on. Growth spreads the entries in place, from the last to the first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moesaic.base.compiled import cached_loop, prefetch
from moesaic.base.host_memory import reserve_memory, total_memory_bytes
from moesaic.kernels.threads import run_ranges

Int64s = NDArray[np.int64]

ABSENT = -(2**63)
"""Location of a key that has no entry."""

_ABSENT = np.int64(ABSENT)
_LAST_HASH = np.int64(-1)
"""Hash of empty slots: as an unsigned number it is the largest, so each search ends there."""
_FACTORS = (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
_FIRST, _SECOND = map(np.uint64, _FACTORS)
_FIRST_INVERSE, _SECOND_INVERSE = (np.uint64(pow(factor, -1, 2**64)) for factor in _FACTORS)
_HALF, _SHIFT, _TWICE_SHIFT = np.uint64(32), np.uint64(29), np.uint64(58)
_MAX_LOAD = 0.8
_GROWTH = 1.25
_FIRST_SLOTS = 1024
_FIRST_SPARE_SLOTS = 1024
_STEPS = 4
"""Slots that a search compares at once; as many at the end stay empty."""
_AHEAD = 16
"""Keys between a prefetch and its use."""
MIN_THREADED_KEYS = 16_384
"""Keys from which on several threads finish sooner than one."""


class KeyIndex:
    """Map of int64 keys to int64 locations; all operations take arrays of keys."""

    def __init__(self) -> None:
        self._room: Int64s = np.frombuffer(reserve_memory(total_memory_bytes()), np.int64)
        self._slots = _FIRST_SLOTS
        self._spare_slots = _FIRST_SPARE_SLOTS
        """Slots behind the last regular one, for entries that are displaced beyond it."""
        self._entries = self._room[: 2 * (self._slots + self._spare_slots)]
        _clear(self._entries)
        self._length = 0
        self.changes = 0
        """Calls that may have changed a location."""

    def __len__(self) -> int:
        return self._length

    @property
    def memory_bytes(self) -> int:
        """Bytes of all slots."""
        return self._entries.nbytes

    def find(self, keys: Int64s) -> Int64s:
        """Return the location of each key; `ABSENT` for a key without an entry."""
        locations = np.empty(len(keys), np.int64)

        def find(start: int, end: int) -> None:
            _find(self._entries, self._slots, keys[start:end], locations[start:end])

        run_ranges(find, len(keys), MIN_THREADED_KEYS)
        return locations

    def find_hashed(self, hashes: NDArray[np.uint64]) -> Int64s:
        """Return the location of each key by its hash."""
        locations = np.empty(len(hashes), np.int64)

        def find(start: int, end: int) -> None:
            _find_hashed(self._entries, self._slots, hashes[start:end], locations[start:end])

        run_ranges(find, len(hashes), MIN_THREADED_KEYS)
        return locations

    def set(self, keys: Int64s, locations: Int64s) -> None:
        """Give each key its location; keys without an entry get one."""
        start = 0
        self.changes += 1
        while start < len(keys):
            limit = int(self._slots * _MAX_LOAD)
            start, self._length = _set(
                self._entries, self._slots, keys, locations, start, self._length, limit
            )
            if start < len(keys):
                self._grow()

    def remove(self, keys: Int64s) -> None:
        """Remove the entries of `keys`; a key without an entry changes nothing."""
        self.changes += 1
        self._length -= _remove(self._entries, self._slots, keys)

    def items(self) -> tuple[Int64s, Int64s]:
        """Return all keys and their locations, in the order of hashes.

        The order depends on the keys alone."""
        keys, locations = np.empty(self._length, np.int64), np.empty(self._length, np.int64)
        _list(self._entries, keys, locations)
        return keys, locations

    def find_keys(self, chosen: NDArray[np.bool_]) -> tuple[Int64s, Int64s]:
        """Return the keys at chosen rows of memory, and these rows, in the order of hashes."""
        room = int(np.count_nonzero(chosen)) + 1
        if room == 1:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        parts = dict[int, tuple[Int64s, Int64s]]()

        def find(start: int, end: int) -> None:
            hashes, rows = np.empty(room, np.int64), np.empty(room, np.int64)
            entries = self._entries[2 * start : 2 * end]
            count = _find_rows(entries, chosen.view(np.uint8), hashes, rows)
            _unhash(hashes[:count])
            parts[start] = hashes[:count], rows[:count]

        run_ranges(find, len(self._entries) // 2, MIN_THREADED_KEYS)
        keys, rows = zip(*(parts[start] for start in sorted(parts)), strict=True)
        return np.concatenate(keys), np.concatenate(rows)

    def reserve(self, count: int) -> None:
        """Make room for `count` more keys.

        Many keys in the order of hashes need it: without room they displace each other."""
        slots = int((self._length + count) / _MAX_LOAD) + 1
        if slots > self._slots:
            self._resize(slots)

    def _grow(self) -> None:
        slots = self._slots
        if self._length < int(slots * _MAX_LOAD):  # The largest hashes are very many.
            self._spare_slots *= 2
        else:
            slots = int(slots * _GROWTH)
        self._resize(slots)

    def _resize(self, slots: int) -> None:
        entries = self._room[: 2 * (slots + self._spare_slots)]
        if len(entries) < 2 * (slots + self._spare_slots):
            raise MemoryError(f"an index of {self._length} keys cannot grow to {slots} slots")
        _spread(entries, len(self._entries) // 2, slots)
        self._slots, self._entries = slots, entries


def hash_keys(keys: Int64s) -> NDArray[np.uint64]:
    """Return a 64-bit hash of each key, equal on all machines."""
    hashes = np.empty(len(keys), np.uint64)
    _hash_all(keys, hashes)
    return hashes


@cached_loop
def hash_key(key: np.int64) -> np.uint64:
    """Return the hash of a key; a bijection."""
    mixed = np.uint64(key)
    mixed = (mixed ^ (mixed >> _HALF)) * _FIRST
    mixed = (mixed ^ (mixed >> _SHIFT)) * _SECOND
    return mixed ^ (mixed >> _HALF)


@cached_loop
def _key(hashed: np.uint64) -> np.int64:
    """Return the key of a hash."""
    mixed = np.uint64(hashed)
    mixed = (mixed ^ (mixed >> _HALF)) * _SECOND_INVERSE
    mixed = (mixed ^ (mixed >> _SHIFT) ^ (mixed >> _TWICE_SHIFT)) * _FIRST_INVERSE
    return np.int64(mixed ^ (mixed >> _HALF))


@cached_loop
def _hash_all(keys: Int64s, hashes: NDArray[np.uint64]) -> None:
    for index in range(len(keys)):
        hashes[index] = hash_key(keys[index])


@cached_loop
def _slot(hashed: np.uint64, slots: int) -> np.int64:
    """Return the slot where the search for a hash starts."""
    return np.int64(((hashed >> _HALF) * np.uint64(slots)) >> _HALF)


@cached_loop
def _search(entries: Int64s, slots: int, hashed: np.uint64) -> np.int64:
    """Return the first slot whose hash is at least `hashed`, or that is empty.

    Hashes are sorted, so the number of smaller ones among the next is the way to go, without a
    branch."""
    slot: np.int64 = _slot(hashed, slots)
    smaller = np.int64(0)
    for step in range(_STEPS):
        smaller += np.uint64(entries[2 * (slot + step)]) < hashed
    slot += smaller
    if smaller < _STEPS:
        return slot
    while np.uint64(entries[2 * slot]) < hashed:
        slot += 1
    return slot


@cached_loop
def _clear(entries: Int64s) -> None:
    for slot in range(len(entries) // 2):
        entries[2 * slot] = _LAST_HASH
        entries[2 * slot + 1] = _ABSENT


@cached_loop
def _find(entries: Int64s, slots: int, keys: Int64s, locations: Int64s) -> None:
    count = len(keys)
    for index in range(count):
        if index + _AHEAD < count:
            prefetch(entries, 2 * _slot(hash_key(keys[index + _AHEAD]), slots))
        hashed = hash_key(keys[index])
        slot = _search(entries, slots, hashed)
        found = np.uint64(entries[2 * slot]) == hashed
        locations[index] = entries[2 * slot + 1] if found else _ABSENT


@cached_loop
def _find_hashed(
    entries: Int64s, slots: int, hashes: NDArray[np.uint64], locations: Int64s
) -> None:
    count = len(hashes)
    for index in range(count):
        if index + _AHEAD < count:
            prefetch(entries, 2 * _slot(hashes[index + _AHEAD], slots))
        slot = _search(entries, slots, hashes[index])
        found = np.uint64(entries[2 * slot]) == hashes[index]
        locations[index] = entries[2 * slot + 1] if found else _ABSENT


@cached_loop
def _set(
    entries: Int64s,
    slots: int,
    keys: Int64s,
    locations: Int64s,
    start: int,
    length: int,
    limit: int,
) -> tuple[int, int]:
    """Set keys from `start` on; return the first key that needs more slots, and the length."""
    top, count = len(entries) // 2 - _STEPS, len(keys)
    for index in range(start, count):
        if index + _AHEAD < count:
            prefetch(entries, 2 * _slot(hash_key(keys[index + _AHEAD]), slots))
        hashed = hash_key(keys[index])
        slot = _search(entries, slots, hashed)
        if np.uint64(entries[2 * slot]) != hashed or entries[2 * slot + 1] == _ABSENT:
            free = slot
            while entries[2 * free + 1] != _ABSENT:
                free += 1
            if length >= limit or free >= top:
                return index, length
            for moved in range(free, slot, -1):
                entries[2 * moved] = entries[2 * moved - 2]
                entries[2 * moved + 1] = entries[2 * moved - 1]
            entries[2 * slot] = np.int64(hashed)
            length += 1
        entries[2 * slot + 1] = locations[index]
    return count, length


@cached_loop
def _remove(entries: Int64s, slots: int, keys: Int64s) -> int:
    removed = 0
    for key in keys:
        hashed = hash_key(key)
        slot = _search(entries, slots, hashed)
        if np.uint64(entries[2 * slot]) != hashed or entries[2 * slot + 1] == _ABSENT:
            continue
        removed += 1
        after = slot + 1
        while (
            entries[2 * after + 1] != _ABSENT
            and _slot(np.uint64(entries[2 * after]), slots) < after
        ):
            entries[2 * slot] = entries[2 * after]
            entries[2 * slot + 1] = entries[2 * after + 1]
            slot, after = after, after + 1
        entries[2 * slot] = _LAST_HASH
        entries[2 * slot + 1] = _ABSENT
    return removed


@cached_loop
def _list(entries: Int64s, keys: Int64s, locations: Int64s) -> None:
    index = 0
    for slot in range(len(entries) // 2):
        if entries[2 * slot + 1] != _ABSENT:
            keys[index] = _key(np.uint64(entries[2 * slot]))
            locations[index] = entries[2 * slot + 1]
            index += 1


@cached_loop
def _find_rows(entries: Int64s, chosen: NDArray[np.uint8], hashes: Int64s, rows: Int64s) -> int:
    """List the entries whose row is chosen; return their number.

    Branches would be hard to predict: every entry is written behind the list, and some stay."""
    count, slots, room = 0, len(entries) // 2, np.uint64(len(chosen))
    for slot in range(slots):
        if slot + 2 * _AHEAD < slots:
            prefetch(chosen, max(entries[2 * (slot + 2 * _AHEAD) + 1], 0))
        row = entries[2 * slot + 1]
        hashes[count], rows[count] = entries[2 * slot], row
        inside = np.uint64(row) < room
        count += chosen[row if inside else 0] & inside
    return count


@cached_loop
def _unhash(hashes: Int64s) -> None:
    """Replace hashes by their keys."""
    for index in range(len(hashes)):
        hashes[index] = _key(np.uint64(hashes[index]))


@cached_loop
def _spread(entries: Int64s, old_top: int, slots: int) -> None:
    """Move the entries below `old_top` to where `slots` slots have them.

    The first pass packs them at the end. The second never overtakes the entry that it reads."""
    top = len(entries) // 2
    packed = top
    for slot in range(old_top - 1, -1, -1):
        if entries[2 * slot + 1] != _ABSENT:
            packed -= 1
            entries[2 * packed] = entries[2 * slot]
            entries[2 * packed + 1] = entries[2 * slot + 1]
    free = 0
    for source in range(packed, top):
        hashed, location = entries[2 * source], entries[2 * source + 1]
        slot = max(free, _slot(np.uint64(hashed), slots))
        for empty in range(free, slot):
            entries[2 * empty] = _LAST_HASH
            entries[2 * empty + 1] = _ABSENT
        entries[2 * slot] = hashed
        entries[2 * slot + 1] = location
        free = slot + 1
    for empty in range(free, top):
        entries[2 * empty] = _LAST_HASH
        entries[2 * empty + 1] = _ABSENT
