"""Does a draft model follow the committed tokens, whatever happens around it?"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from drafter_service.draft_model import DraftModelSpeculator
from drafter_service.residency import Warmth
from engine.decoder import Decoder
from engine.errors import CapacityError, ConfigError
from tests.drafter_service.conftest import SETTINGS
from tests.drafter_service.fake_target import FakeRequest
from tests.drafter_service.harness import Harness, prompt_of
from tests.tiny_models import greedy_reference, load_reference, make_tiny_model

MakeHarness = Callable[..., Harness]


def accepted_of(request: FakeRequest) -> float:
    return request.num_accepted / max(request.num_drafted, 1)


def test_the_target_s_own_model_is_always_right(
    make_harness: MakeHarness, draft_model: DraftModelSpeculator, tiny_directory: Path
) -> None:
    harness = make_harness(draft_model)
    prompt = prompt_of(13, 1)
    request = harness.add("r", prompt)
    for step in range(12):
        report = harness.step((5, 0, 3, 1)[step % 4], chunk=6)
        assert report is not None
        assert report.metadata_builds <= 1
    assert request.num_drafted > 10
    assert accepted_of(request) == 1.0
    reference = greedy_reference(load_reference(tiny_directory), prompt, len(request.output))
    assert request.output == reference


def test_another_model_s_drafts_are_its_own_greedy_continuation(make_harness: MakeHarness, tmp_path: Path) -> None:
    """Mistral with a sliding window: two models of different families, and a second kind of KV group."""
    directory = make_tiny_model(tmp_path / "draft", "mistral", seed=5, num_hidden_layers=2, sliding_window=8)
    speculator = DraftModelSpeculator(Decoder.load(directory, torch.float32), SETTINGS)
    reference = load_reference(directory)
    harness = make_harness(speculator)
    request = harness.add("r", prompt_of(12, 2))
    for _ in range(6):
        harness.step(4)
        assert request.drafts == greedy_reference(reference, request.tokens, 4)
    assert accepted_of(request) < 1.0


def test_accepted_drafts_are_not_run_again(make_harness: MakeHarness, draft_model: DraftModelSpeculator) -> None:
    harness = make_harness(draft_model)
    harness.add("r", prompt_of(9, 3))
    harness.run(3, 4)
    resident = harness.resident("r")
    computed = draft_model.computed_len(resident)
    ran: list[int] = []
    forward = draft_model.decoder.forward

    def counting(inputs: torch.Tensor, *args: object, **kwargs: object) -> object:
        ran.append(inputs.shape[0])
        return forward(inputs, *args, **kwargs)  # type: ignore[arg-type]

    draft_model.decoder.forward = counting  # type: ignore[method-assign,assignment]
    try:
        harness.step(4)
    finally:
        del draft_model.decoder.forward
    # The target ran its anchor and four drafts, all accepted. Three of those have draft KV already, so the fourth and
    # the new anchor run, then three draft steps.
    assert ran == [5, 2, 1, 1, 1]
    assert draft_model.computed_len(resident) == computed + 5


def test_mid_stream_catches_up_within_its_budget(make_harness: MakeHarness, decoder: Decoder) -> None:
    speculator = DraftModelSpeculator(decoder, replace(SETTINGS, max_tokens=16))
    harness = make_harness(speculator)
    near = harness.add("near", prompt_of(5, 3))
    far = harness.target.add("far", prompt_of(40, 4))
    harness.run(2, 3)
    harness.admit(far, mid_stream=True)
    drafted_after = None
    for step in range(6):
        harness.step(3)
        assert len(near.drafts) == 3  # the one that catches up does not hold up the other
        if far.drafts and drafted_after is None:
            drafted_after = step
    assert drafted_after == 3  # 41 tokens and a few more, at most 16 less the other row's a step
    assert accepted_of(near) == accepted_of(far) == 1.0


def test_a_hole_is_cold_until_admitted_anew(make_harness: MakeHarness, draft_model: DraftModelSpeculator) -> None:
    harness = make_harness(draft_model)
    request = harness.add("r", prompt_of(9, 5))
    harness.run(2, 3)
    harness.step(3, publish=False)
    harness.step(3, publish=False)
    report = harness.step(3)
    assert report is not None
    assert report.cold_request_ids == ("r",)
    assert request.drafts == []
    harness.admit(request, mid_stream=True)
    harness.run(3, 3)
    assert harness.resident("r").warmth is Warmth.WARM
    assert len(request.drafts) == 3
    assert accepted_of(request) == 1.0
    draft_model.check_integrity()


def test_prefix_hits(make_harness: MakeHarness, draft_model: DraftModelSpeculator) -> None:
    harness = make_harness(draft_model)
    prompt = prompt_of(18, 6)
    harness.add("first", prompt)
    harness.run(3, 3)
    again = harness.target.add("again", [*prompt[:16], 500, 501])  # KV depends on what came before it alone
    assert harness.admit(again, mid_stream=False) == 16
    # The target's own hit is shorter, none at all here: the drafter needs none of those rows.
    harness.run(4, 3, chunk=7)
    assert accepted_of(again) == 1.0
    draft_model.check_integrity()


def test_no_room_and_no_length(make_harness: MakeHarness, decoder: Decoder) -> None:
    speculator = DraftModelSpeculator(decoder, replace(SETTINGS, num_blocks=4, max_len=24))
    harness = make_harness(speculator)
    request = harness.target.add("r", prompt_of(17, 1))
    with pytest.raises(CapacityError):
        harness.admit(request, mid_stream=False)
    assert speculator.num_free_blocks == 4
    speculator.check_integrity()
    long = make_harness(DraftModelSpeculator(decoder, replace(SETTINGS, max_len=24)))
    # Whom it cannot draft for it takes nothing of the target's prefix hit from.
    assert long.admit(long.target.add("longer", prompt_of(30, 3)), mid_stream=False) == 29
    stopped, other = long.add("long", prompt_of(18, 1)), long.add("short", prompt_of(4, 2))
    for _ in range(4):
        long.step(5)
    assert stopped.context_len > 24
    assert long.resident("long").warmth is Warmth.OFF
    assert stopped.drafts == []
    assert accepted_of(stopped) == 1.0
    assert accepted_of(other) == 1.0


def test_tokens_that_the_model_does_not_have(make_harness: MakeHarness, tmp_path: Path) -> None:
    directory = make_tiny_model(tmp_path / "draft", seed=5, vocab_size=500)
    harness = make_harness(DraftModelSpeculator(Decoder.load(directory, torch.float32), SETTINGS))
    request = harness.add("r", [*prompt_of(9, 5), 505])
    report = harness.step(3)
    assert report is not None
    assert request.drafts == []
    assert report.cold_request_ids == ()
    assert harness.resident("r").warmth is Warmth.OFF


def test_reuse_is_refused(decoder: Decoder) -> None:
    with pytest.raises(ConfigError, match=r"drafter\.metadata_source"):
        DraftModelSpeculator(decoder, replace(SETTINGS, metadata_source="reuse"))


@pytest.mark.slow
def test_acceptance_does_not_decay_over_churn(make_harness: MakeHarness, decoder: Decoder) -> None:
    """1,000 steps of requests that come, go, lose steps, share prefixes and fight for blocks: every draft is right."""
    speculator = DraftModelSpeculator(decoder, replace(SETTINGS, num_blocks=48))
    harness = make_harness(speculator)
    chance = random.Random(7)
    drafted = accepted = names = 0
    for step in range(1000):
        if len(harness.target.requests) < 4 and chance.random() < 0.3:
            names += 1
            prompt = [*prompt_of(4 * chance.randrange(1, 5), chance.randrange(3)), chance.randrange(3, 512)]
            request = harness.target.add(f"r{names}", prompt)
            try:
                harness.admit(request, mid_stream=False)
            except CapacityError:
                harness.residents.remove(harness.resident(request.request_id))
        if not harness.target.requests:
            continue
        requests = list(harness.target.requests.values())
        some = [request for request in requests if chance.random() < 0.8] or requests
        lens = {request.request_id: chance.randrange(6) for request in requests}
        harness.step(lens, only=some, chunk=chance.randrange(2, 9), publish=chance.random() > 0.02)
        if harness.reports:
            for request_id in harness.reports[-1].cold_request_ids:
                cold = harness.target.requests.get(request_id)
                if cold is not None and cold.decoding and chance.random() < 0.5:
                    try:
                        harness.admit(cold, mid_stream=True)
                    except CapacityError:
                        harness.residents.remove(harness.resident(request_id))
        for request in requests:
            if request.context_len > 60 or chance.random() < 0.01:
                drafted += request.num_drafted
                accepted += request.num_accepted
                harness.remove(request.request_id)
        if step % 50 == 0:
            speculator.check_integrity()
    assert drafted > 1000
    assert accepted == drafted
    for request_id in list(harness.target.requests):
        harness.remove(request_id)
    assert speculator.num_free_blocks == 48
    assert harness.residents.num_free_seats == 16
