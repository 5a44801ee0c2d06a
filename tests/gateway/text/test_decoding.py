"""Text given out token by token: whole characters only, and together exactly the decoding of the whole sequence."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.text.decoding import BytesDecoder, WindowDecoder, make_decoder
from gateway.text.token_text import TokenText
from gateway.text.tokenizer import TokenFamily, Tokenizer
from tests.gateway.text import tiny_tokenizers

TEXTS = ["🙂 👩‍👩‍👧", "日本語 中文", "e\u0301o\u0308 ñ", "naïve café", "tab\t\r\n12345", "\U0010ffff\u0000", "a" * 40]
BYTE_LEVEL = tiny_tokenizers.byte_level()


def byte_ids(data: bytes) -> list[int]:
    """One token a byte: the split that cuts every character everywhere."""
    ids = [next(i for i in range(BYTE_LEVEL.vocab_size) if BYTE_LEVEL.token_bytes(i) == bytes([b])) for b in data]
    return ids


def pieces(tokenizer: Tokenizer, ids: list[int], context: tuple[int, ...] = ()) -> list[str]:
    decoder = make_decoder(tokenizer, context)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


def every_split(ids: list[int]) -> list[list[list[int]]]:
    """All ways to cut `ids` in consecutive groups (commits)."""
    result = []
    for cuts in itertools.product([False, True], repeat=len(ids) - 1):
        groups = [[ids[0]]]
        for cut, token_id in zip(cuts, ids[1:], strict=True):
            if cut:
                groups.append([])
            groups[-1].append(token_id)
        result.append(groups)
    return result


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_join_to_the_text_and_split_no_character(text: str) -> None:
    for ids in (byte_ids(text.encode()), BYTE_LEVEL.encode(text, add_special_tokens=False)):
        given_out = pieces(BYTE_LEVEL, ids)
        assert "".join(given_out) == text
        assert not any("\ufffd" in piece for piece in given_out)
        for end in range(len(ids)):  # whatever was given out up to here is a prefix of the text
            assert text.startswith("".join(given_out[: end + 1]))


@pytest.mark.parametrize("text", ["🙂é", "中e\u0301", "👧🙂"])
def test_every_grouping_into_commits_gives_the_same_text(text: str) -> None:
    ids = byte_ids(text.encode())
    for groups in every_split(ids):
        stream = TokenText(BYTE_LEVEL)
        steps = [stream.push(group) for group in groups]
        assert "".join(step.text for step in steps) == text
        assert stream.flush() == ""
        assert [step.num_kept for step in steps] == [len(group) for group in groups]


@given(st.lists(st.integers(0, BYTE_LEVEL.vocab_size + 3), max_size=24))
@settings(max_examples=300, deadline=None)
def test_any_tokens_decode_as_the_library_decodes_them(ids: list[int]) -> None:
    """Invalid bytes, special tokens, and ids without a token among them."""
    assert "".join(pieces(BYTE_LEVEL, ids)) == BYTE_LEVEL.decode(ids)


@given(st.lists(st.integers(0, 268), max_size=16))
@settings(max_examples=200, deadline=None)
def test_sentencepiece_text_goes_on_from_the_prompt(ids: list[int]) -> None:
    tokenizer = tiny_tokenizers.sentencepiece()
    assert tokenizer.family is TokenFamily.SENTENCEPIECE
    text = "".join(pieces(tokenizer, ids))
    expected = tokenizer.decode(ids)
    if "\ufffd" not in expected:  # the library marks a whole run of byte tokens when one of them is wrong; we, that one
        assert expected == text.removeprefix(" ")  # the library takes the first space of a text away


def test_sentencepiece_keeps_the_space_after_the_prompt() -> None:
    tokenizer = tiny_tokenizers.sentencepiece()
    ids = tokenizer.encode("ab ab", add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids[-1:])) == " ab"
    assert tokenizer.token_bytes(3 + 0xE4) == b"\xe4"
    assert "".join(pieces(tokenizer, [3 + byte for byte in "中".encode()])) == "中"


def test_a_family_without_bytes_is_decoded_in_a_window() -> None:
    tokenizer = tiny_tokenizers.wordpiece()
    assert tokenizer.family is TokenFamily.OTHER
    ids = tokenizer.encode("we playing we played, we", add_special_tokens=False)
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids) == "we playing we played , we"
    assert "".join(pieces(tokenizer, ids[1:], (ids[0],))) == " playing we played , we"


@pytest.mark.parametrize("text", TEXTS)
def test_the_window_agrees_with_the_bytes(text: str) -> None:
    """The general way gives what the exact way gives, on a tokenizer where both can run."""
    ids = byte_ids(text.encode())
    window, exact = WindowDecoder(BYTE_LEVEL, ()), BytesDecoder(BYTE_LEVEL)
    assert [window.push(i) for i in ids] == [exact.push(i) for i in ids]
    assert window.flush() == exact.flush() == ""


def test_a_window_does_not_hold_invalid_bytes_for_ever() -> None:
    window = WindowDecoder(BYTE_LEVEL, ())
    ids = byte_ids(b"\x80" * 40 + b"ok")
    given_out = [window.push(i) for i in ids]
    assert max(len(list(group)) for empty, group in itertools.groupby(given_out, bool) if not empty) <= 3
    assert "".join(given_out).endswith("ok")


def test_half_a_character_at_the_end_becomes_a_replacement_character() -> None:
    stream = TokenText(BYTE_LEVEL)
    assert stream.push(byte_ids("a🙂".encode()[:3])).text == "a"
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""
