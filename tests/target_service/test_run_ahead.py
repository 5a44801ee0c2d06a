"""Plans that were sent before the verdicts of those before them: bounds, limits, drafts, releases.

The lengths in such plans are upper bounds; what counts is what the target knows when the step runs.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from transformers import PreTrainedModel

from engine.decoder import Decoder
from protos import common_pb2, target_pb2
from target_service.device_thread import DeviceThread
from target_service.messages import Command, ReleaseRequest
from target_service.streams import GatewayStream
from tests.target_service.conftest import LocalTarget
from tests.target_service.gateway_client import Driver, Gateway, Running
from tests.target_service.scripted_drafter import ScriptedDrafter
from tests.target_service.test_greedy import all_free, prompt_of
from tests.target_service.test_resilience import eventually_free
from tests.tiny_models import greedy_reference

OK, STARVED, UNKNOWN, SKIPPED = (
    target_pb2.ROW_STATUS_OK,
    target_pb2.ROW_STATUS_STARVED,
    target_pb2.ROW_STATUS_UNKNOWN,
    target_pb2.ROW_STATUS_SKIPPED,
)


class Ahead:
    """Runs one admitted request with up to `depth` plans under way, every row planned from upper bounds."""

    def __init__(self, driver: Driver, running: Running, depth: int) -> None:
        self.driver = driver
        self.running = running
        self.depth = depth
        self.num_admitted = len(running.tokens)
        self.max_total_len = len(running.prompt) + running.max_tokens
        self.flights: deque[common_pb2.RowPlan] = deque()
        self.statuses: list[int] = []

    def send(self) -> common_pb2.RowPlan:
        """The next plan."""
        driver, running = self.driver, self.running
        bound = running.context_len + sum(row.query_len for row in self.flights)
        left = self.num_admitted - bound
        query_len, verify_len = min(left, driver.chunk), 0
        if left <= 0:
            verify_len = running.draft_len if driver.drafter is not None else 0
            query_len = 1 + verify_len
        row = common_pb2.RowPlan(
            request_id=running.request_id,
            epoch=running.epoch,
            context_len=min(bound, self.max_total_len - 1),
            query_len=query_len,
            verify_len=verify_len,
            draft_len=running.draft_len,
            samples=left <= query_len or left <= 0,
        )
        driver.seq += 1
        plan = common_pb2.StepPlan(
            seq=driver.seq, rows=[row], deadline_ms=driver.deadline_ms, ahead=max(1, self.depth - 1)
        )
        if driver.drafter is not None:
            plan.channel_id, plan.channel_epoch = driver.drafter.channel_id, driver.drafter.channel_epoch
            plan.drafts_from_seq = driver.seq - 1
            driver.drafter.expect(driver.seq, [(running.full, running.draft_len)])
        driver.gateway.send(plan=plan)
        self.flights.append(row)
        return row

    def take(self) -> target_pb2.RowResult:
        """The oldest plan's verdict, applied."""
        result = self.driver.gateway.event("result")
        row, planned = result.rows[0], self.flights.popleft()
        self.statuses.append(row.status)
        if row.status == OK:
            assert row.context_len <= planned.context_len + planned.query_len
            self.running.context_len = row.context_len
            self.running.generated += row.token_ids
            self.running.from_draft += row.num_accepted
        return row

    def run(self) -> None:
        """To the end, with more rows planned than there are tokens left."""
        while not self.running.done:
            while len(self.flights) < self.depth:
                self.send()
            self.take()
        while self.flights:
            self.take()


@pytest.mark.parametrize("depth", [2, 4])
@pytest.mark.parametrize("kind", ["shm", "bytes"])
@pytest.mark.parametrize("wrong_at", [None, 2])
def test_same_tokens_for_every_draft_len(
    target_address: str, reference: PreTrainedModel, kind: str, depth: int, wrong_at: int | None
) -> None:
    def script(row: int, position: int, drafts: list[int]) -> list[int]:
        return [(draft + 1) % 512 if index == wrong_at else draft for index, draft in enumerate(drafts)]

    prompt = prompt_of(21, seed=depth)
    expected = greedy_reference(reference, prompt, 30)
    with Gateway(target_address) as gateway, ScriptedDrafter(target_address, kind, script) as drafter:
        driver = Driver(gateway, drafter, chunk=8)
        for draft_len in range(8):
            running = driver.request(prompt, 17, full=prompt + expected, draft_len=draft_len)
            driver.admit(running)
            ahead = Ahead(driver, running, depth)
            ahead.run()
            assert running.generated == expected[:17]
            assert ahead.statuses[-1] == SKIPPED, "the last rows had nothing left to run"
            assert set(ahead.statuses) == {OK, SKIPPED}
            if draft_len:
                assert running.from_draft > 0
            gateway.release(running.request_id)
        limit = len(prompt) + 17
        assert max(int(entry["positions"].max()) for entry in drafter.entries if entry["num_tokens"]) < limit
        assert all_free(gateway)


