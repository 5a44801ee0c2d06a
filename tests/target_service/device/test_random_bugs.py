"""Bugs at random, before or behind what they hit: each takes its own requests, and no token of anybody is wrong."""

from __future__ import annotations

import random
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.errors import IntegrityError
from target_service.flights import Flight
from target_service.messages import (
    AdmissionReply,
    AdmissionStatus,
    Event,
    FaultReply,
    RowRequest,
    RowStatus,
    StepReply,
    StepRequest,
)
from tests.target_service.device.bench import CHANNEL_ID, Bench, Request, outputs_without_drafts
from tests.target_service.device.local_drafter import EPOCH, LocalDrafter
from tests.target_service.device.test_equality import known_of, make_requests

PLACES = (
    "engine.request_blocks.RequestBlocks.register_written",
    "target_service.device.frame.StepFrame.commit",
    "target_service.device.local_forward.LocalStepForward._run",
    "target_service.device.plan_buffer.PlanBuffer.upload",
    "target_service.device.runner.DeviceRunner._complete_row",
    "target_service.device.sampling.DeviceSampling.count_output",
    "target_service.device.sampling.DeviceSampling.place",
    "target_service.device.sampling.DeviceSampling.verdict",
)
CHANCE = 0.02


def break_at_random(monkeypatch: pytest.MonkeyPatch, chance: random.Random) -> None:
    """Each of PLACES fails now and then, without having done anything or having done it all."""

    def broken(original: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if chance.random() >= CHANCE:
                return original(*arguments, **named)
            if chance.random() < 0.5:
                original(*arguments, **named)
            raise chance.choice([RuntimeError, ValueError, IntegrityError])("no such luck")

        return call

    for place in PLACES:
        module, owner, name = place.rsplit(".", 2)
        original = vars(getattr(__import__(module, fromlist=[owner]), owner))[name]
        monkeypatch.setattr(place, broken(original))


class Gateway:
    """Plans ahead, as `bench.Planner`, and has whoever met a bug placed anew in the next epoch."""

    def __init__(self, bench: Bench, drafter: LocalDrafter, requests: list[Request], chance: random.Random) -> None:
        self.bench = bench
        self.drafter = drafter
        self.chance = chance
        self.depth = chance.choice([2, 3, 4])
        self.chunk = chance.choice([5, 64])
        self.waiting = deque(requests)
        self.placed: list[Request] = []
        self.under_way: deque[tuple[StepRequest, list[tuple[Request, int]], Event | Flight]] = deque()
        self.seq = 0
        self.faults = 0

    def run(self) -> None:
        """Until every request has its tokens."""
        for _ in range(4000):
            self._place_and_release()
            active = [request for request in self.placed if self._can_plan(request)]
            if active and len(self.under_way) < self.depth and self.chance.random() < 0.8:
                self._launch(active)
            elif self.under_way:
                self._take()
            elif not self.waiting and not self.placed:
                return
        raise AssertionError("not done")

    def _can_plan(self, request: Request) -> bool:
        return not request.stalled and request.max_tokens - len(request.generated) - request.samples_ahead > 0

    def _again(self, request: Request) -> None:
        assert self.bench.engine.sessions.find(request.request_id, request.epoch, 1) is None
        self.placed.remove(request)
        request.epoch += 1
        self.waiting.append(request)

    def _place_and_release(self) -> None:
        for request in [request for request in self.placed if request.done]:
            self.bench.release(request.request_id, request.epoch)
            self.placed.remove(request)
        if not self.waiting or len(self.placed) >= 3:
            return
        request = self.waiting.popleft()
        reply = self.bench.send(request.admission())
        self.placed.append(request)
        if isinstance(reply, FaultReply):
            self.faults += 1
            self._again(request)
            return
        assert isinstance(reply, AdmissionReply)
        assert reply.status is AdmissionStatus.OK
        request.context_len, request.placed_len = reply.cached_len, len(request.tokens)
        request.ahead = request.rows_ahead = request.samples_ahead = request.pending = request.drafts_seq = 0
        request.stalled = False

    def _row(self, request: Request) -> RowRequest:
        stands, epoch = request.planned_len, request.epoch
        if stands < request.placed_len:
            query_len = min(request.placed_len - stands, self.chunk)
            samples = stands + query_len == request.placed_len
            draft_len = request.draft_len if samples else 0
            return RowRequest(request.request_id, epoch, stands, query_len, 0, draft_len, samples)
        verify_len = request.pending if request.drafts_seq == self.seq else 0
        return RowRequest(request.request_id, epoch, stands, 1 + verify_len, verify_len, request.draft_len, True)

    def _launch(self, active: list[Request]) -> None:
        rows = tuple(self._row(request) for request in active)
        from_seq = self.seq if any(row.verify_len for row in rows) else 0
        self.seq += 1
        exact = not any(request.rows_ahead for request in active) and self.chance.random() < 0.2
        step = StepRequest(self.seq, CHANNEL_ID, EPOCH, rows, from_seq, 1000, 0 if exact else self.depth - 1)
        outcome = self.bench.send(step)
        if isinstance(outcome, FaultReply):
            assert outcome.detail.endswith("no such luck")
            self.faults += 1
            for request in active:
                self._again(request)
            return
        self.drafter.answer(step, self.drafter.look(step))
        for request, row in zip(active, rows, strict=True):
            request.ahead += row.query_len
            request.rows_ahead += 1
            request.samples_ahead += row.samples
            request.pending, request.drafts_seq = row.draft_len, self.seq
        self.under_way.append((step, [(request, request.epoch) for request in active], outcome))

    def _take(self) -> None:
        step, requests, outcome = self.under_way.popleft()
        assert isinstance(outcome, Flight)
        with torch.inference_mode():
            self.bench.core.land(outcome)
        if isinstance(outcome.reply, FaultReply):
            self.faults += 1
            for request, epoch in requests:
                if request.epoch == epoch and request in self.placed:
                    self._again(request)
            return
        assert isinstance(outcome.reply, StepReply)
        for (request, epoch), verdict, row in zip(requests, outcome.reply.rows, step.rows, strict=True):
            if request.epoch != epoch or request not in self.placed:
                continue
            request.ahead -= row.query_len
            request.rows_ahead -= 1
            request.samples_ahead -= row.samples
            if verdict.status is RowStatus.OK:
                request.context_len = verdict.context_len
                request.generated += verdict.token_ids
                continue
            request.stalled = True
            if request.rows_ahead == 0:
                self._settle(request, verdict.status)

    def _settle(self, request: Request, status: RowStatus) -> None:
        """A row did not run, and nothing of the request is under way any more."""
        if self.bench.engine.sessions.find(request.request_id, request.epoch, 1) is None:
            self._again(request)
            return
        request.stalled = False
        if status is RowStatus.STARVED and len(self.placed) > 1:
            youngest = self.placed[-1]
            self.bench.release(youngest.request_id, youngest.epoch)
            self._again(youngest)


@pytest.mark.parametrize("seed", range(6))
def test_random_bugs(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, seed: int) -> None:
    chance = random.Random(seed)
    requests = make_requests(8, seed=seed + 5000)
    expected = outputs_without_drafts(Bench(tiny_dir, "host", num_blocks=128), requests)
    bench = Bench(tiny_dir, num_blocks=10, num_seats=5, channel_depth=chance.choice([2, 4]))
    assert bench.local is not None
    gateway = Gateway(bench, LocalDrafter(bench.local, known_of(requests, expected)), requests, chance)
    with monkeypatch.context() as patched:
        break_at_random(patched, chance)
        gateway.run()
    assert gateway.faults
    for request in requests:
        assert request.generated == expected[request.request_id], request
    bench.assert_free()
