"""How does a benchmark keep a target and a drafter busy with nothing but plans?

`PlanDriver` is the least that a gateway must do: one stream to each service, requests placed on both, then one
`StepPlan` after the other to both at once, up to `depth` of them before their verdicts. Every decode row asks for
`draft_len` drafts and verifies as many. Lengths in plans are bounds, as the gateway's are: the last verdict's plus all
query tokens under way. Nothing is scheduled, trimmed or turned into text.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any, Protocol, TypeVar

import grpc.aio

from protos import common_pb2, drafter_pb2, drafter_pb2_grpc, target_pb2, target_pb2_grpc

ResultT = TypeVar("ResultT")

START_S = 60.0
RUN_S = 240.0  # the longest run of steps: the first ones may compile kernels
STEP_DEADLINE_MS = 2000
OPTIONS = (("grpc.max_receive_message_length", 1 << 28), ("grpc.max_send_message_length", 1 << 28))


def run_driver(work: Coroutine[Any, Any, ResultT]) -> ResultT:
    """asyncio.run, on uvloop where it is installed, as the gateway does."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(work)
    return uvloop.run(work)


class DriverError(Exception):
    """A service answered otherwise than the benchmark needs; says what."""


@dataclass(frozen=True, slots=True)
class Load:
    """What runs: `prompts`, one request each. max_new_tokens: bound of each.

    blind_verify_len: without a drafter, drafts that every decode row is to verify all the same: there are none, so they
    are all rejected, and the step costs what verifying them costs (host execution: with trim_absent_drafts off).
    logprobs: ask for every token's.
    """

    prompts: Sequence[Sequence[int]]
    draft_len: int
    max_new_tokens: int
    temperature: float = 0.0
    blind_verify_len: int = 0
    logprobs: bool = False


@dataclass(slots=True)
class Timeline:
    """What came of a run of steps. arrivals: when each verdict came, in seconds of perf_counter; first and last sent
    lie between `started` and the last arrival. results, reports: the services' own messages.
    """

    started: float
    arrivals: list[float] = field(default_factory=list)
    results: list[Any] = field(default_factory=list)
    reports: list[Any] = field(default_factory=list)
    tokens: dict[str, list[int]] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that all rows gave."""
        return int(sum(len(row.token_ids) for result in self.results for row in result.rows))

    @property
    def mean_accepted_len(self) -> float:
        """Tokens a row gave in a step, the target's own among them."""
        rows = sum(len(result.rows) for result in self.results)
        return self.num_tokens / rows if rows else 0.0

    @property
    def missed(self) -> int:
        """Steps whose drafts did not come, or that the drafter missed."""
        return int(sum(result.drafts_missed for result in self.results) + sum(report.missed for report in self.reports))

    def step_times_ms(self, window: int = 8, skip: int = 4) -> list[float]:
        """Milliseconds per step, each over `window` steps in a row (verdicts come in bunches), after the first `skip`
        of them.
        """
        marks = self.arrivals[skip::window]
        return [1e3 * (after - before) / window for before, after in pairwise(marks)]


@dataclass(slots=True)
class _Row:
    request_id: str
    prompt_len: int
    context_len: int = 0  # committed
    under_way: int = 0  # query tokens sent and not yet answered
    asked: int = 0  # drafts that the row before asked for


Planned = tuple[_Row, common_pb2.RowPlan]


class EventStream(Protocol):
    """Commands out, events in, for one service; protobuf messages."""

    async def send(self, message: Any) -> None:
        """One command."""
        ...

    async def event(self, kind: str) -> Any:
        """The next event, which must be of that kind. DriverError: it is another."""
        ...


class _GrpcStream:
    """A Serve stream of a service process."""

    def __init__(self, call: Any) -> None:
        self._call = call

    async def send(self, message: Any) -> None:
        await self._call.write(message)

    async def event(self, kind: str) -> Any:
        message = await self._call.read()
        if message is grpc.aio.EOF:  # type: ignore[attr-defined]  # the stubs do not have it
            raise DriverError(f"the stream ended: {await self._call.code()} {await self._call.details()}")
        found = message.WhichOneof("event")
        if found != kind:
            raise DriverError(f"expected {kind}, got {found}: {getattr(message, found)}")
        return getattr(message, kind)


