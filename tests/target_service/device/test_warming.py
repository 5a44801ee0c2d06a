"""Warming up changes nothing: whoever is placed afterwards, or was before, gets the same tokens."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from target_service.assembly import warm_up
from target_service.device.plan_buffer import HostPlan, PlanBuffer
from target_service.device.warming import FILTERED_ROWS
from tests.target_service.device.bench import Bench, Planner, outputs_without_drafts
from tests.target_service.device.local_drafter import LocalDrafter
from tests.target_service.device.test_equality import known_of, make_requests


def test_jobs_change_nothing(tiny_dir: Path) -> None:
    requests = make_requests(4, seed=8, draft_len=3)
    expected = outputs_without_drafts(Bench(tiny_dir, "host"), requests)
    bench = Bench(tiny_dir, max_step_tokens=64)
    runner = bench.engine.device_runner
    assert runner is not None
    assert bench.local is not None
    drafter = LocalDrafter(bench.local, known_of(requests, expected))
    planner = Planner(bench, 2)

    def warm() -> int:
        count = 0
        with torch.inference_mode():
            for channel in (None, bench.channel):
                for job in runner.warm_up_jobs((0, 2), (1, 4), channel):
                    job()
                    count += 1
        return count

    sizes = len([1, 3, 8])
    assert warm() == 2 * (2 * sizes + sizes)
    for request in requests:
        planner.place(request)
    while any(not request.done for request in requests):
        active = [request for request in requests if planner.can_plan(request)]
        if active and len(planner.under_way) < 2:
            step = planner.launch(active)
            drafter.answer(step, drafter.look(step))
        else:
            planner.drain()
            warm()
    planner.drain()
    for request in requests:
        assert request.generated == expected[request.request_id]
    seats = {request.request_id: index for index, request in enumerate(requests)}
    assert len(seats) == 4


@pytest.mark.parametrize("graph_rows", [[1, 2], [64]])
def test_few_rows_and_many_have_been_filtered(
    tiny_dir: Path, monkeypatch: pytest.MonkeyPatch, graph_rows: list[int]
) -> None:
    """Whatever row counts are warmed up: what runs first in a step that is served is compiled in it."""
    bench = Bench(tiny_dir, graph_rows=graph_rows)
    runner = bench.engine.device_runner
    assert runner is not None
    kernels = runner._kernels
    counts: set[int] = set()

    def filter_logits(logits: torch.Tensor, *settings: torch.Tensor) -> torch.Tensor:
        counts.add(logits.shape[0])
        return kernels.filter_logits(logits, *settings)

    monkeypatch.setattr(runner._warming, "_kernels", replace(kernels, filter_logits=filter_logits))
    with torch.inference_mode():
        for job in runner.warm_up_jobs((), (1,), None):
            job()
    assert counts == set(FILTERED_ROWS)


@pytest.mark.skipif(find_spec("triton") is None, reason="the package triton is not installed")
def test_the_counts_of_rows_are_on_both_sides() -> None:
    from kernels.triton.sampling import FEW_ROWS

    few, many = FILTERED_ROWS
    assert few <= FEW_ROWS < many


def test_where_there_is_nothing_to_warm(tiny_dir: Path) -> None:
    said: list[str] = []
    warm_up(Bench(tiny_dir, "host").engine, (1,), said.append)
    if not torch.cuda.is_available():
        bench = Bench(tiny_dir)
        warm_up(bench.engine, (1,), said.append)
        assert bench.engine.device_runner is not None
        assert bench.channel is not None
        assert not bench.engine.device_runner.idle([bench.channel])
    assert said == []


def test_warming_shares_no_host_memory_with_steps(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the copy of a job's plan may still wait its turn when the next step's plan is written: it must not find
    that step's rows, which the job would then run.
    """
    bench = Bench(tiny_dir, max_step_tokens=64, channel_depth=2)
    runner = bench.engine.device_runner
    assert runner is not None
    uploaded: list[int] = []
    upload = PlanBuffer.upload

    def seen(buffer: PlanBuffer, plan: HostPlan) -> None:
        uploaded.append(plan.memory.data_ptr())
        upload(buffer, plan)

    monkeypatch.setattr(PlanBuffer, "upload", seen)
    planner = Planner(bench, 2)
    requests = make_requests(2, seed=8, draft_len=0)
    with torch.inference_mode():
        for job in runner.warm_up_jobs((0, 2), (1, 4), bench.channel):
            job()
    of_jobs = set(uploaded)
    uploaded.clear()
    for request in requests:
        planner.place(request)
    for _ in range(4):
        planner.launch([request for request in requests if planner.can_plan(request)])
    assert len(of_jobs) == 1
    assert len(set(uploaded)) == 2
    assert of_jobs.isdisjoint(uploaded)
    planner.drain()
