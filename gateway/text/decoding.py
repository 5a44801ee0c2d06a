"""Which text has become certain with one more token?

A decoder takes token ids one at a time and gives out text that no later token can change: it never splits a
character, and what it gave out stays. Given out piece by piece, the text of a byte-level tokenizer equals the
decoding of the whole sequence.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from gateway.text.tokenizer import TokenFamily, Tokenizer

WINDOW_LEN = 6  # tokens of context a windowed decoder keeps, for spaces that depend on what stands before
LONGEST_CHARACTER = 4  # bytes, and so tokens, that one character can be spread over

REPLACEMENT = "\ufffd"


class IncrementalDecoder(Protocol):
    """One sequence's decoder; owned by one generation."""

    def push(self, token_id: int) -> str:
        """The text that is certain now and was not before; often empty."""
        ...

    def flush(self) -> str:
        """The rest, U+FFFD for an unfinished character. The decoder is done after this."""
        ...


class BytesDecoder:
    """For tokenizers whose tokens stand for bytes: exact, in constant time a token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See IncrementalDecoder."""
        if self._tokenizer.is_special(token_id):
            return ""
        return self._utf8.decode(self._tokenizer.token_bytes(token_id))

    def flush(self) -> str:
        """See IncrementalDecoder."""
        return self._utf8.decode(b"", final=True)


class WindowDecoder:
    """For any other tokenizer: decodes a short window twice, with and without the new tokens, and takes the difference.

    context: the last tokens before the first pushed one, so that a space between the two is not lost.
    """

    def __init__(self, tokenizer: Tokenizer, context: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = list(context[-WINDOW_LEN:])
        self._num_read = len(self._window)

    def push(self, token_id: int) -> str:
        """See IncrementalDecoder."""
        self._window.append(token_id)
        text = self._unread()
        if not text or (text.endswith(REPLACEMENT) and len(self._window) - self._num_read < LONGEST_CHARACTER):
            return ""
        self._forget()
        return text

    def flush(self) -> str:
        """See IncrementalDecoder."""
        text = self._unread()
        self._forget()
        return text

    def _unread(self) -> str:
        before = self._tokenizer.decode(self._window[: self._num_read])
        whole = self._tokenizer.decode(self._window)
        if whole.startswith(before):
            return whole[len(before) :]
        # New bytes made the old ones invalid. What was given out stays; the new tokens are read on their own.
        return self._tokenizer.decode(self._window[self._num_read :])

    def _forget(self) -> None:
        del self._window[:-WINDOW_LEN]
        self._num_read = len(self._window)


def make_decoder(tokenizer: Tokenizer, context: Sequence[int] = ()) -> IncrementalDecoder:
    """The decoder for this tokenizer's family. context: tokens before the first pushed one (the prompt's end)."""
    if tokenizer.family is TokenFamily.OTHER:
        return WindowDecoder(tokenizer, context)
    return BytesDecoder(tokenizer)
