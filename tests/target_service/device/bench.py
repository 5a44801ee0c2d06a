"""How does a test drive a target's core without RPCs, and decide itself when the device is done with a step?

`Bench` holds one core, host or device execution, over a tiny model. With device execution a step that was launched
stays under way until the test lands it (or the core has to), so the host lags behind the device as far as the test
likes. The drafter is a `LocalDrafter` (local_drafter.py) on the other end of a `local` channel.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import torch

from engine.channel.interface import ChannelSpec
from engine.channel.local import LocalChannel
from engine.outbox import Outbox
from target_service.channels import OpenChannel, TargetChannels
from target_service.checks import Limits
from target_service.config import TargetConfig
from target_service.core import TargetCore
from target_service.execution import Engine, build_engine
from target_service.flights import Flight
from target_service.messages import (
    Admission,
    AdmissionReply,
    AdmissionStatus,
    Command,
    Event,
    FaultReply,
    Hello,
    ReleaseRequest,
    RowRequest,
    RowStatus,
    RowVerdict,
    SamplingSettings,
    ServiceInfo,
    StepReply,
    StepRequest,
)
from target_service.streams import GatewayStream
from tests.target_service.device.local_drafter import EPOCH, LocalDrafter

CHANNEL_ID = "local"


# The same tests run on a GPU, where there is one.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ON_DEVICE = {"device": DEVICE, "attention": "triton" if DEVICE == "cuda" else "reference"}


class OneChannel:
    """Stands in for TargetChannels where there is one channel, or none."""

    def __init__(self, channel: OpenChannel | None) -> None:
        self.channel = channel

    def find(self, channel_id: str, epoch: int) -> OpenChannel | None:
        channel = self.channel
        return channel if channel is not None and (channel_id, epoch) == (CHANNEL_ID, EPOCH) else None


class Bench:
    """One core and one gateway's stream. `events`: what the stream was told, in order."""

    def __init__(
        self,
        model: Path,
        execution: str = "device",
        hidden_layers: tuple[int, ...] = (0, 2),
        shares_blocks: bool = False,
        draft_probs: bool = False,
        **settings: Any,
    ) -> None:
        on_device = execution == "device"
        config = TargetConfig.model_validate(
            {
                "execution": execution,
                **(ON_DEVICE if on_device else {}),
                "num_blocks": 64,
                "num_seats": 40,
                "graph_rows": [1, 3, 8],
                **settings,
            }
        )
        self.engine: Engine = build_engine(config, model)
        blocks = self.engine.sessions.blocks
        vocab_size = self.engine.decoder.config.vocab_size
        self.local: LocalChannel | None = None
        channel = None
        if on_device:
            spec = ChannelSpec(
                channel_id=CHANNEL_ID,
                epoch=EPOCH,
                depth=config.channel_depth,
                max_rows=config.num_seats,
                max_tokens=config.max_step_tokens,
                max_draft_len=7,
                hidden_width=len(hidden_layers) * self.engine.decoder.config.hidden_size,
                hidden_dtype=torch.float32,
                vocab_size=vocab_size,
                max_blocks_per_row=blocks.max_blocks,
                block_size=config.block_size,
                num_blocks=blocks.pool.num_blocks,
                draft_probs=draft_probs,
            )
            self.local = LocalChannel(spec, self.engine.device)
            channel = OpenChannel(self.local.target, "scripted", hidden_layers, shares_blocks, last_alive=0.0)
        self.channel = channel
        info = ServiceInfo(
            *("i", "m", vocab_size, self.engine.max_model_len, config.block_size, config.num_blocks),
            *(config.num_seats, config.max_step_tokens, (2,), config.max_verify_len),
        )
        limits = Limits(
            *(vocab_size, self.engine.max_model_len, config.max_step_tokens, config.max_verify_len),
            *(config.num_seats, config.num_blocks, config.block_size),
        )
        channels = cast(TargetChannels, OneChannel(channel))
        self.core = TargetCore(info, limits, self.engine.sessions, self.engine.runner, channels, 5.0, True)
        self.stream = GatewayStream(1, Outbox(1 << 20, on_overflow=lambda: None))
        self.outcomes: deque[Event | Flight] = deque()
        assert isinstance(self.send(Hello("test")), ServiceInfo)

    @torch.inference_mode()
    def send(self, command: Command) -> Event | Flight:
        """Carry out one command."""
        return self.core.handle(self.stream, command)

    @torch.inference_mode()
    def land(self, flight: Flight) -> StepReply:
        """The device is done with the step, and with those before it."""
        self.core.land(flight)
        assert isinstance(flight.reply, StepReply), flight.reply
        return flight.reply

    def admit(self, admission: Admission) -> int:
        """Returns cached_len."""
        reply = self.send(admission)
        assert isinstance(reply, AdmissionReply), reply
        assert reply.status is AdmissionStatus.OK, reply
        return reply.cached_len

    def step(self, step: StepRequest) -> StepReply | Flight:
        """Launch a step; a reply where it is done at once."""
        outcome = self.send(step)
        assert isinstance(outcome, StepReply | Flight), outcome
        return outcome

    def whole_step(self, step: StepRequest) -> StepReply:
        """Launch a step and land it."""
        outcome = self.step(step)
        return self.land(outcome) if isinstance(outcome, Flight) else outcome

    def release(self, request_id: str, epoch: int = 1) -> None:
        assert not isinstance(self.send(ReleaseRequest(request_id, epoch)), FaultReply)

    def assert_free(self) -> None:
        """Nobody is resident, and everything came back."""
        sessions = self.engine.sessions
        sessions.check_integrity()
        assert len(sessions) == 0
        assert sessions.capacity.free_seats == sessions.blocks.num_seats
        assert sessions.capacity.free_blocks == sessions.blocks.pool.num_usable


