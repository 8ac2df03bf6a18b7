"""Pages of the key-value cache against an oracle that knows the content of each."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moesaic.serve.cache import PagePool, page_keys


class Content:
    """Content of pages, as a list of values."""

    def __init__(self, num_pages: int) -> None:
        self.values: list[object] = [None] * num_pages
        self.num_copied = 0
        self.pool = PagePool(num_pages, self.copy)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        assert len(set(targets)) == len(targets) == len(sources)
        moved = [self.values[source] for source in sources]
        for target, value in zip(targets, moved, strict=True):
            self.values[target] = value
        self.num_copied += sum(s != t for s, t in zip(sources, targets, strict=True))

    def write(self, request: int, keys: Sequence[bytes], start: int = 0) -> None:
        """Complete the pages of a request; their content is their key."""
        pages = self.pool.pages(request)
        for index in range(start, len(keys)):
            self.values[pages[index]] = keys[index]
            self.pool.record(request, index, keys[index])


def keys_of(text: str) -> list[bytes]:
    """Return keys of pages of one character."""
    return page_keys([ord(character) for character in text], 1)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("place"), st.text("ab", min_size=1, max_size=6), st.integers(0, 4)),
        st.tuples(st.just("grow"), st.sampled_from("abc"), st.integers(0, 5)),
        st.tuples(st.just("end"), st.just(""), st.integers(0, 5)),
    ),
    max_size=40,
)


@settings(max_examples=200, deadline=None)
@given(st.integers(6, 14), OPERATIONS)
def test_content_survives_moves(num_pages: int, operations: list[tuple[str, str, int]]) -> None:
    """A request's text is one character per page."""
    content = Content(num_pages)
    pool, texts = content.pool, dict[int, str]()
    for number, (kind, text, argument) in enumerate(operations):
        num_free = num_pages - pool.num_used
        request = sorted(texts)[argument % len(texts)] if texts else None
        if kind == "place" and len(text) <= num_free:
            keys = keys_of(text)
            found = pool.place(number, len(text), len(text) + argument, keys)
            texts[number] = text
            assert [content.values[page] for page in pool.pages(number)[:found]] == keys[:found]
            content.write(number, keys, found)
        elif kind == "grow" and request is not None and num_free:
            texts[request] += text
            pool.grow(request, len(texts[request]))
            content.write(request, keys_of(texts[request]), len(texts[request]) - 1)
        elif kind == "end" and request is not None:
            pool.release(request)
            del texts[request]
        check(content, texts)


def check(content: Content, texts: dict[int, str]) -> None:
    pool = content.pool
    for request, text in texts.items():
        assert [content.values[page] for page in pool.pages(request)] == keys_of(text)
    for one, other in combinations(texts, 2):
        assert not set(pool.pages(one)) & set(pool.pages(other))
    assert pool.num_used == sum(map(len, texts.values()))
    assert 0 <= pool.num_cached <= pool.num_pages - pool.num_used
    for key, page in pool._page_of.items():
        assert content.values[page] == key


def test_pages_are_found_after_the_request_has_ended() -> None:
    content = Content(8)
    content.pool.place(1, 3, 3)
    content.write(1, keys_of("abc"))
    assert content.pool.count_found(keys_of("abd")) == 2  # Also while it runs.
    content.pool.release(1)
    assert content.pool.num_cached == 3
    assert content.pool.place(2, 4, 4, keys_of("abd")) == 2
    assert content.pool.count_found(keys_of("abc")) == 3


