"""A drafter without a model, for tests of the gateway.

Follows the toy language model through the ring of the channel that it shares with a fake target. Faults beside those of
every fake (`fake_server.py`): slow or refused, mute, requests lost.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import grpc.aio

from protos import common_pb2, drafter_pb2, drafter_pb2_grpc
from tests.gateway.fake_server import Channel, FakeServer
from tests.gateway.fake_target import FakeTarget
from tests.gateway.toy import draft_after


@dataclass
class DrafterState:
    """What the drafter knows of a request."""

    epoch: int
    tokens: list[int]
    seed: int | None
    owner: int
    cold: bool = False


class FakeDrafter(FakeServer, drafter_pb2_grpc.DrafterServiceServicer):
    """The drafter. targets: by address, as it would reach them. holes: steps of a request it follows that it missed."""

    def __init__(self, port: int, targets: dict[str, FakeTarget], max_draft_len: int = 4, num_seats: int = 8) -> None:
        super().__init__(port)
        self.targets = targets
        self.max_draft_len = max_draft_len
        self.num_seats = num_seats
        self.cached_len = 1 << 20
        self.delay_s = 0.0
        self.admit_s = 0.0
        self.refusal = ""  # why no channel can be opened
        self.num_opened = 0
        self.is_mute = False  # does not answer hello
        self.lose: set[str] = set()  # these turn cold at the next step
        self.state: dict[str, DrafterState] = {}
        self.channel: Channel | None = None
        self.holes = 0
        self.num_drafted = 0
        self.admitted: list[common_pb2.AdmitRequest] = []
        self.plans: list[common_pb2.StepPlan] = []

    def reset(self) -> None:
        self.state = {}
        if self.channel is not None:
            self.channel.closed = True
        self.channel = None

    def register(self, server: grpc.aio.Server) -> None:
        drafter_pb2_grpc.add_DrafterServiceServicer_to_server(self, server)

    def assert_empty(self) -> None:
        assert not self.violations, "\n".join(self.violations)
        assert not self.state, f"still followed: {sorted(self.state)}"

    async def Serve(
        self, request_iterator: AsyncIterator[drafter_pb2.DrafterCommand], context: Any
    ) -> AsyncIterator[drafter_pb2.DrafterEvent]:
        owner = id(context)
        try:
            async for command in request_iterator:
                event = await self._carry_out(command, owner)
                if event is not None:
                    yield event
        finally:
            for request_id in [name for name, state in self.state.items() if state.owner == owner]:
                del self.state[request_id]

    async def _carry_out(self, command: drafter_pb2.DrafterCommand, owner: int) -> drafter_pb2.DrafterEvent | None:
        match command.WhichOneof("command"):
            case "hello":
                if self.is_mute:
                    return None
                return drafter_pb2.DrafterEvent(
                    info=drafter_pb2.DrafterInfo(
                        instance_id=self.instance_id,
                        drafter_id="toy",
                        method="ngram",
                        max_draft_len=self.max_draft_len,
                    )
                )
            case "open":
                return await self._open(command.open.target_address)
            case "admit":
                await asyncio.sleep(self.admit_s)
                return drafter_pb2.DrafterEvent(admitted=self._admit(command.admit, owner))
            case "plan":
                await self.go.wait()
                return drafter_pb2.DrafterEvent(report=await self._draft(command.plan))
            case "release":
                release = command.release
                state = self.state.get(release.request_id)
                if state is not None and state.epoch <= release.epoch:
                    del self.state[release.request_id]
                return drafter_pb2.DrafterEvent(
                    released=common_pb2.Released(request_id=release.request_id, epoch=release.epoch)
                )
        self.violations.append(f"unknown command {command}")
        return None

    async def _open(self, address: str) -> drafter_pb2.DrafterEvent:
        target = self.targets.get(address)
        opened = drafter_pb2.ChannelOpened(target_address=address)
        self.num_opened += 1
        if target is None or target._server is None or self.refusal:
            opened.detail = self.refusal or "no target there"
        else:
            self.channel = await target.attach("toy")
            opened.ok = True
            opened.channel_id = self.channel.channel_id
            opened.channel_epoch = self.channel.epoch
            opened.kind = "shm"
            opened.target_instance_id = target.instance_id
        return drafter_pb2.DrafterEvent(opened=opened)

    def _admit(self, admit: common_pb2.AdmitRequest, owner: int) -> common_pb2.Admitted:
        self.admitted.append(admit)
        reply = common_pb2.Admitted(request_id=admit.request_id, epoch=admit.epoch)
        if self.channel is None or admit.channel_id != self.channel.channel_id:
            self.violations.append(f"{admit.request_id} admitted on another channel")
        if len(self.state) >= self.num_seats and admit.request_id not in self.state:
            reply.status = common_pb2.ADMIT_STATUS_NO_SEAT
            return reply
        seed = admit.sampling.seed if admit.sampling.temperature > 0 else None
        self.state[admit.request_id] = DrafterState(admit.epoch, list(admit.token_ids), seed, owner)
        reply.status = common_pb2.ADMIT_STATUS_OK
        reply.cached_len = min(self.cached_len, len(admit.token_ids) - 1)
        return reply

    async def _draft(self, plan: common_pb2.StepPlan) -> drafter_pb2.DraftReport:
        self.plans.append(plan)
        report = drafter_pb2.DraftReport(seq=plan.seq, channel_id=plan.channel_id)
        channel = self.channel
        if channel is None or (plan.channel_id, plan.channel_epoch) != (channel.channel_id, channel.epoch):
            report.missed = True
            return report
        entry = await channel.take(channel.ring, plan.seq, plan.deadline_ms / 1e3)
        if entry is None:
            report.missed = True
            for row in plan.rows:
                self._turn_cold(row, report)
            return report
        if self.delay_s:
            await asyncio.sleep(self.delay_s)
        reply: dict[str, list[int]] = {}
        for row in plan.rows:
            state = self.state.get(row.request_id)
            if state is None or state.epoch != row.epoch:
                if row.draft_len:
                    self.violations.append(f"{row.request_id} is to be drafted for but is not followed")
                continue
            if row.request_id not in entry:
                continue  # starved: nothing happened
            num_known, *tokens = entry[row.request_id]
            if num_known != len(state.tokens):
                self.holes += 1
                self._turn_cold(row, report)
            if row.request_id in self.lose:
                self.lose.discard(row.request_id)
                self._turn_cold(row, report)
            state.tokens.extend(tokens)
            if state.cold:
                if row.request_id not in report.cold_request_ids:
                    report.cold_request_ids.append(row.request_id)
                continue
            drafts = draft_after(state.tokens, row.draft_len, state.seed)
            reply[row.request_id] = drafts
            report.num_drafted += len(drafts)
        self.num_drafted += report.num_drafted
        await channel.put(channel.replies, plan.seq, reply)
        return report

    def _turn_cold(self, row: common_pb2.RowPlan, report: drafter_pb2.DraftReport) -> None:
        state = self.state.get(row.request_id)
        if state is not None and not state.cold:
            state.cold = True
            report.cold_request_ids.append(row.request_id)
