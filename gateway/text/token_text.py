"""What does one generation's text gain with each commit of tokens, and does a stop string end it?

Joins the incremental decoder and the stop matcher. Tokens are taken one by one, so the outcome is the same however
many of them one step commits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gateway.text.decoding import make_decoder
from gateway.text.stop_strings import StopMatcher
from gateway.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextStep:
    """What one push gave.

    text: certain and not given out before. num_kept: how many of the pushed tokens count: all of them, or up to and
    with the token that completed a stop string. stopped: that stop string (it is not in the text), or None.
    """

    text: str
    num_kept: int
    stopped: str | None


class TokenText:
    """One generation's text. Owned by its trimmer; pushed to in order, flushed at the end unless a stop string came.

    stop: strings that end the text. prompt_ids: the prompt; tokenizers whose spaces depend on the token before look
    at its end.
    """

    def __init__(self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), prompt_ids: Sequence[int] = ()) -> None:
        self._decoder = make_decoder(tokenizer, prompt_ids)
        self._matcher = StopMatcher(stop)
        self._stopped = False

    def push(self, token_ids: Sequence[int]) -> TextStep:
        """Take the next committed tokens. Special tokens give no text. After a stop string nothing more is taken."""
        pieces: list[str] = []
        for index, token_id in enumerate(token_ids):
            if self._stopped:
                return TextStep("", 0, None)
            step = self._matcher.push(self._decoder.push(token_id))
            pieces.append(step.text)
            if step.stopped is not None:
                self._stopped = True
                return TextStep("".join(pieces), index + 1, step.stopped)
        return TextStep("".join(pieces), len(token_ids), None)

    def flush(self) -> str:
        """The generation ended otherwise than by a stop string: all text still held back, U+FFFD for half a
        character.
        """
        if self._stopped:
            return ""
        self._stopped = True
        step = self._matcher.push(self._decoder.flush())
        return step.text if step.stopped is not None else step.text + self._matcher.flush()