@dataclass
class Request:
    """One request as the gateway knows it."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    sampling: SamplingSettings = field(default_factory=SamplingSettings)
    draft_len: int = 0
    epoch: int = 1
    generated: list[int] = field(default_factory=list)
    context_len: int = 0
    placed_len: int = 0
    ahead: int = 0  # query tokens under way
    rows_ahead: int = 0
    samples_ahead: int = 0
    stalled: bool = False
    drafts_seq: int = 0
    pending: int = 0
    logprobs: list[Any] = field(default_factory=list)
    num_accepted: int = 0

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated

    @property
    def max_total_len(self) -> int:
        return len(self.prompt) + self.max_tokens

    @property
    def done(self) -> bool:
        return len(self.generated) >= self.max_tokens

    @property
    def planned_len(self) -> int:
        return min(self.context_len + self.ahead, self.max_total_len - 1)

    def admission(self) -> Admission:
        """Of its present epoch."""
        return Admission(
            self.request_id, self.epoch, tuple(self.tokens), len(self.prompt), self.max_total_len, self.sampling
        )


class Planner:
    """Plans steps as the gateway does in run-ahead: from bounds, before the verdicts of the steps under way."""

    def __init__(self, bench: Bench, depth: int, chunk: int = 8, overplan: bool = False) -> None:
        self.bench = bench
        self.depth = depth
        self.chunk = chunk
        self.overplan = overplan  # plan rows past the number of tokens that are left
        self.seq = 0
        self.under_way: deque[tuple[StepRequest, list[Request], Flight | StepReply]] = deque()
        self.with_channel = bench.local is not None
        self.statuses: list[RowStatus] = []
        self.missed = 0
        self.last_step: StepRequest | None = None

    def place(self, request: Request) -> None:
        """Admit it, in its present epoch."""
        request.context_len = self.bench.admit(request.admission())
        request.placed_len = len(request.tokens)
        request.ahead = request.rows_ahead = request.samples_ahead = request.pending = 0
        request.stalled = False

    def can_plan(self, request: Request) -> bool:
        left = request.max_tokens - len(request.generated) - request.samples_ahead
        return not request.done and not request.stalled and (self.overplan or left > 0)

    def row(self, request: Request) -> RowRequest:
        stands = request.planned_len
        draft_len = request.draft_len if self.with_channel else 0
        if stands < request.placed_len:
            query_len = min(request.placed_len - stands, self.chunk)
            samples = stands + query_len == request.placed_len
            return RowRequest(
                request.request_id, request.epoch, stands, query_len, 0, draft_len if samples else 0, samples
            )
        verify_len = request.pending if request.drafts_seq == self.seq else 0
        return RowRequest(request.request_id, request.epoch, stands, 1 + verify_len, verify_len, draft_len, True)

    def launch(self, requests: Sequence[Request]) -> StepRequest:
        """Plan and launch the next step over these requests."""
        rows = [self.row(request) for request in requests]
        from_seq = self.seq if any(row.verify_len for row in rows) else 0
        self.seq += 1
        step = StepRequest(
            self.seq,
            CHANNEL_ID if self.with_channel else "",
            EPOCH if self.with_channel else 0,
            tuple(rows),
            from_seq,
            1000,
            self.depth - 1,
        )
        outcome = self.bench.step(step)
        for request, row in zip(requests, rows, strict=True):
            request.ahead += row.query_len
            request.rows_ahead += 1
            request.samples_ahead += row.samples
            request.pending, request.drafts_seq = row.draft_len, self.seq
        self.under_way.append((step, list(requests), outcome))
        self.last_step = step
        return step

    def take(self) -> StepReply:
        """Land the oldest step and take its verdicts."""
        step, requests, outcome = self.under_way.popleft()
        reply = self.bench.land(outcome) if isinstance(outcome, Flight) else outcome
        self.missed += reply.drafts_missed
        for request, row, verdict in zip(requests, step.rows, reply.rows, strict=True):
            assert (verdict.request_id, verdict.epoch) == (row.request_id, row.epoch)
            if verdict.epoch != request.epoch:
                continue  # of an earlier placement
            self._take_row(request, row, verdict)
        return reply

    def _take_row(self, request: Request, row: RowRequest, verdict: RowVerdict) -> None:
        request.ahead -= row.query_len
        request.rows_ahead -= 1
        request.samples_ahead -= row.samples
        request.stalled = request.stalled and request.rows_ahead > 0
        self.statuses.append(verdict.status)
        if verdict.status is not RowStatus.OK:
            request.stalled = request.rows_ahead > 0
            request.pending = 0
            return
        if row.samples:
            assert len(verdict.token_ids) == verdict.num_accepted + 1 <= verdict.num_drafted + 1 <= row.verify_len + 1
        else:
            assert verdict.context_len == row.context_len + row.query_len
        request.generated += verdict.token_ids
        request.num_accepted += verdict.num_accepted
        request.logprobs += verdict.logprobs
        request.context_len = verdict.context_len
        if verdict.token_ids:
            assert verdict.context_len == len(request.tokens) - 1

    def drain(self) -> None:
        """Take everything that is under way."""
        while self.under_way:
            self.take()

    def run(self, requests: Sequence[Request], drafter: LocalDrafter | None = None) -> None:
        """Requests that are placed, to their end; up to `depth` steps under way."""
        while any(not request.done for request in requests):
            active = [request for request in requests if self.can_plan(request)]
            if active and len(self.under_way) < self.depth:
                step = self.launch(active)
                if drafter is not None:
                    drafter.answer(step, drafter.look(step))
            else:
                self.take()
        self.drain()


def outputs_without_drafts(bench: Bench, requests: Sequence[Request]) -> dict[str, list[int]]:
    """What each request generates, alone and in lockstep. bench: host execution."""
    found = {}
    for request in requests:
        alone = Request(request.request_id, request.prompt, request.max_tokens, request.sampling)
        planner = Planner(bench, 1, chunk=64)
        bench.stream.last_seq = 0
        planner.place(alone)
        planner.run([alone])
        bench.release(alone.request_id)
        found[request.request_id] = alone.generated
    return found
