"""What does a drafter see of a target's step, and what does it answer, where the test says which drafts are right?

The other end of a `local` channel, driven by the test: it checks the ring entry of a step and publishes a reply.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from engine.channel.local import LocalChannel
from target_service.messages import RowRequest, StepRequest

EPOCH = 3  # of the channel

# (row, position of the first draft, the drafts of the known sequence) -> what is published
Script = Callable[[int, int, list[int]], list[int]]


class LocalDrafter:
    """Publishes drafts as a drafter would. known: request id -> the tokens that it is going to have."""

    def __init__(self, local: LocalChannel, known: dict[str, list[int]], script: Script | None = None) -> None:
        self.local = local
        self.known = known
        self.script = script or (lambda row, position, drafts: drafts)
        self.seen: list[dict[str, Any]] = []

    def look(self, step: StepRequest) -> dict[str, Any]:
        """The step's ring entry, checked as far as it can be without knowing the step."""
        header, ring = self.local.drafter.ring(step.seq)
        seq, epoch, num_rows, num_tokens = header[:4].tolist()
        assert (seq, epoch, num_rows) == (step.seq, EPOCH, len(step.rows))
        starts = ring.query_start_loc[: num_rows + 1].tolist()
        assert starts[0] == 0
        assert starts[-1] == num_tokens <= sum(row.query_len for row in step.rows)
        entry: dict[str, Any] = {"starts": starts, "positions": ring.positions[:num_tokens].tolist()}
        for name in ("seq_lens", "seats", "num_sampled", "num_rejected", "anchors", "next_prompt_tokens", "seeds"):
            entry[name] = getattr(ring, name)[:num_rows].tolist()
        entry["input_ids"] = ring.input_ids[:num_tokens].tolist()
        entry["hidden"] = None if ring.hidden is None else ring.hidden[:num_tokens].clone()
        for row, request in enumerate(step.rows):
            self._check_row(entry, row, request)
        self.seen.append(entry)
        return entry

    def _check_row(self, entry: dict[str, Any], row: int, request: RowRequest) -> None:
        start, end = entry["starts"][row : row + 2]
        if start == end:
            assert entry["seats"][row] == -1
            assert (entry["seq_lens"][row], entry["num_sampled"][row], entry["num_rejected"][row]) == (0, 0, 0)
            return
        context_len = entry["seq_lens"][row] - (end - start)
        committed = entry["seq_lens"][row] - entry["num_rejected"][row]
        kept = committed - context_len
        assert entry["positions"][start:end] == list(range(context_len, entry["seq_lens"][row]))
        known = self.known.get(request.request_id)
        if known is None:
            return
        assert entry["input_ids"][start : start + kept] == known[context_len:committed]
        if entry["num_sampled"][row]:
            assert entry["anchors"][row] == known[committed]
            assert entry["next_prompt_tokens"][row] == -1
        else:
            assert entry["anchors"][row] == -1
            assert entry["next_prompt_tokens"][row] == known[committed]

    def answer(self, step: StepRequest, entry: dict[str, Any], tag: tuple[int, int, int] | None = None) -> None:
        """Publish the reply to a step. tag: another one than the right one."""
        reply = self.local.drafter.reply(step.seq)
        reply.header.zero_()
        reply.tokens.fill_(-1)
        for row, request in enumerate(step.rows):
            if not request.draft_len or not entry["num_sampled"][row]:
                continue
            committed = entry["seq_lens"][row] - entry["num_rejected"][row]
            known = self.known[request.request_id][committed + 1 : committed + 1 + request.draft_len]
            drafts = self.script(row, committed + 1, list(known))[:7]
            reply.tokens[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int64)
        reply.header[:3] = torch.tensor(tag or (step.seq, EPOCH, len(step.rows)))
