"""Text coloured by where its tokens came from, although text lags behind tokens."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.generation import Delta
from gateway.rest.spans import SpanWriter
from gateway.text.decoding import make_decoder
from gateway.text.token_text import TokenText
from tests.gateway.text.test_decoding import BYTE_LEVEL, byte_ids


def spans_of(groups: list[list[tuple[int, bool]]], stop: tuple[str, ...] = ()) -> tuple[str, list[tuple[str, bool]]]:
    """The text and its spans of these commits of (token id, from draft)."""
    text, writer = TokenText(BYTE_LEVEL, stop), SpanWriter(BYTE_LEVEL)
    whole, spans = "", []
    for index, group in enumerate(groups):
        step = text.push([token_id for token_id, _ in group])
        kept = group[: step.num_kept]
        given_out = step.text
        ended = step.stopped is not None or index == len(groups) - 1
        if ended:
            given_out += text.flush()
        delta = Delta(tuple(token for token, _ in kept), tuple(flag for _, flag in kept), given_out)
        part = writer.write(delta)
        assert "".join(piece for piece, _ in part) == given_out
        whole += given_out
        spans += part
        if ended:
            break
    return whole, spans


def test_a_character_belongs_to_the_token_that_completes_it() -> None:
    ids = byte_ids("a🙂b".encode())
    flags = [False, True, True, True, False, True]
    text, spans = spans_of([list(zip(ids[:3], flags[:3], strict=True)), list(zip(ids[3:], flags[3:], strict=True))])
    assert text == "a🙂b"
    assert spans == [("a", False), ("🙂", False), ("b", True)] or spans == [("a", False), ("🙂", False), ("b", True)]


def test_text_held_back_for_a_stop_string_keeps_its_colour() -> None:
    ids = byte_ids(b"one ENd")
    groups = [[(token_id, index < 6)] for index, token_id in enumerate(ids)]
    text, spans = spans_of(groups, ("END",))
    assert text == "one ENd"
    assert "".join(piece for piece, flag in spans if flag) == "one EN"
    assert spans[-1] == ("d", False)


def test_half_a_character_at_the_end_is_the_last_tokens() -> None:
    ids = byte_ids("a🙂".encode()[:3])
    assert spans_of([[(ids[0], False)], [(ids[1], True), (ids[2], True)]])[1] == [("a", False), ("\ufffd", True)]


tokens = st.tuples(
    st.sampled_from(BYTE_LEVEL.encode("the quick hello ab\U0001f642", add_special_tokens=False)), st.booleans()
)


@given(st.lists(st.lists(tokens, min_size=1, max_size=4), min_size=1, max_size=8))
@settings(max_examples=300, deadline=None)
def test_every_character_has_the_colour_of_the_token_that_completed_it(groups: list[list[tuple[int, bool]]]) -> None:
    """Tokens of several characters, and a stop string that holds back parts of them."""
    text, spans = spans_of(groups, ("e quack", "abc"))
    decoder = make_decoder(BYTE_LEVEL)
    flags: list[bool] = []
    for token_id, from_draft in [token for group in groups for token in group]:
        flags += [from_draft] * len(decoder.push(token_id))
    flags += [groups[-1][-1][1]] * len(decoder.flush())
    assert [flag for piece, flag in spans for _ in piece] == flags[: len(text)]
    assert "".join(piece for piece, _ in spans) == text