@pytest.mark.parametrize("num_drafts", [0, 1, 3, 5])
@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "seed": 7, "seeded": True}])
def test_preempted_with_drafts_in_flight_and_resumed(
    target_address: str, reference: PreTrainedModel, num_drafts: int, sampling: dict[str, Any]
) -> None:
    prompt = prompt_of(19, seed=3)
    with Gateway(target_address) as gateway, ScriptedDrafter(target_address) as drafter:
        undisturbed = Driver(gateway).request(prompt, 20, sampling=sampling)
        Driver(gateway).run([undisturbed])
        full = prompt + undisturbed.generated
        driver = Driver(gateway, drafter)
        driver.seq = undisturbed_steps = len(undisturbed.generated)
        running = driver.request(prompt, 20, full=full, draft_len=num_drafts, sampling=sampling)
        driver.admit(running)
        ahead = Ahead(driver, running, 3)
        for _ in range(3):
            ahead.send()
        ahead.take()
        known = list(running.generated)
        gateway.send(release=common_pb2.Release(request_id=running.request_id, epoch=1))
        running.epoch = 2
        gateway.send(admit=driver.admission(running))
        for _ in range(2):  # late verdicts
            late = gateway.event("result").rows[0]
            assert (late.epoch, late.status in (OK, UNKNOWN)) == (1, True)
        gateway.event("released")
        assert gateway.event("admitted").cached_len <= 19
        assert running.generated == known
        running.context_len = 0
        resumed = Ahead(driver, running, 3)
        resumed.run()
        assert running.generated == undisturbed.generated
        assert undisturbed_steps == 20
        gateway.release(running.request_id, 2)
        assert all_free(gateway)
    if not sampling:
        assert undisturbed.generated == greedy_reference(reference, prompt, 20)


def test_rows_after_a_chunk_that_starved_are_skipped(
    local_target: Callable[..., LocalTarget], reference: PreTrainedModel
) -> None:
    address, target = local_target(num_blocks=5, prefix_caching=False)
    with Gateway(address) as gateway:
        driver = Driver(gateway, chunk=16)
        holder, running = driver.request(prompt_of(50), 2), driver.request(prompt_of(40), 6)
        driver.admit(holder)
        driver.chunk = 64
        driver.step([holder])  # four of five blocks
        driver.chunk = 16
        driver.admit(running)
        ahead = Ahead(driver, running, 4)
        for _ in range(4):
            ahead.send()
        results = [ahead.take() for _ in range(4)]
        # 16 tokens fit, the next 16 do not; what follows on them cannot run, its own blocks or not.
        assert [row.status for row in results] == [OK, STARVED, SKIPPED, SKIPPED]
        assert [row.context_len for row in results] == [16, 16, 16, 16]
        gateway.release(holder.request_id)
        ahead.run()
        assert running.generated == greedy_reference(reference, running.prompt, 6)
        gateway.release(running.request_id)
        assert all_free(gateway)
    eventually_free(target)


