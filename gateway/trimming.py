"""Which of the tokens that a verdict brings does a request keep?

After every verdict, in this order: stop string, stop or end token, length. What is cut is cut everywhere alike: ids,
text, logprobs, usage and the acceptance counters. So `[d1, d2, END, d4, d5, bonus]` commits 3 tokens and counts 3
accepted drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.generation import FinishReason, TokenLogprob


class TextStep(Protocol):
    """What one push gave; see `gateway.text.token_text.TextStep`."""

    @property
    def text(self) -> str: ...

    @property
    def num_kept(self) -> int: ...

    @property
    def stopped(self) -> str | None: ...


class TokenText(Protocol):
    """One generation's text; see `gateway.text.token_text.TokenText`."""

    def push(self, token_ids: Sequence[int]) -> TextStep: ...

    def flush(self) -> str: ...


@dataclass(frozen=True, slots=True)
class Commit:
    """What is left of a verdict. num_accepted of token_ids, from the front, were drafts.

    num_drafted: drafts verified; where the verdict was cut, only those at the positions that are left, so that what
    comes after the end counts neither as accepted nor as refused.
    """

    token_ids: tuple[int, ...]
    num_accepted: int
    num_drafted: int
    logprobs: tuple[TokenLogprob, ...]
    text: str
    finish_reason: FinishReason | None
    stop_reason: str | int | None


class Trimmer:
    """One request's trimming. Owned by the request; every verdict is applied once, in order.

    end_token_ids end the generation silently (stop_reason None); stop_token_ids are reported. Neither gives text.
    """

    def __init__(
        self,
        text: TokenText,
        stop_token_ids: frozenset[int],
        end_token_ids: frozenset[int],
        max_tokens: int,
    ) -> None:
        self._text = text
        self._stop_token_ids = stop_token_ids
        self._ends = end_token_ids | stop_token_ids
        self.remaining = max_tokens

    def apply(
        self, token_ids: tuple[int, ...], num_accepted: int, num_drafted: int, logprobs: tuple[TokenLogprob, ...]
    ) -> Commit:
        """Keep what counts of one verdict. token_ids: accepted drafts, then the target's own token; not empty.

        A commit with a finish_reason is the request's last.
        """
        kept = min(len(token_ids), self.remaining)
        end_token: int | None = None
        for index in range(kept):
            if token_ids[index] in self._ends:
                end_token = token_ids[index]
                kept = index + 1
                break
        shown = token_ids[: kept if end_token is None else kept - 1]
        step = self._text.push(shown)
        finish_reason: FinishReason | None = None
        stop_reason: str | int | None = None
        text = step.text
        if step.stopped is not None:
            kept = step.num_kept
            finish_reason, stop_reason = "stop", step.stopped
        elif end_token is not None:
            finish_reason, stop_reason = "stop", end_token if end_token in self._stop_token_ids else None
            text += self._text.flush()
        elif kept == self.remaining:
            finish_reason = "length"
            text += self._text.flush()
        self.remaining -= kept
        cut = kept < len(token_ids)
        return Commit(
            token_ids[:kept] if cut else token_ids,
            min(num_accepted, kept),
            min(num_drafted, kept) if cut else num_drafted,
            logprobs[:kept] if cut else logprobs,
            text,
            finish_reason,
            stop_reason,
        )
