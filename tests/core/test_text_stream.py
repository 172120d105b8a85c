"""Streaming text: whole characters, stop strings never shown."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from fusion_node.client.text_stream import TextStream


def decode_bytes(tokens: Sequence[int]) -> str:
    """A byte-level vocabulary, the hardest case: a character is up to four tokens."""
    return bytes(tokens).decode("utf-8", errors="replace")


def stream(text: str, *stop: str) -> tuple[list[str], str | None]:
    ts = TextStream(decode_bytes, stop)
    pieces = []
    for byte in text.encode():
        pieces.append(ts.push(byte))
        if ts.stopped_by is not None:
            break
    pieces.append(ts.finish())
    return pieces, ts.stopped_by


@given(st.text(max_size=40))
def test_pieces_joined_are_the_text(text: str) -> None:
    assert "".join(stream(text.replace("\ufffd", ""))[0]) == text.replace("\ufffd", "")


def test_no_piece_holds_half_a_character() -> None:
    pieces, _ = stream("日本語 ok 🎉!")
    assert not any("\ufffd" in piece for piece in pieces)


@given(st.text(alphabet="ab", max_size=30), st.sampled_from(["aab", "ba", "bbb"]))
def test_text_is_cut_before_the_first_stop_string(text: str, stop: str) -> None:
    pieces, stopped_by = stream(text, stop)
    assert "".join(pieces) == text.split(stop, maxsplit=1)[0]
    assert (stopped_by == stop) == (stop in text)


def test_earliest_of_two_stop_strings_wins() -> None:
    pieces, stopped_by = stream("one END two STOP", "STOP", "END")
    assert ("".join(pieces), stopped_by) == ("one ", "END")
