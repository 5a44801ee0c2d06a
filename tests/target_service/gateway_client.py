"""How does a test talk to a target as a gateway does?

`Gateway` holds one Serve stream: commands out, events in, each wait with a deadline. `Driver` runs whole requests
through it in lockstep, with or without a drafter.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc

from protos import common_pb2, target_pb2, target_pb2_grpc
from tests.target_service.scripted_drafter import ScriptedDrafter

DEADLINE_S = 30.0


class Gateway:
    """One Serve stream."""

    def __init__(self, address: str, hello: bool = True) -> None:
        self._channel = grpc.insecure_channel(address)
        self._commands: queue.Queue[target_pb2.TargetCommand | None] = queue.Queue()
        self._events: queue.Queue[target_pb2.TargetEvent | None] = queue.Queue()
        self.status: grpc.StatusCode | None = None
        self._call = target_pb2_grpc.TargetServiceStub(self._channel).Serve(iter(self._commands.get, None))
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if hello:
            self.send(hello=target_pb2.TargetHello(gateway_id="test"))
            self.info = self.event("info")

    def __enter__(self) -> Gateway:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def send(self, **command: Any) -> None:
        """Send one TargetCommand, given as its one field."""
        self._commands.put(target_pb2.TargetCommand(**command))

    def any_event(self) -> target_pb2.TargetEvent:
        """The next event."""
        event = self._events.get(timeout=DEADLINE_S)
        assert event is not None, f"the stream ended: {self.status}"
        return event

    def event(self, kind: str) -> Any:
        """The next event, which must be of that kind."""
        event = self.any_event()
        assert event.WhichOneof("event") == kind, event
        return getattr(event, kind)

    def admit(self, request: common_pb2.AdmitRequest) -> common_pb2.Admitted:
        self.send(admit=request)
        return self.event("admitted")

    def plan(self, plan: common_pb2.StepPlan) -> target_pb2.StepResult:
        self.send(plan=plan)
        return self.event("result")

    def fault(self, **command: Any) -> target_pb2.Fault:
        """Send a command that must be answered by a Fault."""
        self.send(**command)
        return self.event("fault")

    def release(self, request_id: str, epoch: int = 1) -> common_pb2.Released:
        self.send(release=common_pb2.Release(request_id=request_id, epoch=epoch))
        return self.event("released")

    def half_close(self) -> None:
        """Say that no more commands come, and wait for the end of the stream."""
        self._commands.put(None)
        self._reader.join(DEADLINE_S)
        assert not self._reader.is_alive()

    def close(self) -> None:
        """Break the stream off. Idempotent."""
        self._call.cancel()
        self._commands.put(None)
        self._reader.join(DEADLINE_S)
        self._channel.close()

    def _read(self) -> None:
        try:
            for event in self._call:
                self._events.put(event)
            self.status = grpc.StatusCode.OK
        except grpc.RpcError as error:
            self.status = error.code()
        self._events.put(None)


@dataclass
class Running:
    """One request as the driver knows it. full: what its drafts are taken from (prompt and expected output)."""

    request_id: str
    prompt: list[int]
    max_tokens: int
    full: list[int] = field(default_factory=list)
    sampling: dict[str, Any] = field(default_factory=dict)
    draft_len: int = 0
    epoch: int = 1
    generated: list[int] = field(default_factory=list)
    from_draft: int = 0
    drafted: int = 0
    context_len: int = 0
    in_prompt: bool = True
    cached_len: int = 0
    logprobs: list[Any] = field(default_factory=list)

    @property
    def done(self) -> bool:
        return len(self.generated) >= self.max_tokens

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.generated


class Driver:
    """Runs requests through one Gateway in lockstep. Every step's rows are all requests that are not done."""

    def __init__(self, gateway: Gateway, drafter: ScriptedDrafter | None = None, chunk: int = 512) -> None:
        self.gateway = gateway
        self.drafter = drafter
        self.chunk = chunk
        self.seq = 0
        self.deadline_ms = 2000
        self.drafts_age = 1  # how many steps back the drafts to verify were made
        self._numbers = itertools.count()

    def request(self, prompt: Sequence[int], max_tokens: int, **fields: Any) -> Running:
        return Running(f"r{next(self._numbers)}-{id(self):x}", list(prompt), max_tokens, **fields)

    def admission(self, running: Running) -> common_pb2.AdmitRequest:
        sampling = common_pb2.SamplingParams(**{"num_logprobs": -1, **running.sampling})
        return common_pb2.AdmitRequest(
            request_id=running.request_id,
            epoch=running.epoch,
            token_ids=running.tokens,
            prompt_len=len(running.prompt),
            max_total_len=len(running.prompt) + running.max_tokens,
            sampling=sampling,
        )

    def admit(self, running: Running, start_at: int | None = None) -> None:
        reply = self.gateway.admit(self.admission(running))
        assert reply.status == common_pb2.ADMIT_STATUS_OK, reply
        running.cached_len = reply.cached_len
        running.context_len = reply.cached_len if start_at is None else start_at
        running.in_prompt = True

    def row(self, running: Running) -> common_pb2.RowPlan:
        verify_len = 0
        if running.in_prompt:
            left = len(running.tokens) - running.context_len
            query_len = min(left, self.chunk)
            samples = query_len == left
        else:
            verify_len = running.draft_len if self.drafter is not None else 0
            query_len, samples = 1 + verify_len, True
        return common_pb2.RowPlan(
            request_id=running.request_id,
            epoch=running.epoch,
            context_len=running.context_len,
            query_len=query_len,
            verify_len=verify_len,
            draft_len=running.draft_len,
            samples=samples,
        )

    def step(self, requests: Sequence[Running]) -> target_pb2.StepResult:
        """One step over these requests, applied to them."""
        self.seq += 1
        rows = [self.row(running) for running in requests]
        plan = common_pb2.StepPlan(seq=self.seq, rows=rows, deadline_ms=self.deadline_ms)
        if self.drafter is not None:
            plan.channel_id, plan.channel_epoch = self.drafter.channel_id, self.drafter.channel_epoch
            plan.drafts_from_seq = max(0, self.seq - self.drafts_age)
            self.drafter.expect(self.seq, [(running.full, running.draft_len) for running in requests])
        result = self.gateway.plan(plan)
        assert [row.request_id for row in result.rows] == [running.request_id for running in requests]
        for running, planned, row in zip(requests, rows, result.rows, strict=True):
            if row.status != target_pb2.ROW_STATUS_OK:
                continue
            running.context_len = row.context_len
            running.generated += row.token_ids
            running.from_draft += row.num_accepted
            running.drafted += row.num_drafted
            running.logprobs += row.logprobs
            running.in_prompt = running.in_prompt and not planned.samples
            if planned.samples:
                assert len(row.token_ids) == row.num_accepted + 1
                assert row.context_len == len(running.tokens) - 1
        return result

    def run(self, requests: Sequence[Running]) -> None:
        """Admit, run to the end, release."""
        for running in requests:
            self.admit(running)
        for active in iter(lambda: [running for running in requests if not running.done], []):
            result = self.step(active)
            assert all(row.status == target_pb2.ROW_STATUS_OK for row in result.rows), result
        for running in requests:
            self.gateway.release(running.request_id, running.epoch)