class PlanDriver:
    """`async with` it. One stream to the target and, unless `drafter` is None, one to the drafter, on one channel."""

    def __init__(
        self,
        target: str | EventStream,
        drafter: str | EventStream | None,
        name: str = "benchmark",
        deadline_ms: int = STEP_DEADLINE_MS,
    ) -> None:
        """target, drafter: addresses, or streams that are there. deadline_ms: how long the services wait for each other
        in a step.
        """
        self._services = (target, drafter)
        self._deadline_ms = deadline_ms
        self._name = name
        self._seq = 0
        self._epoch = 0
        self._rows: list[_Row] = []
        self._load: Load | None = None
        self.channel: Any = None
        self.info: Any = None

    async def __aenter__(self) -> PlanDriver:
        target, drafter = self._services
        self._stack = contextlib.AsyncExitStack()
        async with asyncio.timeout(START_S):
            await self._connect(target, drafter)
        return self

    async def _connect(self, target: str | EventStream, drafter: str | EventStream | None) -> None:
        self._target: EventStream
        if isinstance(target, str):
            channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(target, options=OPTIONS))
            self._target = _GrpcStream(target_pb2_grpc.TargetServiceStub(channel).Serve())
        else:
            self._target = target
        await self._target.send(target_pb2.TargetCommand(hello=target_pb2.TargetHello(gateway_id=self._name)))
        self.info = await self._target.event("info")
        self._drafter: EventStream | None = None
        if isinstance(drafter, str):
            channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(drafter, options=OPTIONS))
            self._drafter = _GrpcStream(drafter_pb2_grpc.DrafterServiceStub(channel).Serve())
        else:
            self._drafter = drafter
        if self._drafter is not None:
            address = target if isinstance(target, str) else "here"
            await self._drafter.send(drafter_pb2.DrafterCommand(hello=drafter_pb2.DrafterHello(gateway_id=self._name)))
            await self._drafter.event("info")
            await self._drafter.send(drafter_pb2.DrafterCommand(open=drafter_pb2.OpenChannel(target_address=address)))
            self.channel = await self._drafter.event("opened")
            if not self.channel.ok:
                raise DriverError(f"the drafter opened no channel: {self.channel.detail}")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def place(self, load: Load) -> Timeline:
        """Admit the requests of a load on both services and run their prompts, in lockstep; decode rows come next.

        Returns the steps of the prompts.
        """
        self._load = load
        self._epoch += 1
        self._rows = []
        for index, prompt in enumerate(load.prompts):
            row = _Row(f"{self._name}-{self._epoch}-{index}", len(prompt))
            admission = common_pb2.AdmitRequest(
                request_id=row.request_id,
                epoch=1,
                token_ids=prompt,
                prompt_len=len(prompt),
                max_total_len=len(prompt) + load.max_new_tokens,
                sampling=common_pb2.SamplingParams(
                    temperature=load.temperature, seed=index, seeded=True, num_logprobs=0 if load.logprobs else -1
                ),
                channel_id=self.channel.channel_id if self.channel is not None else "",
            )
            await self._target.send(target_pb2.TargetCommand(admit=admission))
            answers = [await self._target.event("admitted")]
            if self._drafter is not None:
                await self._drafter.send(drafter_pb2.DrafterCommand(admit=admission))
                answers.append(await self._drafter.event("admitted"))
            for answer in answers:
                if answer.status != common_pb2.ADMIT_STATUS_OK:
                    raise DriverError(f"request {index} was not admitted: {answer}")
            row.context_len = min(answer.cached_len for answer in answers)
            self._rows.append(row)
        prompts = Timeline(time.perf_counter())
        while any(row.context_len < row.prompt_len for row in self._rows):
            step = await self._run(1, 1, lambda step: self._prompt_rows(), 1)
            prompts.arrivals += step.arrivals
            prompts.results += step.results
            prompts.reports += step.reports
        return prompts

    async def decode(self, num_steps: int, depth: int, groups: int = 1) -> Timeline:
        """Run so many decode steps, up to `depth` plans under way at once (1: lockstep).

        groups: the rows are dealt into so many groups, which take turns, so that one group's drafts can be made while
        another's are verified; depth must then be at least as much.
        """
        for row in self._rows:
            row.asked = 0  # by the run before, whose last drafts need not be in the step before ours
        return await self._run(num_steps, depth, lambda step: self._decode_rows(step, groups), groups)

    async def release(self) -> None:
        """The requests give back what they hold."""
        for row in self._rows:
            release = common_pb2.Release(request_id=row.request_id, epoch=1)
            await self._target.send(target_pb2.TargetCommand(release=release))
            await self._target.event("released")
            if self._drafter is not None:
                await self._drafter.send(drafter_pb2.DrafterCommand(release=release))
                await self._drafter.event("released")
        self._rows = []

    def _prompt_rows(self) -> list[Planned]:
        """The next chunks, as many as one plan takes."""
        assert self._load is not None
        budget, planned = int(self.info.max_step_tokens), []
        for row in self._rows:
            left = row.prompt_len - row.context_len
            query_len = min(left, budget)
            if query_len == 0:
                continue
            budget -= query_len
            # No drafts yet: rows whose prompts end in different steps begin to decode together.
            planned.append((row, self._row_plan(row, query_len, 0, 0, query_len == left)))
        return planned

    def _decode_rows(self, step: int, groups: int) -> list[Planned]:
        assert self._load is not None
        draft_len, blind = self._load.draft_len, 0
        if self._drafter is None:
            draft_len, blind = 0, self._load.blind_verify_len
        rows = self._rows[step % groups :: groups]
        return [
            (row, self._row_plan(row, 1 + (row.asked or blind), row.asked or blind, draft_len, True)) for row in rows
        ]

    def _row_plan(
        self, row: _Row, query_len: int, verify_len: int, draft_len: int, samples: bool
    ) -> common_pb2.RowPlan:
        return common_pb2.RowPlan(
            request_id=row.request_id,
            epoch=1,
            context_len=row.context_len + row.under_way,
            query_len=query_len,
            verify_len=verify_len,
            draft_len=draft_len,
            samples=samples,
        )

    async def _run(
        self, num_steps: int, depth: int, plan_rows: Callable[[int], list[Planned]], groups: int
    ) -> Timeline:
        async with asyncio.timeout(RUN_S):
            return await self._run_in_time(num_steps, depth, plan_rows, groups)

    async def _run_in_time(
        self, num_steps: int, depth: int, plan_rows: Callable[[int], list[Planned]], groups: int
    ) -> Timeline:
        timeline = Timeline(time.perf_counter())
        sent: list[list[Planned]] = []
        reports = asyncio.create_task(self._take_reports(num_steps, timeline))
        try:
            while len(timeline.results) < num_steps:
                while len(sent) < num_steps and len(sent) - len(timeline.results) < depth:
                    sent.append(plan_rows(len(sent)))
                    await self._send(sent[-1], depth, groups)
                result = await self._target.event("result")
                timeline.arrivals.append(time.perf_counter())
                timeline.results.append(result)
                self._take(result, sent[len(timeline.results) - 1], timeline)
            await reports
        finally:
            reports.cancel()
        return timeline

    async def _send(self, planned: list[Planned], depth: int, groups: int) -> None:
        self._seq += 1
        plan = common_pb2.StepPlan(
            seq=self._seq,
            rows=[row_plan for _, row_plan in planned],
            deadline_ms=self._deadline_ms,
            ahead=depth - 1,
            drafts_from_seq=self._seq - groups
            if self._drafter is not None and any(row.asked for row, _ in planned)
            else 0,
        )
        if self.channel is not None:
            plan.channel_id, plan.channel_epoch = self.channel.channel_id, self.channel.channel_epoch
        for row, row_plan in planned:
            row.under_way += row_plan.query_len
            row.asked = row_plan.draft_len
        await self._target.send(target_pb2.TargetCommand(plan=plan))
        if self._drafter is not None:
            await self._drafter.send(drafter_pb2.DrafterCommand(plan=plan))

    def _take(self, result: Any, planned: list[Planned], timeline: Timeline) -> None:
        for (row, row_plan), verdict in zip(planned, result.rows, strict=True):
            if verdict.status != target_pb2.ROW_STATUS_OK:
                raise DriverError(f"step {result.seq}: {verdict}")
            row.under_way -= row_plan.query_len
            row.context_len = verdict.context_len
            timeline.tokens.setdefault(row.request_id, []).extend(verdict.token_ids)

    async def _take_reports(self, num_steps: int, timeline: Timeline) -> None:
        if self._drafter is None:
            return
        while len(timeline.reports) < num_steps:
            timeline.reports.append(await self._drafter.event("report"))