@pytest.mark.parametrize(
    ("fields", "detail"),
    [
        ({"context_len": 3}, "rows[0].context_len: 3, but 4 tokens are committed"),  # no bound: it is below
        ({"context_len": 20}, "rows[0].context_len: 20, but 4 tokens are committed"),  # past all that it may become
        ({"context_len": 9, "query_len": 2}, "rows[0].query_len: "),
        ({"context_len": 9, "samples": False}, "rows[0].samples: "),
    ],
)
def test_what_is_no_bound_is_refused(target_address: str, fields: dict[str, Any], detail: str) -> None:
    with Gateway(target_address) as gateway:
        driver = Driver(gateway)
        running = driver.request([5, 6, 7], 17)
        driver.admit(running)
        driver.step([running])
        driver.step([running])
        row = {"request_id": running.request_id, "epoch": 1, "query_len": 1, "samples": True, **fields}
        fault = gateway.fault(plan=common_pb2.StepPlan(seq=3, rows=[common_pb2.RowPlan(**row)], ahead=1))
        assert fault.detail.startswith(detail), fault
        row = {"request_id": running.request_id, "epoch": 1, "query_len": 1, "samples": True, "context_len": 9}
        fault = gateway.fault(plan=common_pb2.StepPlan(seq=4, rows=[common_pb2.RowPlan(**row)]))
        assert fault.detail.startswith("rows[0].context_len: "), "lockstep plans are exact"
        result = gateway.plan(common_pb2.StepPlan(seq=5, rows=[common_pb2.RowPlan(**row)], ahead=1))
        assert result.rows[0].context_len == 5
        gateway.release(running.request_id)


def test_what_is_released_is_not_run_by_plans_that_wait_before_the_release(
    local_target: Callable[..., LocalTarget], monkeypatch: pytest.MonkeyPatch
) -> None:
    address, target = local_target()
    forward, entered, go_on = Decoder.forward, threading.Event(), threading.Event()
    submit, release_waits = DeviceThread.submit, threading.Event()

    def seen(self: DeviceThread, stream: GatewayStream, command: Command) -> bool:
        done = submit(self, stream, command)
        if isinstance(command, ReleaseRequest):
            release_waits.set()
        return done

    def held(self: Decoder, *arguments: Any, **named: Any) -> Any:
        entered.set()
        assert go_on.wait(20)
        return forward(self, *arguments, **named)

    with Gateway(address) as gateway:
        driver = Driver(gateway)
        first, second = driver.request(prompt_of(9), 10), driver.request(prompt_of(8), 10)
        for running in (first, second):
            driver.admit(running)
        driver.step([first, second])
        monkeypatch.setattr(Decoder, "forward", held)
        monkeypatch.setattr(DeviceThread, "submit", seen)

        def plan(seq: int, requests: Sequence[Running]) -> None:
            rows = [driver.row(running) for running in requests]
            for row in rows:
                row.context_len += seq - 2
            gateway.send(plan=common_pb2.StepPlan(seq=seq, rows=rows, ahead=2))

        plan(2, [first, second])
        assert entered.wait(20)
        plan(3, [first, second])
        plan(4, [first])
        gateway.send(release=common_pb2.Release(request_id=first.request_id, epoch=1))
        assert release_waits.wait(20)
        go_on.set()
        statuses = [[row.status for row in gateway.event("result").rows] for _ in range(3)]
        assert statuses == [[OK, OK], [UNKNOWN, OK], [UNKNOWN]]
        assert gateway.event("released").capacity.free_seats == target.info.num_seats - 1
        # The same placement may come again under its name: what was withdrawn was the one before.
        first.generated.clear()
        driver.admit(first)
        first.in_prompt = True
        driver.seq = 4
        assert driver.step([first]).rows[0].status == OK
    eventually_free(target)


@pytest.mark.parametrize("kind", ["shm", "bytes"])
def test_a_silent_drafter_costs_one_deadline_for_all_plans_under_way(
    target_address: str, reference: PreTrainedModel, kind: str
) -> None:
    with Gateway(target_address) as gateway, ScriptedDrafter(target_address, kind, silent=True) as drafter:
        driver = Driver(gateway, drafter)
        driver.deadline_ms = 300
        running = driver.request(prompt_of(10), 9, draft_len=3)
        driver.admit(running)
        ahead = Ahead(driver, running, 4)
        for _ in range(8):
            ahead.send()
        results = [driver.gateway.event("result") for _ in range(8)]
        assert [result.drafts_missed for result in results] == [False] + [True] * 7
        waited = [result.wait_ms > 250 for result in results]
        # Steps 3 to 5 were sent before the gateway can have heard of the miss in step 2; the sixth is a new attempt.
        assert waited == [False, True, False, False, False, True, False, False]
        assert running.prompt + [t for r in results for t in r.rows[0].token_ids] == [
            *running.prompt,
            *greedy_reference(reference, running.prompt, 8),
        ]
        gateway.release(running.request_id)
