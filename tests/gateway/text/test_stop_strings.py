"""Stop strings across token borders: the same text and the same count however the characters arrive."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.stop_strings import StopMatcher
from gateway.text.token_text import TokenText
from tests.gateway.text import tiny_tokenizers
from tests.gateway.text.test_decoding import BYTE_LEVEL, byte_ids, every_split


def expected_text(text: str, stop: tuple[str, ...]) -> tuple[str, str | None]:
    """By the definition, character by character."""
    for end in range(1, len(text) + 1):
        ended = [string for string in stop if text[:end].endswith(string)]
        if ended:
            longest = max(ended, key=len)
            return text[: end - len(longest)], longest
    return text, None


def run(parts: list[str], stop: tuple[str, ...]) -> tuple[str, str | None]:
    matcher = StopMatcher(stop)
    text = ""
    for part in parts:
        step = matcher.push(part)
        text += step.text
        if step.stopped is not None:
            return text, step.stopped
    return text + matcher.flush(), None


@given(
    st.lists(st.text("ab🙂", max_size=4), max_size=8),
    st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=3).map(tuple),
)
@settings(max_examples=500, deadline=None)
def test_any_pieces_stop_where_the_definition_says(parts: list[str], stop: tuple[str, ...]) -> None:
    assert run(parts, stop) == expected_text("".join(parts), stop)


@given(st.text("ab", max_size=12), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=3).map(tuple))
@settings(max_examples=300, deadline=None)
def test_nothing_of_a_stop_string_is_ever_shown(text: str, stop: tuple[str, ...]) -> None:
    final, _ = expected_text(text, stop)
    matcher = StopMatcher(stop)
    shown = ""
    for character in text:
        step = matcher.push(character)
        shown += step.text
        assert final.startswith(shown)
        if step.stopped is not None:
            break


def test_a_stop_string_inside_and_across_tokens_counts_up_to_the_token_that_ends_it() -> None:
    ids = byte_ids(b"one END two")
    for groups in every_split(ids[:9]):
        stream = TokenText(BYTE_LEVEL, ("END",))
        text, kept = "", 0
        for group in groups:
            step = stream.push(group)
            text += step.text
            kept += step.num_kept
            if step.stopped is not None:
                break
        assert (text, kept, step.stopped) == ("one ", 7, "END")
        assert stream.flush() == ""
        assert stream.push(ids[9:]).num_kept == 0


def test_a_stop_string_that_cuts_a_token_drops_the_rest_of_it() -> None:
    tokenizer = tiny_tokenizers.sentencepiece()
    ids = tokenizer.encode("ab", add_special_tokens=False)
    assert len(ids) == 1
    step = TokenText(tokenizer, ("a",)).push([*ids, *ids])
    assert (step.text, step.num_kept, step.stopped) == (" ", 1, "a")


def test_a_stop_string_of_half_written_characters() -> None:
    stream = TokenText(BYTE_LEVEL, ("🙂",))
    ids = byte_ids("x🙂y".encode())
    assert [stream.push([token_id]).text for token_id in ids[:-2]] == ["x", "", "", ""]
    step = stream.push(ids[-2:])
    assert (step.text, step.num_kept, step.stopped) == ("", 1, "🙂")


def test_what_was_held_back_is_shown_at_the_end() -> None:
    stream = TokenText(BYTE_LEVEL, ("END",))
    assert stream.push(byte_ids(b"the EN")).text == "the "
    assert stream.flush() == "EN"


def test_special_tokens_are_no_text_and_do_not_break_a_match() -> None:
    special = BYTE_LEVEL.encode("<|im_end|>", add_special_tokens=False)
    assert len(special) == 1
    step = TokenText(BYTE_LEVEL, ("ab",)).push([*byte_ids(b"xa"), *special, *byte_ids(b"b")])
    assert (step.text, step.num_kept, step.stopped) == ("x", 4, "ab")


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(("",))