def test_pages_used_longest_ago_are_reused_first() -> None:
    content = Content(6)
    pool = content.pool
    for request, text in enumerate(["ab", "cd", "ef"]):
        pool.place(request, 2, 2)
        content.write(request, keys_of(text))
    for request in range(3):
        pool.release(request)
    found = {text: pool.count_found(keys_of(text)) for text in ("ab", "cd", "ef")}
    assert found == {"ab": 2, "cd": 2, "ef": 2}
    pool.place(3, 1, 1)  # The last page of the oldest text.
    assert pool.count_found(keys_of("ab")) == 1
    pool.place(4, 2, 2, keys_of("ab")[:1])  # The first page of "ab" has been used now.
    assert pool.count_found(keys_of("cd")) == 0
    assert pool.count_found(keys_of("ab")) == 1
    assert pool.count_found(keys_of("ef")) == 2


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 5), st.lists(st.sampled_from("abcdefg"), max_size=40))
def test_reuse_follows_an_lru_list(num_pages: int, texts: list[str]) -> None:
    """Requests of one page follow one another; a hit needs a page for its copy, too."""
    content, kept = Content(num_pages), list[str]()
    for request, text in enumerate(texts):
        is_hit = text in kept
        assert content.pool.place(request, 1, 1, keys_of(text)) == int(is_hit)
        content.write(request, keys_of(text))
        content.pool.release(request)
        if is_hit:
            kept.remove(text)
            kept.append(text)
        if len(kept) == num_pages:  # The request needs the page used longest ago.
            kept.pop(0)
        if text not in kept:
            kept.append(text)
        found = [one for one in "abcdefg" if content.pool.count_found(keys_of(one))]
        assert found == sorted(kept)


def test_blank_pages_are_used_before_cached_ones() -> None:
    content = Content(6)
    content.pool.place(1, 3, 3)
    content.write(1, keys_of("abc"))
    content.pool.release(1)
    content.pool.place(2, 3, 3)
    assert content.pool.count_found(keys_of("abc")) == 3


def test_a_place_has_room_to_grow() -> None:
    content = Content(12)
    for request in range(3):
        content.pool.place(request, 1, 4)
    for size in (2, 3, 4):
        for request in range(3):
            content.pool.grow(request, size)
    assert content.num_copied == 0


def test_a_prompt_as_large_as_the_cache_finds_its_own_pages() -> None:
    content = Content(5)
    content.pool.place(1, 4, 4)
    content.write(1, keys_of("abcd"))
    content.pool.release(1)
    assert content.pool.place(2, 5, 5, keys_of("abcd")) == 4
    assert [content.values[page] for page in content.pool.pages(2)[:4]] == keys_of("abcd")


def test_free_pages_between_requests_are_joined() -> None:
    content = Content(7)
    pool = content.pool
    for request in range(7):
        pool.place(request, 1, 1)
        content.write(request, keys_of(str(request)))
    for request in (1, 3, 5):
        pool.release(request)
    pool.place(9, 3, 3)
    assert pool.pages(9) == range(4, 7)
    for request in (0, 2, 4, 6):
        assert [content.values[page] for page in pool.pages(request)] == keys_of(str(request))
    with pytest.raises(AssertionError, match="no 1 free pages"):
        pool.place(10, 1, 1)


def test_a_failed_move_leaves_nothing_to_find() -> None:
    """It may have overwritten any page in some layers."""

    def fail(sources: object, targets: object) -> None:
        del sources, targets
        raise MemoryError

    content = Content(7)
    pool = content.pool
    for request in range(7):
        pool.place(request, 1, 1)
        content.write(request, keys_of(str(request)))
    for request in (1, 3, 5):
        pool.release(request)
    pool._copy = fail
    with pytest.raises(MemoryError):
        pool.place(9, 3, 3)
    for request in (0, 2, 4, 6):  # The engine ends them.
        pool.release(request)
    assert pool.num_used == pool.num_cached == 0
    assert not any(pool.count_found(keys_of(str(request))) for request in range(7))


def test_keys_cover_all_tokens_before() -> None:
    tokens = list(range(40))
    keys = page_keys(tokens, 16)
    assert len(keys) == 2
    assert page_keys(tokens[:32], 16, keys[:1]) == keys
    assert page_keys([99, *tokens[1:]], 16)[1] != keys[1]
    assert page_keys(tokens[16:32], 16)[0] != keys[1]
    assert page_keys(tokens[:15], 16) == []
