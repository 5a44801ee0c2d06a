"""How are a step's rows written into its plan, and which shape does it run in?

Everything that the host knows of a step goes into one `HostPlan`; what the device then needs to be told by arguments is
a `Launch`. Decode rows alone, at most as many as the largest captured graph takes, make a uniform step: padded to a
captured number of rows, and all to the longest row's tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.channel.device import DeviceTargetEnd, ReplyViews
from kernels.reference.commit_rows import TOKENS
from target_service.device.buffers import StepMemory, StepShape
from target_service.device.forward import Batch, HostRows
from target_service.device.logprobs import LogprobRows, wanted_rows
from target_service.device.padding import Padding
from target_service.device.plan_buffer import HostPlan
from target_service.device.rows import wants_drafts
from target_service.device.sampling import DeviceSampling, SamplingNeeds
from target_service.flights import FlightRow
from target_service.messages import StepRequest


@dataclass(frozen=True, slots=True)
class Launch:
    """A step being launched. num_tokens: of the plan. batch: None for a uniform step. changes: of the block tables.
    end: where it is published; reply: where its drafts come from, and num_reply_rows: how many rows that must have.
    context_lens: each row's, at most so; -1 where it is not launched.
    """

    step: StepRequest
    rows: tuple[FlightRow, ...]
    num_tokens: int
    shape: StepShape
    needs: SamplingNeeds
    batch: Batch | None
    logprobs: LogprobRows | None
    logprob_where: tuple[torch.Tensor, torch.Tensor] | None
    changes: tuple[torch.Tensor, torch.Tensor] | None
    end: DeviceTargetEnd | None
    reply: ReplyViews | None
    num_reply_rows: int
    context_lens: Sequence[int] = ()

    @property
    def wants_probs(self) -> bool:
        """Whether drafts may have to be weighed by the probabilities that came with them."""
        return self.needs.weighs and self.reply is not None and self.reply.probs is not None


class Packer:
    """Writes plans. Used by one thread."""

    def __init__(self, memory: StepMemory, sampling: DeviceSampling, padding: Padding) -> None:
        self._plans = memory.plans
        self._buffers = memory.buffers
        self._tables = memory.tables
        self._sampling = sampling
        self._padding = padding

    def pack(
        self,
        plan: HostPlan,
        step: StepRequest,
        rows: tuple[FlightRow, ...],
        end: DeviceTargetEnd | None,
        places: dict[tuple[str, int], int] | None,
    ) -> Launch:
        """Write the step's plan, and decide its shape. places: the rows of the reply that drafts come from, None: none
        are wanted.
        """
        num_rows = len(rows)
        reply = end.reply(step.drafts_from_seq) if end is not None and places is not None else None
        step_key = (step.channel_id, step.channel_epoch, step.drafts_from_seq)
        seats, query_lens, limits, row_places = [-1] * num_rows, [0] * num_rows, [0] * num_rows, [-1] * num_rows
        sampled: list[tuple[int, int, int]] = []  # plan row, num_logits, num_logprobs
        context_lens = [-1] * num_rows
        longest = num_tokens = 0
        prompts = False
        for index, row in enumerate(rows):
            session = row.session
            if session is None or not row.query_len:
                continue
            seats[index], query_lens[index], limits[index] = session.seat, row.query_len, row.limit
            num_tokens += row.query_len
            longest = max(longest, row.query_len)
            context_lens[index] = session.launched_len
            prompts = prompts or row.is_prompt
            if row.num_logits:
                sampled.append((index, row.num_logits, session.sampling.num_logprobs))
            if places is not None and wants_drafts(row.request, session, step_key):
                row_places[index] = places.get((row.request.request_id, row.request.epoch), -1)
        padded = None if prompts or not longest else self._padding.padded_rows(num_rows, longest)
        plan.clear()
        fields = plan.rows
        fields["tag"][0] = step.seq
        fields["seats"][:num_rows] = seats
        fields["query_lens"][:num_rows] = query_lens
        fields["limits"][:num_rows] = limits
        fields["places"][:num_rows] = row_places
        needs = self._sampling.needs(seats[index] for index, _, _ in sampled)
        self._sampling.fill(plan, fields["seats"][:num_rows], needs)
        batch = None
        if padded is not None:
            shape = self._buffers.uniform(padded, longest)
            first_logits = list(range(0, num_rows * longest, longest))
        else:
            np.cumsum(query_lens, out=fields["batch_starts"][1 : num_rows + 1])
            width = max((row.query_len for row in rows if not row.is_prompt), default=1) - 1
            shape = self._buffers.shape(num_rows, num_tokens, max(width, 0), longest)
            batch, first_logits = self._pack_batch(plan, rows, prompts)
        logprobs = wanted_rows(
            [(index, first_logits[index], num_logits, wanted) for index, num_logits, wanted in sampled if wanted >= 0],
            TOKENS + shape.drafts.shape[1] + 1,
            TOKENS,
        )
        where = None
        if logprobs is not None:
            where = (self._plans.added(plan, logprobs.logit_rows), self._plans.added(plan, logprobs.cells))
        return Launch(
            step,
            rows,
            num_tokens,
            shape,
            needs,
            batch,
            logprobs,
            where,
            self._tables.add(self._plans, plan, [seat for seat in seats if seat >= 0]),
            end,
            reply,
            len(places) if places is not None else 0,
            context_lens,
        )

    def _pack_batch(self, plan: HostPlan, rows: tuple[FlightRow, ...], prompts: bool) -> tuple[Batch, list[int]]:
        """What a step that is not uniform has beside its rows. Returns also each row's first logit row."""
        fields, num_rows = plan.rows, len(rows)
        prompt: list[int] = []
        logit_rows: list[int] = []
        first_logits: list[int] = []
        host = HostRows([0] * num_rows, [0] * num_rows, [0] * num_rows, [False] * num_rows)
        for index, row in enumerate(rows):
            first_logits.append(len(logit_rows))
            session = row.session
            if not row.query_len or session is None:
                continue
            host.context_lens[index], host.query_lens[index] = session.launched_len, row.query_len
            host.num_logits[index], host.is_prompt[index] = row.num_logits, row.is_prompt
            if row.is_prompt:
                start = session.launched_len
                end = start + row.query_len
                fields["is_prompt"][index] = True
                fields["known_lens"][index] = start
                fields["prompt_starts"][index] = len(prompt)
                prompt.extend(session.tokens[start:end])
                if not row.num_logits:
                    fields["next_prompt_tokens"][index] = session.tokens[end]
            last = int(fields["batch_starts"][index + 1])
            logit_rows.extend(range(last - row.num_logits, last))
        fields["logit_starts"][1 : num_rows + 1] = [*first_logits[1:], len(logit_rows)][:num_rows]
        device_rows = self._plans.rows
        batch = Batch(
            device_rows["batch_starts"][: num_rows + 1],
            device_rows["is_prompt"][:num_rows],
            device_rows["prompt_starts"][:num_rows],
            self._plans.added(plan, np.array(prompt, np.int64)) if prompts else self._buffers.no_prompt,
            self._plans.added(plan, np.array(logit_rows, np.int64)),
            host,
        )
        return batch, first_logits
