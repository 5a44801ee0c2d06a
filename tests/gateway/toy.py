"""What does the toy language model say? A deterministic function of the tokens before, so every test knows the right
output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

VOCAB = 97
END = 0


def next_token(tokens: Sequence[int], seed: int | None = None) -> int:
    """The token after `tokens`: depends on the last two, the position, and the seed where the request samples."""
    before = tokens[-2] if len(tokens) > 1 else 5
    value = tokens[-1] * 31 + before * 17 + len(tokens) * 7 + 3
    return (value + (seed or 0) * 13) % VOCAB


def continuation(
    prompt: Sequence[int], num_tokens: int, seed: int | None = None, ends: frozenset[int] = frozenset()
) -> list[int]:
    """What follows `prompt`: up to num_tokens, and with the first token in `ends`."""
    tokens = list(prompt)
    for _ in range(num_tokens):
        tokens.append(next_token(tokens, seed))
        if tokens[-1] in ends:
            break
    return tokens[len(prompt) :]


def draft_after(tokens: Sequence[int], draft_len: int, seed: int | None = None) -> list[int]:
    """What the toy drafter proposes: right about three times in four."""
    drafts: list[int] = []
    known = list(tokens)
    for _ in range(draft_len):
        token = next_token(known, seed)
        if (sum(known[-2:]) + len(known)) % 4 == 0:
            token = (token + 1) % VOCAB
        known.append(token)
        drafts.append(token)
    return drafts


@dataclass(frozen=True, slots=True)
class ToyStep:
    """What one push of ToyText gave."""

    text: str
    num_kept: int
    stopped: str | None


class ToyText:
    """Text of toy tokens: "12 " for 12. A stop string is a run of whole tokens' texts."""

    def __init__(self, stop: tuple[str, ...] = ()) -> None:
        self._stop = stop
        self._all = ""

    def push(self, token_ids: Sequence[int]) -> ToyStep:
        given = len(self._all)
        for index, token in enumerate(token_ids):
            self._all += f"{token} "
            for stop in self._stop:
                if self._all.endswith(" " + stop) or self._all == stop:
                    self._all = self._all[: -len(stop)]
                    return ToyStep(self._all[given:], index + 1, stop)
        return ToyStep(self._all[given:], len(token_ids), None)

    def flush(self) -> str:
        return ""
