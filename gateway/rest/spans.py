"""Which characters of a streamed text came from accepted drafts?

A chunk's text does not line up with its tokens: a character may span tokens, and text that may become a stop string
is held back. So each token's characters are counted as it comes, and the text that is given out takes from that count
in order.
"""

from __future__ import annotations

from collections import deque

from gateway.generation import Delta
from gateway.text.decoding import make_decoder
from gateway.text.tokenizer import Tokenizer


class SpanWriter:
    """One choice's. The spans of all deltas join to the whole text, in order."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._decoder = make_decoder(tokenizer)
        self._owed: deque[tuple[int, bool]] = deque()  # characters not yet given out, and whether a draft brought them
        self._newest = False

    def write(self, delta: Delta) -> list[tuple[str, bool]]:
        """`delta.text` cut where it changes between drafted (True) and the target's own."""
        for token_id, from_draft in zip(delta.token_ids, delta.from_draft, strict=True):
            self._newest = from_draft
            length = len(self._decoder.push(token_id))
            if length:
                self._owed.append((length, from_draft))
        spans: list[tuple[str, bool]] = []
        text = delta.text
        while text:
            # What nobody owes is the replacement character of an unfinished end: the last token's.
            length, drafted = self._owed.popleft() if self._owed else (len(text), self._newest)
            part, text = text[:length], text[length:]
            if len(part) < length:
                self._owed.appendleft((length - len(part), drafted))
            if spans and spans[-1][1] == drafted:
                spans[-1] = (spans[-1][0] + part, drafted)
            else:
                spans.append((part, drafted))
        return spans
