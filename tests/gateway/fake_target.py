"""A target without a model, for tests of the gateway.

Commands in order, seats and blocks counted, rows checked against what is resident, verdicts by the exact accept rule
over the toy language model. Faults beside those of every fake (`fake_server.py`): slow steps, too few blocks, steps
that fail and verdicts that cannot be.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from protos import common_pb2, target_pb2, target_pb2_grpc
from tests.gateway.fake_server import Channel, FakeServer
from tests.gateway.toy import END, VOCAB, next_token


@dataclass
class Resident:
    """A request on a fake service."""

    epoch: int
    tokens: list[int]
    placed_len: int
    max_total_len: int
    seed: int | None
    num_logprobs: int
    owner: int
    context_len: int = 0
    started: bool = False
    blocks: int = 0


class FakeTarget(FakeServer, target_pb2_grpc.TargetServiceServicer):
    """The target. Everything public may be read, and changed between steps."""

    def __init__(
        self,
        port: int,
        num_seats: int = 8,
        num_blocks: int = 64,
        block_size: int = 4,
        max_model_len: int = 256,
        max_step_tokens: int = 64,
        max_verify_len: int = 7,
    ) -> None:
        super().__init__(port)
        self.num_seats = num_seats
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.max_step_tokens = max_step_tokens
        self.max_verify_len = max_verify_len
        self.step_s = 0.0
        self.cached_len = 0
        self.poison: set[int] = set()  # a row holding one of these tokens makes its step fail
        self.garbled: set[int] = set()  # a row holding one of these tokens gets a verdict that cannot be
        self.seats_of_others = 0  # held by another gateway
        self.resident: dict[str, Resident] = {}
        self.channels: dict[str, Channel] = {}
        self.channel_epoch = 0
        self.plans: list[common_pb2.StepPlan] = []
        self.results: list[target_pb2.StepResult] = []
        self.max_resident = 0
        self.num_plans = 0  # taken in, also those that hang
        self.last_seq = 0
        self.last_channel = ("", 0)  # that a plan named

    def reset(self) -> None:
        self.resident = {}
        self.reset_channels()

    def reset_channels(self) -> None:
        """All channels are closed, as when a drafter's heartbeat has stopped."""
        for channel in self.channels.values():
            channel.closed = True
        self.channels = {}

    def register(self, server: grpc.aio.Server) -> None:
        target_pb2_grpc.add_TargetServiceServicer_to_server(self, server)

    # Accounting.

    @property
    def free_blocks(self) -> int:
        return self.num_blocks - sum(resident.blocks for resident in self.resident.values())

    def capacity(self) -> common_pb2.Capacity:
        return common_pb2.Capacity(free_seats=self.num_seats - len(self.resident), free_blocks=self.free_blocks)

    def assert_empty(self) -> None:
        assert not self.violations, "\n".join(self.violations)
        assert not self.resident, f"seats still held: {sorted(self.resident)}"
        assert self.free_blocks == self.num_blocks

    async def some_steps(self, num_steps: int) -> None:
        """Wait until so many more steps are done."""
        wanted = len(self.results) + num_steps
        async with asyncio.timeout(10):
            while len(self.results) < wanted:  # noqa: ASYNC110 (as in `eventually`)
                await asyncio.sleep(0.001)

    async def attach(self, drafter_id: str) -> Channel:
        old = self.channels.pop(drafter_id, None)
        if old is not None:
            await old.close()
        self.channel_epoch += 1
        channel = Channel(f"{drafter_id}@{self.instance_id}", self.channel_epoch)
        self.channels[drafter_id] = channel
        return channel

    # The stream.

    async def Serve(
        self, request_iterator: AsyncIterator[target_pb2.TargetCommand], context: Any
    ) -> AsyncIterator[target_pb2.TargetEvent]:
        owner = id(context)
        self.last_seq, self.last_channel = 0, ("", 0)
        try:
            async for command in request_iterator:
                event = await self._carry_out(command, owner)
                if event is not None:
                    yield event
        finally:
            for request_id in [name for name, resident in self.resident.items() if resident.owner == owner]:
                del self.resident[request_id]

    async def _carry_out(self, command: target_pb2.TargetCommand, owner: int) -> target_pb2.TargetEvent | None:
        match command.WhichOneof("command"):
            case "hello":
                return target_pb2.TargetEvent(info=self._info())
            case "admit":
                return target_pb2.TargetEvent(admitted=self._admit(command.admit, owner))
            case "plan":
                self._check_seq(command.plan)
                self.num_plans += 1
                await self.go.wait()
                if self.step_s:
                    await asyncio.sleep(self.step_s)
                return await self._step(command.plan)
            case "release":
                return target_pb2.TargetEvent(released=self._release(command.release))
        self.violations.append(f"unknown command {command}")
        return None

    def _info(self) -> target_pb2.TargetInfo:
        return target_pb2.TargetInfo(
            instance_id=self.instance_id,
            model="toy",
            vocab_size=VOCAB,
            max_model_len=self.max_model_len,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            num_seats=self.num_seats,
            max_step_tokens=self.max_step_tokens,
            eos_token_ids=[END],
            max_verify_len=self.max_verify_len,
        )

    def _admit(self, admit: common_pb2.AdmitRequest, owner: int) -> common_pb2.Admitted:
        reply = common_pb2.Admitted(request_id=admit.request_id, epoch=admit.epoch)
        if admit.request_id in self.resident:
            self.violations.append(f"{admit.request_id} admitted twice")
        if admit.max_total_len <= len(admit.token_ids) or admit.max_total_len > self.max_model_len:
            self.violations.append(f"{admit.request_id}: max_total_len {admit.max_total_len}")
        if len(self.resident) >= self.num_seats - self.seats_of_others:
            reply.status = common_pb2.ADMIT_STATUS_NO_SEAT
            reply.capacity.CopyFrom(self.capacity())
            return reply
        sampling = admit.sampling
        self.resident[admit.request_id] = Resident(
            admit.epoch,
            list(admit.token_ids),
            len(admit.token_ids),
            admit.max_total_len,
            sampling.seed if sampling.temperature > 0 else None,
            sampling.num_logprobs,
            owner,
        )
        self.max_resident = max(self.max_resident, len(self.resident))
        reply.status = common_pb2.ADMIT_STATUS_OK
        reply.cached_len = min(self.cached_len, len(admit.token_ids) - 1)
        reply.capacity.CopyFrom(self.capacity())
        return reply

    def _release(self, release: common_pb2.Release) -> common_pb2.Released:
        resident = self.resident.get(release.request_id)
        if resident is not None and resident.epoch <= release.epoch:
            del self.resident[release.request_id]
        return common_pb2.Released(request_id=release.request_id, epoch=release.epoch, capacity=self.capacity())

    # A step.

    def _check_seq(self, plan: common_pb2.StepPlan) -> None:
        """Counted per channel, from 1, without gaps; a plan without a channel counts too."""
        channel = (plan.channel_id, plan.channel_epoch)
        is_new = bool(plan.channel_id) and channel != self.last_channel
        if plan.seq != (1 if is_new else self.last_seq + 1) and (is_new or self.last_seq):
            self.violations.append(f"seq {plan.seq} on {channel} after {self.last_seq} on {self.last_channel}")
        self.last_seq = plan.seq
        if plan.channel_id:
            self.last_channel = channel

    async def _step(self, plan: common_pb2.StepPlan) -> target_pb2.TargetEvent:
        self.plans.append(plan)
        result = target_pb2.StepResult(seq=plan.seq)
        channel = next((c for c in self.channels.values() if c.channel_id == plan.channel_id), None)
        if plan.channel_id and (channel is None or channel.epoch != plan.channel_epoch):
            channel = None
        drafts: dict[str, list[int]] = {}
        if any(row.verify_len for row in plan.rows):
            taken = None
            if channel is not None and not channel.closed:
                taken = await channel.take(channel.replies, plan.drafts_from_seq, plan.deadline_ms / 1e3)
            result.drafts_missed = taken is None
            drafts = taken or {}
        if sum(row.query_len for row in plan.rows) > self.max_step_tokens or not plan.rows:
            self.violations.append(f"step {plan.seq}: too many tokens, or no row")
        entry: dict[str, list[int]] = {}
        for row in plan.rows:
            resident = self.resident.get(row.request_id)
            if resident is not None and self.poison & set(resident.tokens):
                return target_pb2.TargetEvent(
                    fault=target_pb2.Fault(kind="ModelError", detail="poisoned", seq=plan.seq)
                )
        for row in plan.rows:
            resident = self.resident.get(row.request_id)
            num_known = len(resident.tokens) if resident is not None else 0
            verdict = self._row(row, drafts.get(row.request_id, []), plan.ahead > 0)
            result.rows.append(verdict)
            if verdict.status == target_pb2.ROW_STATUS_OK:
                entry[row.request_id] = [num_known, *verdict.token_ids]
        if channel is not None:
            await channel.put(channel.ring, plan.seq, entry)
        result.capacity.CopyFrom(self.capacity())
        self.results.append(result)
        return target_pb2.TargetEvent(result=result)

    def _row(self, row: common_pb2.RowPlan, drafts: list[int], ahead: bool) -> target_pb2.RowResult:
        result = target_pb2.RowResult(request_id=row.request_id, epoch=row.epoch)
        resident = self.resident.get(row.request_id)
        if resident is None or resident.epoch != row.epoch:
            result.status = target_pb2.ROW_STATUS_UNKNOWN
            return result
        if not resident.started:
            resident.started = True
            resident.context_len = row.context_len
        in_prompt = resident.context_len < resident.placed_len
        too_far = in_prompt and row.context_len > resident.context_len
        if ahead and (too_far or len(resident.tokens) >= resident.max_total_len):
            result.status = target_pb2.ROW_STATUS_SKIPPED
            result.context_len = resident.context_len
            return result
        self._check_row(row, resident, ahead)
        drafts = [] if in_prompt else drafts[: row.verify_len]
        drafts = drafts[: max(0, resident.max_total_len - len(resident.tokens) - 1)]
        query_len = row.query_len if in_prompt else 1 + len(drafts)
        needed = -(-(resident.context_len + query_len) // self.block_size)
        if needed > resident.blocks:
            if needed - resident.blocks > self.free_blocks:
                result.status = target_pb2.ROW_STATUS_STARVED
                result.context_len = resident.context_len
                return result
            resident.blocks = needed
        result.status = target_pb2.ROW_STATUS_OK
        if in_prompt:
            resident.context_len += query_len
        if row.samples:
            accepted = 0
            for draft in drafts:
                if draft != next_token(resident.tokens, resident.seed):
                    break
                resident.tokens.append(draft)
                accepted += 1
            resident.tokens.append(next_token(resident.tokens, resident.seed))
            if not in_prompt:
                resident.context_len += 1 + accepted
            result.token_ids.extend(resident.tokens[-1 - accepted :])
            result.num_accepted = accepted
            result.num_drafted = len(drafts)
            if resident.num_logprobs >= 0:
                for token in result.token_ids:
                    result.logprobs.add(logprob=-float(token), top_ids=[token], top_logprobs=[-float(token)])
        result.context_len = resident.context_len
        if self.garbled & set(resident.tokens):
            result.num_accepted += 1
        return result

    def _check_row(self, row: common_pb2.RowPlan, resident: Resident, ahead: bool) -> None:
        def wrong(what: str) -> None:
            self.violations.append(f"{row.request_id}: {what}: {' '.join(str(row).split())}")

        is_bound = ahead and resident.context_len <= row.context_len < resident.max_total_len
        if row.context_len != resident.context_len and not is_bound:
            wrong(f"context_len is {resident.context_len}")
        if row.verify_len > self.max_verify_len or row.draft_len > self.max_verify_len:
            wrong("verify_len or draft_len above max_verify_len")
        if resident.context_len < resident.placed_len:
            left = resident.placed_len - resident.context_len
            if row.verify_len or row.query_len > left or row.samples != (row.query_len == left):
                wrong(f"{left} prompt tokens are left")
        elif row.query_len != 1 + row.verify_len or not row.samples:
            wrong("a decode row is 1 + verify_len and samples")
