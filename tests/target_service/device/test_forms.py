"""Steps whose kernels are launched again from what their first launch bound: the same tokens, and the forms' end."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.channel.host import host_id
from engine.graphs import GraphCache
from kernels.kernel_set import KernelSet, kernels_for
from target_service import execution
from target_service.channels import AttachRequest, ChannelSettings, TargetChannels
from target_service.device.forward import StepOutput
from tests.kernels.replayed import Counts, replayed
from tests.target_service.device.bench import Bench, Planner, Request, outputs_without_drafts
from tests.target_service.device.local_drafter import LocalDrafter
from tests.target_service.device.test_equality import known_of, make_requests
from tests.target_service.pcp.ranks import CpuGraphs, ResultT


def with_forms(monkeypatch: pytest.MonkeyPatch) -> Counts:
    """From here on, of all targets made."""
    found = Counts()

    def make(device: torch.device | str) -> KernelSet:
        return replayed(kernels_for(device), found)

    monkeypatch.setattr(execution, "kernels_for", make)
    return found


@pytest.fixture(scope="module")
def host(tiny_dir: Path) -> Bench:
    return Bench(tiny_dir, "host", num_blocks=128)


def long_requests(seed: int) -> list[Request]:
    """Some are done early, so that steps get smaller."""
    requests = make_requests(7, seed=seed)
    for index, request in enumerate(requests):
        request.max_tokens = 20 + 3 * index
        request.draft_len = index % 4
    return requests


@pytest.mark.parametrize("depth", [1, 3])
@pytest.mark.parametrize("hidden_layers", [(), (0, 2)], ids=["tokens alone", "hidden states"])
def test_the_same_tokens_by_the_same_drafts(
    tiny_dir: Path, host: Bench, monkeypatch: pytest.MonkeyPatch, depth: int, hidden_layers: tuple[int, ...]
) -> None:
    """The entries of the ring come round, with and without drafts to take. Drafts alone change no token, only what is
    accepted.
    """
    expected = outputs_without_drafts(host, long_requests(71))

    def script(row: int, position: int, drafts: list[int]) -> list[int]:
        return [(draft + 1) % 512 if (position + index) % 3 == 0 else draft for index, draft in enumerate(drafts)]

    def run() -> list[tuple[list[int], int]]:
        requests = long_requests(71)
        bench = Bench(tiny_dir, num_blocks=256, hidden_layers=hidden_layers, draft_probs=not hidden_layers)
        assert bench.local is not None
        drafter = LocalDrafter(bench.local, known_of(requests, expected), script)
        planner = Planner(bench, depth, chunk=11, overplan=depth > 1)
        for request in requests:
            planner.place(request)
        planner.run(requests, drafter)
        return [(request.generated, request.num_accepted) for request in requests]

    without = run()
    counts = with_forms(monkeypatch)
    assert run() == without
    assert [generated for generated, _ in without] == list(expected.values())
    assert sum(num_accepted for _, num_accepted in without) > 10
    assert counts.launched["take_drafts"] > 10
    if not hidden_layers:  # without graphs, hidden states lie somewhere else each time
        assert counts.launched["write_ring_entry"] > 5


def test_the_same_tokens_for_nobody(tiny_dir: Path, host: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a channel; then on one that closes in between."""
    requests = long_requests(72)
    expected = outputs_without_drafts(host, requests)
    counts = with_forms(monkeypatch)
    bench = Bench(tiny_dir, num_blocks=256)
    assert bench.local is not None
    for closes in (False, True):
        planner = Planner(bench, 2, chunk=11)
        planner.with_channel = closes
        bench.stream.last_seq = 0
        for request in requests:
            request.generated, request.epoch, request.draft_len = [], 1 + closes, 0
            planner.place(request)
        for _ in range(8):
            planner.launch([request for request in requests if planner.can_plan(request)])
            planner.take()
        if closes:
            bench.local.target.close()
        planner.run(requests)
        for request in requests:
            assert request.generated == expected[request.request_id], request
            bench.release(request.request_id, request.epoch)
    assert counts.launched["take_drafts"] > 30


def test_forms_end_with_their_channel() -> None:
    settings = ChannelSettings(
        *("i", ("shm",), 2, 2, 2.0, 5.0, 2, 8, 3, 8, torch.float32, 9, 64, 4, 16, 8), device=torch.device("cpu")
    )
    channels = TargetChannels(settings)
    try:
        request = AttachRequest("drafter", "j", host_id(), ("shm",), (0,), 2, False, "build", 16, 8, 9)
        spec = channels.attach(request).channel
        (channel,) = channels.in_use()
        channel.forms.keep("entry", lambda: None)
        channels.detach(spec.channel_id, spec.epoch)
        assert len(channel.forms) == 1  # only the device thread may take them away
        channels.close_retired()
        assert len(channel.forms) == 0
    finally:
        channels.close()


def published(bench: Bench) -> list[tuple[Any, ...]]:
    """The keys of the forms of ring entries."""
    assert bench.channel is not None
    return [key for key in bench.channel.forms._forms if isinstance(key, tuple) and key[0] == "publish"]


def test_no_form_holds_hidden_states_that_do_not_come_again(tiny_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of a graph do; those of a plain run, such as a graph's first, do not."""
    counts = with_forms(monkeypatch)
    bench = Bench(tiny_dir, num_blocks=256)
    assert bench.engine.device_runner is not None
    forward = bench.engine.device_runner.forward
    monkeypatch.setattr(forward, "graphs", GraphCache("cpu", 1))  # which captures nothing, on a GPU either
    planner = Planner(bench, 1)
    request = Request("r", list(range(30, 40)), 40)
    planner.place(request)
    for _ in range(6):
        planner.launch([request])
        planner.take()
    assert not published(bench)
    kept = StepGraphs()
    monkeypatch.setattr(forward, "graphs", kept)
    planner.launch([request])
    planner.take()
    assert kept.counts.eager_runs == 1
    assert not published(bench)
    for _ in range(2 * bench.local.target.spec.depth if bench.local is not None else 0):
        planner.launch([request])
        planner.take()
    assert len(published(bench)) == kept.depth(bench)
    assert counts.launched["write_ring_entry"] >= kept.depth(bench)
    kept.counts.evictions += 1  # the graph may be gone
    planner.launch([request])
    planner.take()
    assert len(published(bench)) == 1


class StepGraphs(CpuGraphs):
    """Whose results lie where those of the first run did, as a graph's do."""

    def __init__(self) -> None:
        super().__init__()
        self._results: dict[Hashable, Any] = {}

    def run(self, key: Hashable, function: Callable[[], ResultT]) -> ResultT:
        result = super().run(key, function)
        first = self._results.setdefault(key, result)
        if isinstance(first, StepOutput) and first.captured is not None:
            assert isinstance(result, StepOutput)
            assert result.captured is not None
            first.captured.copy_(result.captured)
            return replace(result, captured=first.captured)
        return result

    @staticmethod
    def depth(bench: Bench) -> int:
        assert bench.local is not None
        return bench.local.target.spec.depth
