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
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from types import TracebackType
from typing import Any

import grpc.aio

from protos import common_pb2, drafter_pb2, drafter_pb2_grpc, target_pb2, target_pb2_grpc

START_S = 60.0
RUN_S = 240.0  # the longest run of steps: the first ones may compile kernels
STEP_DEADLINE_MS = 2000
OPTIONS = (("grpc.max_receive_message_length", 1 << 28), ("grpc.max_send_message_length", 1 << 28))


class DriverError(Exception):
    """A service answered otherwise than the benchmark needs; says what."""


@dataclass(frozen=True, slots=True)
class Load:
    """What runs: `prompts`, one request each. draft_len 0: the drafter is told of nothing. max_new_tokens: bound."""

    prompts: Sequence[Sequence[int]]
    draft_len: int
    max_new_tokens: int
    temperature: float = 0.0


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


class _Stream:
    """Commands out, events in, for one service."""

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
        self, target: str, drafter: str | None, name: str = "benchmark", deadline_ms: int = STEP_DEADLINE_MS
    ) -> None:
        """deadline_ms: how long the services wait for each other in a step."""
        self._addresses = (target, drafter)
        self._deadline_ms = deadline_ms
        self._name = name
        self._seq = 0
        self._epoch = 0
        self._rows: list[_Row] = []
        self._load: Load | None = None
        self.channel: Any = None
        self.info: Any = None

    async def __aenter__(self) -> PlanDriver:
        target, drafter = self._addresses
        self._stack = contextlib.AsyncExitStack()
        async with asyncio.timeout(START_S):
            await self._connect(target, drafter)
        return self

    async def _connect(self, target: str, drafter: str | None) -> None:
        channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(target, options=OPTIONS))
        self._target = _Stream(target_pb2_grpc.TargetServiceStub(channel).Serve())
        await self._target.send(target_pb2.TargetCommand(hello=target_pb2.TargetHello(gateway_id=self._name)))
        self.info = await self._target.event("info")
        self._drafter: _Stream | None = None
        if drafter is not None:
            channel = await self._stack.enter_async_context(grpc.aio.insecure_channel(drafter, options=OPTIONS))
            self._drafter = _Stream(drafter_pb2_grpc.DrafterServiceStub(channel).Serve())
            await self._drafter.send(drafter_pb2.DrafterCommand(hello=drafter_pb2.DrafterHello(gateway_id=self._name)))
            await self._drafter.event("info")
            await self._drafter.send(drafter_pb2.DrafterCommand(open=drafter_pb2.OpenChannel(target_address=target)))
            self.channel = await self._drafter.event("opened")
            if not self.channel.ok:
                raise DriverError(f"the drafter opened no channel: {self.channel.detail}")

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()

    async def place(self, load: Load) -> None:
        """Admit the requests of a load on both services and run their prompts; decode rows come next."""
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
                sampling=common_pb2.SamplingParams(temperature=load.temperature, seed=index, num_logprobs=-1),
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
        while any(row.context_len < row.prompt_len for row in self._rows):
            await self._run(1, 1, self._prompt_rows)

    async def decode(self, num_steps: int, depth: int) -> Timeline:
        """Run so many decode steps of all rows, up to `depth` plans under way at once (1: lockstep)."""
        return await self._run(num_steps, depth, self._decode_rows)

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

    def _prompt_rows(self) -> list[tuple[_Row, common_pb2.RowPlan]]:
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

    def _decode_rows(self) -> list[tuple[_Row, common_pb2.RowPlan]]:
        assert self._load is not None
        draft_len = self._load.draft_len if self._drafter is not None else 0
        return [(row, self._row_plan(row, 1 + row.asked, row.asked, draft_len, True)) for row in self._rows]

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

    async def _run(self, num_steps: int, depth: int, plan_rows: Any) -> Timeline:
        async with asyncio.timeout(RUN_S):
            return await self._run_in_time(num_steps, depth, plan_rows)

    async def _run_in_time(self, num_steps: int, depth: int, plan_rows: Any) -> Timeline:
        timeline = Timeline(time.perf_counter())
        sent: list[list[tuple[_Row, common_pb2.RowPlan]]] = []
        reports = asyncio.create_task(self._take_reports(num_steps, timeline))
        try:
            while len(timeline.results) < num_steps:
                while len(sent) < num_steps and len(sent) - len(timeline.results) < depth:
                    sent.append(plan_rows())
                    await self._send(sent[-1], depth)
                result = await self._target.event("result")
                timeline.arrivals.append(time.perf_counter())
                timeline.results.append(result)
                self._take(result, sent[len(timeline.results) - 1], timeline)
            await reports
        finally:
            reports.cancel()
        return timeline

    async def _send(self, planned: list[tuple[_Row, common_pb2.RowPlan]], depth: int) -> None:
        self._seq += 1
        plan = common_pb2.StepPlan(
            seq=self._seq,
            rows=[row_plan for _, row_plan in planned],
            deadline_ms=self._deadline_ms,
            ahead=depth - 1,
            drafts_from_seq=self._seq - 1 if any(row_plan.verify_len for _, row_plan in planned) else 0,
        )
        if self.channel is not None:
            plan.channel_id, plan.channel_epoch = self.channel.channel_id, self.channel.channel_epoch
        for row, row_plan in planned:
            row.under_way += row_plan.query_len
            row.asked = row_plan.draft_len
        await self._target.send(target_pb2.TargetCommand(plan=plan))
        if self._drafter is not None:
            await self._drafter.send(drafter_pb2.DrafterCommand(plan=plan))

    def _take(self, result: Any, planned: list[tuple[_Row, common_pb2.RowPlan]], timeline: Timeline) -> None:
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
