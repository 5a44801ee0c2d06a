"""Does a draft model draft the same when nothing is known on the host?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_service.device.program import DeviceOptions
from drafter_service.draft_model import DraftModelSpeculator
from drafter_service.residency import Warmth
from engine.decoder import Decoder
from tests.drafter_service.device.conftest import REFERENCE
from tests.drafter_service.device.harness import ALL_SIZES, DeviceHarness
from tests.drafter_service.device.test_eagle3_device import EXACT_SIZES, drafts_of
from tests.drafter_service.harness import Harness, prompt_of
from tests.tiny_models import make_tiny_model

MakeDevice = Callable[..., DeviceHarness]
MakeHost = Callable[..., Harness]
MakeModel = Callable[..., DraftModelSpeculator]


@pytest.fixture(scope="session")
def other(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    """A model that agrees with the target now and then: the target's weights, two layers of its three."""
    directory = make_tiny_model(tmp_path_factory.mktemp("other") / "model", "mistral", seed=4, sliding_window=6)
    return Decoder.load(directory, torch.float32)


@pytest.fixture(params=["own", "other"])
def make_model(request: pytest.FixtureRequest, decoder: Decoder, other: Decoder) -> MakeModel:
    """`make_model(**settings)`: the target's own model, or another one, with a sliding window."""
    model = decoder if request.param == "own" else other

    def make(**overrides: Any) -> DraftModelSpeculator:
        return DraftModelSpeculator(model, replace(REFERENCE, **overrides))

    return make


@pytest.mark.parametrize("options", [ALL_SIZES, EXACT_SIZES, DeviceOptions((2, 16), fused=False, shadow=True)])
def test_device_drafts_as_the_host(
    make_model: MakeModel, make_device: MakeDevice, make_host: MakeHost, options: DeviceOptions
) -> None:
    host, device = make_host(make_model(attention="torch")), make_device(make_model(), options)
    assert drafts_of(device, 14) == drafts_of(host, 14)
    assert [report.num_drafted for report in device.reports] == [report.num_drafted for report in host.reports]
    assert {report.metadata_builds for report in device.reports} == {1}
    device.speculator.check_integrity()


def test_lagging_truth_changes_no_draft(make_model: MakeModel, make_device: MakeDevice, make_host: MakeHost) -> None:
    host, device = make_host(make_model(attention="torch")), make_device(make_model())
    for harness in (host, device):
        for index in range(3):
            harness.add(f"r{index}", prompt_of(4 + 6 * index, index))
    for step in range(14):
        host.step(3, chunk=8)
        device.launch(3, chunk=8, surplus=4 * min(step, 3))
        if step >= 3:
            device.settle(1)
        assert [r.drafts for r in device.target.requests.values()] == [r.drafts for r in host.target.requests.values()]
    device.settle()
    for name, request in device.target.requests.items():
        assert device.resident(name).tokens == request.tokens
    device.speculator.check_integrity()


def test_a_late_request_is_caught_up_at_once(
    make_model: MakeModel, make_device: MakeDevice, make_host: MakeHost
) -> None:
    """By more tokens than a step may have, in pieces."""
    host, device = make_host(make_model(attention="torch")), make_device(make_model(max_tokens=16))
    for harness in (host, device):
        harness.add("first", prompt_of(6, 2))
        harness.target.add("late", prompt_of(40, 6))
        for _ in range(5):
            harness.step(2, chunk=9)
        harness.admit(harness.target.requests["late"], mid_stream=True)
        for _ in range(4):
            harness.step(3)
    for name, request in device.target.requests.items():
        assert request.drafts == host.target.requests[name].drafts
        assert len(request.drafts) == 3
    device.speculator.check_integrity()


def test_a_hole_is_cold_until_admitted_anew(make_model: MakeModel, make_device: MakeDevice) -> None:
    harness = make_device(make_model())
    request = harness.add("r", prompt_of(9, 8))
    harness.run(2, 3)
    assert harness.step(3, publish=False).missed
    assert harness.step(3).cold_request_ids == ("r",)
    harness.admit(request, mid_stream=True)
    report = harness.step(3)
    assert report.cold_request_ids == ()
    assert len(request.drafts) == 3
    harness.speculator.check_integrity()


@pytest.mark.parametrize(("blocks", "max_len"), [(512, 24), (6, 256)])
def test_limits(make_model: MakeModel, make_device: MakeDevice, blocks: int, max_len: int) -> None:
    """A request that outgrows the draft model touches no neighbour, and nothing is written outside its blocks."""
    speculator = make_model(num_blocks=blocks, max_len=max_len)
    harness, alone = make_device(speculator), make_device(make_model())
    twin = alone.add("short", prompt_of(3, 2), max_total_len=14)
    long, short = harness.add("long", prompt_of(12, 1)), harness.add("short", prompt_of(3, 2), max_total_len=14)
    for _ in range(12):
        harness.step(5, only=[request for request in (long, short) if request.context_len < 40])
        alone.step(5)
        if blocks == 512 and short.context_len < 14:  # with six, there is less room for drafts than alone
            assert short.drafts == twin.drafts
        assert len(long.drafts) <= max(max_len - long.context_len, 0)
    assert harness.resident("long").warmth is not Warmth.WARM
    assert not bool(speculator.kv.k(0)[0].any())
    speculator.check_integrity()


def test_tokens_that_the_model_does_not_have(make_device: MakeDevice, tmp_path: Path) -> None:
    small = Decoder.load(make_tiny_model(tmp_path / "small", vocab_size=300), torch.float32)
    harness = make_device(DraftModelSpeculator(small, REFERENCE))
    request = harness.add("r", [400, 450, 8, 9])
    harness.run(4, 3)
    assert all(token < 300 for token in request.drafts)
    assert len(request.drafts) == 3
    harness.speculator.check_integrity()


def test_drawn_drafts_and_their_probabilities_are_the_host_s(
    make_model: MakeModel, make_device: MakeDevice, make_host: MakeHost
) -> None:
    drawing = {"draft_sampling": "probabilistic"}
    host = make_host(make_model(attention="torch", **drawing), draft_probs=True)
    device = make_device(make_model(**drawing), draft_probs=True)
    for harness in (host, device):
        harness.add("warm", prompt_of(5, 1), temperature=0.9)
        harness.add("greedy", prompt_of(7, 2))
    for _ in range(4):
        replies = []
        for harness in (host, device):
            harness.step(3)
            reply = harness.target.channel.take_reply(harness.target.seq, 1.0)
            assert reply is not None
            assert reply.probs is not None
            assert reply.has_probs is not None
            replies.append((reply.tokens.tolist(), reply.has_probs.tolist(), reply.probs[0, :3].clone()))
        assert replies[0][:2] == replies[1][:2]
        assert replies[0][1] == [True, False]
        torch.testing.assert_close(replies[1][2], replies[0][2], atol=1e-5, rtol=1e-4)
