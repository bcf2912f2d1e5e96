from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rose_dist.frontend.stop import StopMatcher

LETTERS = st.text(alphabet="ab🙂", max_size=20)
STOPS = st.lists(st.text(alphabet="ab🙂", min_size=2, max_size=4), min_size=1, max_size=3)


def reference(text: str, stops: list[str]) -> str:
    """Grow the text by one character until it ends with a stop string; of several, the longest is cut off."""
    for end in range(len(text) + 1):
        matching = [stop for stop in stops if text[:end].endswith(stop)]
        if matching:
            return text[: end - max(map(len, matching))]
    return text


@given(pieces=st.lists(st.text(alphabet="ab🙂", min_size=1, max_size=3), max_size=15), stops=STOPS)
@settings(max_examples=1000)
def test_equals_the_reference_whatever_the_pieces(pieces: list[str], stops: list[str]) -> None:
    text = "".join(pieces)
    expected = reference(text, stops)
    matcher = StopMatcher(stops)
    shown = ""
    for piece in pieces:
        shown += matcher.feed(piece)
        assert expected.startswith(shown)
    matched = matcher.matched is not None
    shown += matcher.finish()
    assert shown == expected
    assert matched == (expected != text or any(stop in text for stop in stops))


@given(text=LETTERS, stops=STOPS)
def test_no_more_is_held_back_than_must_be(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    shown = "".join(map(matcher.feed, text))
    if matcher.matched is None:
        held = text[len(shown) :]
        assert held == "" or any(stop.startswith(held) for stop in stops)


@pytest.mark.parametrize(("text", "stops", "expected"), [("ab", ["abc", "b"], "a"), ("xab", ["b", "ab"], "x")])
def test_which_of_several_counts(text: str, stops: list[str], expected: str) -> None:
    assert StopMatcher(stops).feed(text) == expected
