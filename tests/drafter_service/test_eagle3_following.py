"""Does the EAGLE-3 drafter's KV stay what a full draft prefill with true hidden states would make it?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.messages import RowRequest, StepRequest
from drafter_service.residency import Warmth
from engine.decoder import Decoder
from tests.drafter_service.conftest import LAYERS, SETTINGS
from tests.drafter_service.fake_target import FakeRequest, true_hidden
from tests.drafter_service.harness import Harness, prompt_of

MakeHarness = Callable[..., Harness]


@torch.inference_mode()
def assert_true_kv(harness: Harness, decoder: Decoder, head: Eagle3Head, request: FakeRequest) -> None:
    """The cache at every committed position of the request's extent == a full draft prefill from true hidden states."""
    speculator = harness.speculator
    assert isinstance(speculator, Eagle3Speculator)
    resident = harness.resident(request.request_id)
    start, end = speculator.placements.extent(resident)
    assert end == request.context_len
    hidden = true_hidden(decoder, request.tokens[:end], LAYERS)[start:]
    following = torch.tensor(request.tokens[start + 1 : end + 1])
    _, k, v, _ = head.project(following, head.fuse(hidden), torch.arange(end - start))
    if speculator.placements._blocks is None:
        table = torch.from_numpy(harness.target.blocks.table_np[request.seat]).to(torch.int64)
    else:
        table = speculator.placements.seat_tables()[resident.seat].to(torch.int64)
    positions = torch.arange(end - start)
    blocks, offsets = table[positions // 4], positions % 4
    assert bool((blocks > 0).all())
    torch.testing.assert_close(speculator.kv.k(0)[blocks, offsets], k, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(speculator.kv.v(0)[blocks, offsets], v, atol=2e-5, rtol=1e-4)


def test_kv_is_true_after_every_step(
    make_harness: MakeHarness, eagle3: Eagle3Speculator, head: Eagle3Head, decoder: Decoder
) -> None:
    harness = make_harness(eagle3)
    requests = [harness.add(f"r{i}", prompt_of(5 + 9 * i, i)) for i in range(3)]
    for step in range(12):
        harness.step(draft_len=step % 5, chunk=8)
        for request in requests:
            assert_true_kv(harness, decoder, head, request)
    harness.speculator.check_integrity()


def test_drafts_are_those_of_a_full_prefill(
    make_harness: MakeHarness, eagle3: Eagle3Speculator, head: Eagle3Head, decoder: Decoder
) -> None:
    """Draft by draft against a head that runs the whole text anew, without any cache."""
    harness = make_harness(eagle3)
    request = harness.add("r", prompt_of(11, 5))
    for _ in range(6):
        harness.step(4)
        expected = reference_drafts(head, decoder, request.tokens[: request.context_len + 1], 4)
        assert request.drafts == expected


@torch.inference_mode()
def reference_drafts(head: Eagle3Head, decoder: Decoder, tokens: list[int], num: int, start: int = 0) -> list[int]:
    """Greedy drafts after `tokens` (the anchor last) by dense attention over the whole text, from position `start`."""
    hidden = true_hidden(decoder, tokens[:-1], LAYERS)[start:]
    states = head.fuse(hidden)
    ids = tokens[start + 1 :]
    drafts: list[int] = []
    for _ in range(num):
        positions = torch.arange(len(ids))
        q, k, v, residual = head.project(torch.tensor(ids), states, positions)
        k, v = k.repeat_interleave(2, dim=1), v.repeat_interleave(2, dim=1)
        scores = torch.einsum("hd,thd->ht", q[-1], k) * head.config.head_dim**-0.5
        attended = torch.einsum("ht,thd->hd", scores.softmax(-1), v)
        output = head.finish(attended[None], residual[-1:])
        token = int(head.target_ids(head.logits(output).argmax(-1))[0])
        drafts.append(token)
        ids = [*ids, token]
        states = torch.cat([states, head.next_hidden(output)])
    return drafts


def test_metadata_is_built_once_a_proposal(make_harness: MakeHarness, eagle3: Eagle3Speculator) -> None:
    harness = make_harness(eagle3)
    harness.add("a", prompt_of(9, 1))
    harness.add("b", prompt_of(4, 2))
    for draft_len in (5, 0, 1, 7):
        report = harness.step(draft_len)
        assert report is not None
        assert (report.metadata_builds, report.metadata_launches) == (1, 2)


def test_build_and_reuse_draft_the_same(make_harness: MakeHarness, head: Eagle3Head, decoder: Decoder) -> None:
    outputs = []
    for source in ("build", "reuse"):
        speculator = Eagle3Speculator(head, LAYERS, replace(SETTINGS, metadata_source=source))
        harness = make_harness(speculator, lookahead=8)
        requests = [harness.add(f"r{i}", prompt_of(4 + 5 * i, i)) for i in range(3)]
        for step in range(10):
            report = harness.step((4, 7, 0, 2)[step % 4], chunk=6)
            assert report is not None
            assert report.metadata_builds == (1 if source == "build" else 0)
            for request in requests:
                assert_true_kv(harness, decoder, head, request)
        proposals = [proposal.tokens for proposal in harness.recorder.proposals]
        outputs.append([tokens.numpy().tobytes() for tokens in proposals])
    assert outputs[0] == outputs[1]


def test_reuse_without_look_ahead_never_drafts_into_the_null_block(
    make_harness: MakeHarness, head: Eagle3Head, decoder: Decoder
) -> None:
    speculator = Eagle3Speculator(head, LAYERS, replace(SETTINGS, metadata_source="reuse"))
    harness = make_harness(speculator)
    request = harness.add("r", prompt_of(6, 3))
    for _ in range(10):
        harness.step(7)
        # A target block holds 4 tokens; the drafts' KV ends where the target's blocks end.
        assert len(request.drafts) >= 1
        assert_true_kv(harness, decoder, head, request)
    assert not bool(speculator.kv.k(0)[0].any())


def test_no_hole_after_steps_without_drafts(
    make_harness: MakeHarness, eagle3: Eagle3Speculator, head: Eagle3Head, decoder: Decoder
) -> None:
    harness = make_harness(eagle3)
    request = harness.add("r", prompt_of(7, 4))
    for draft_len in (3, 0, 0, 3, 0, 3):
        report = harness.step(draft_len)
        assert report is not None
        assert report.num_drafted == draft_len
        assert_true_kv(harness, decoder, head, request)
        assert request.drafts == reference_drafts(head, decoder, request.tokens, draft_len)


def test_late_start_counts_positions_from_its_first_row(
    make_harness: MakeHarness, eagle3: Eagle3Speculator, head: Eagle3Head, decoder: Decoder
) -> None:
    harness = make_harness(eagle3)
    request = harness.target.add("r", prompt_of(9, 6))
    for _ in range(3):
        harness.step(2)  # not resident: reported cold, nothing drafted
        assert harness.reports[-1].cold_request_ids == ("r",)
        assert request.drafts == []
    begun = request.context_len
    assert harness.admit(request, mid_stream=True) == 0
    for _ in range(5):
        harness.step(3)
        assert eagle3.placements.extent(harness.resident("r")) == (begun, request.context_len)
        assert_true_kv(harness, decoder, head, request)
        assert request.drafts == reference_drafts(head, decoder, request.tokens, 3, start=begun)
    # A text that does not start at its beginning is nobody's prefix.
    assert eagle3.placements._blocks is not None
    assert eagle3.placements._blocks.pool.num_cached == 0


def test_reuse_never_drafts_for_a_late_request(make_harness: MakeHarness, head: Eagle3Head) -> None:
    speculator = Eagle3Speculator(head, LAYERS, replace(SETTINGS, metadata_source="reuse"))
    harness = make_harness(speculator, lookahead=8)
    request = harness.target.add("r", prompt_of(9, 6))
    harness.step(2)
    harness.admit(request, mid_stream=True)
    for _ in range(3):
        report = harness.step(3)
        assert report is not None
        assert request.drafts == []
        assert report.cold_request_ids == ()  # asking again would not help
    assert harness.resident("r").warmth is Warmth.OFF


def test_missed_steps_still_in_the_ring_are_caught_up(
    make_harness: MakeHarness, eagle3: Eagle3Speculator, head: Eagle3Head, decoder: Decoder
) -> None:
    harness = make_harness(eagle3)
    request = harness.add("r", prompt_of(9, 7))
    harness.step(2)
    # Two steps go by whose entries come after the drafter stopped waiting for them.
    for _ in range(2):
        rows = harness.target.plan_rows([request], 64)
        seq = harness.target.step(rows, publish=True)
        harness.link.missed.append(plan_of(harness, seq))
    harness.step(3)
    assert eagle3.placements.extent(harness.resident("r")) == (0, request.context_len)
    assert_true_kv(harness, decoder, head, request)
    assert request.drafts == reference_drafts(head, decoder, request.tokens, 3)


def plan_of(harness: Harness, seq: int) -> StepRequest:
    rows = tuple(RowRequest(request_id, 1, 2) for request_id in harness.target.requests)
    return StepRequest(seq, harness.target.spec.channel_id, harness.target.spec.epoch, rows, 1000)


def test_a_hole_makes_build_start_over(
    make_harness: MakeHarness, eagle3: Eagle3Speculator, head: Eagle3Head, decoder: Decoder
) -> None:
    harness = make_harness(eagle3)
    request = harness.add("r", prompt_of(9, 8))
    harness.run(3, 3)
    harness.step(3, publish=False)
    begun = request.context_len
    harness.run(3, 3)
    assert eagle3.placements.extent(harness.resident("r")) == (begun, request.context_len)
    assert_true_kv(harness, decoder, head, request)
    assert request.drafts == reference_drafts(head, decoder, request.tokens, 3, start=begun)
    eagle3.check_integrity()


def test_prefix_hits_cover_one_token_more(
    make_harness: MakeHarness, eagle3: Eagle3Speculator, head: Eagle3Head, decoder: Decoder
) -> None:
    """Blocks of 4: 8 draft positions of a prompt are a hit only when its first 9 tokens agree."""
    harness = make_harness(eagle3)
    prompt = prompt_of(9, 9)
    first = harness.add("first", prompt)
    harness.run(2, 3)
    nearly = [*prompt[:8], (prompt[8] + 1) % 512, 5, 6]
    assert harness.admit(harness.target.add("nearly", nearly), mid_stream=False) == 4
    again = harness.target.add("again", [*prompt, 7])
    cached = harness.admit(again, mid_stream=False)
    assert cached == 8
    # The target runs the cached part too (its own cache is off here), as if its hit had been the shorter one.
    harness.run(4, 3)
    for request in (first, again, harness.target.requests["nearly"]):
        assert_true_kv(harness, decoder, head, request)
    eagle3.check_integrity()


def test_prefix_hit_starts_at_the_target_s_shorter_hit(
    make_harness: MakeHarness, eagle3: Eagle3Speculator, head: Eagle3Head, decoder: Decoder
) -> None:
    harness = make_harness(eagle3)
    prompt = prompt_of(20, 10)
    harness.add("first", prompt)
    harness.run(3, 3)
    harness.remove("first")
    again = harness.target.add("again", prompt)
    assert harness.admit(again, mid_stream=False) == 16
    # The target had a hit of 12: its first row starts there.
    with torch.inference_mode():
        harness.target.step(harness.target.plan_rows([again], 12), publish=False)
    harness.step(3)
    assert eagle3.placements.extent(harness.resident("again")) == (0, again.context_len)
    assert_true_kv(harness, decoder, head, again)
    assert again.drafts == reference_drafts(head, decoder, again.tokens, 3)


def test_eviction_under_churn_keeps_the_kv_true(make_harness: MakeHarness, head: Eagle3Head, decoder: Decoder) -> None:
    speculator = Eagle3Speculator(head, LAYERS, replace(SETTINGS, num_blocks=24))
    harness = make_harness(speculator)
    for index in range(12):
        prompt = prompt_of(14, index % 5)
        request = harness.add(f"r{index}", prompt)
        cached = speculator.placements.extent(harness.resident(f"r{index}"))[1]
        assert cached <= 12
        harness.run(3, 4)
        assert_true_kv(harness, decoder, head, request)
        harness.remove(f"r{index}")
        speculator.check_integrity()
    assert speculator.num_free_blocks == 24


def test_without_blocks_only_the_request_itself_goes_cold(
    make_harness: MakeHarness, head: Eagle3Head, decoder: Decoder
) -> None:
    speculator = Eagle3Speculator(head, LAYERS, replace(SETTINGS, num_blocks=7, prefix_caching=False))
    harness = make_harness(speculator)
    small = harness.add("small", prompt_of(5, 1))
    large = harness.add("large", prompt_of(24, 2))
    report = harness.step(3)
    assert report is not None
    assert report.cold_request_ids == ("large",)
    assert large.drafts == []
    assert small.drafts == reference_drafts(head, decoder, small.tokens, 3)
    speculator.check_integrity()


def test_length_limit_stops_one_request_and_touches_no_neighbour(
    make_harness: MakeHarness, head: Eagle3Head, decoder: Decoder
) -> None:
    speculator = Eagle3Speculator(head, LAYERS, replace(SETTINGS, max_len=24))
    harness = make_harness(speculator)
    long = harness.add("long", prompt_of(18, 1))
    short = harness.add("short", prompt_of(4, 2))
    alone = make_harness(Eagle3Speculator(head, LAYERS, replace(SETTINGS, max_len=24)))
    twin = alone.add("short", prompt_of(4, 2))
    for _ in range(12):
        harness.step(5)
        alone.step(5)
        assert short.drafts == twin.drafts
        assert short.tokens == twin.tokens
        if short.context_len <= 24:
            assert_true_kv(harness, decoder, head, short)
        # A draft's KV never lies past the limit: at most max_len - committed + 1 drafts.
        assert len(long.drafts) <= max(24 - long.context_len + 1, 0)
        if long.context_len > 24:
            assert harness.resident("long").warmth is Warmth.OFF
    assert long.context_len > 24
    assert long.tokens[:18] == prompt_of(18, 1)
    speculator.check_integrity()


def test_a_prompt_that_is_too_long_takes_nothing_from_the_target_s_hit(
    make_harness: MakeHarness, head: Eagle3Head
) -> None:
    speculator = Eagle3Speculator(head, LAYERS, replace(SETTINGS, max_len=24))
    harness = make_harness(speculator)
    request = harness.target.add("r", prompt_of(30, 1))
    assert harness.admit(request, mid_stream=False) == 29
    report = harness.step(3)
    assert report is not None
    assert report.cold_request_ids == ()
    assert request.drafts == []
    speculator.check_integrity()


def test_no_drafts_past_the_request_s_own_length(make_harness: MakeHarness, eagle3: Eagle3Speculator) -> None:
    harness = make_harness(eagle3)
    request = harness.add("r", prompt_of(6, 1), max_total_len=10)
    expected = {6: 2, 7: 1, 8: 0, 9: 0}  # 7 tokens are there, two drafts and the target's own make 10
    while request.context_len <= 9:
        harness.step(5)
        if request.context_len in expected:
            assert len(request.drafts) == expected[request.context_len]


def test_same_prompts_in_one_step_draft_as_one_after_the_other(
    make_harness: MakeHarness, head: Eagle3Head, decoder: Decoder
) -> None:
    together = make_harness(Eagle3Speculator(head, LAYERS, SETTINGS))
    pair = [together.add(name, prompt_of(10, 3)) for name in ("a", "b")]
    drafts_together: list[list[list[int]]] = []
    for _ in range(5):
        together.step(4)
        drafts_together.append([request.drafts for request in pair])
    apart = make_harness(Eagle3Speculator(head, LAYERS, SETTINGS))
    for index, name in enumerate(("a", "b")):
        request = apart.add(name, prompt_of(10, 3))
        for step in range(5):
            apart.step(4, only=[request])
            assert request.drafts == drafts_together[step][index]
        apart.remove(name)


@pytest.mark.parametrize("draft_lens", [{"a": 5, "b": 1, "c": 0}, {"a": 0, "b": 2, "c": 7}])
def test_rows_of_different_draft_len_do_not_disturb_each_other(
    make_harness: MakeHarness, eagle3: Eagle3Speculator, head: Eagle3Head, decoder: Decoder, draft_lens: dict[str, int]
) -> None:
    harness = make_harness(eagle3)
    requests = [harness.add(name, prompt_of(6 + index, index)) for index, name in enumerate("abc")]
    for _ in range(4):
        harness.step(draft_lens)
        for request in requests:
            expected = reference_drafts(head, decoder, request.tokens, draft_lens[request.request_id])
            assert request.drafts == expected
            assert_true_kv(harness, decoder, head, request)
