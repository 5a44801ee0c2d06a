"""Does an EAGLE-3 head draft the same when nothing is known on the host?"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from drafter_service.device.program import DeviceOptions
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.residency import Warmth
from engine.decoder import Decoder
from tests.drafter_service.conftest import LAYERS
from tests.drafter_service.device.harness import ALL_SIZES, DeviceHarness
from tests.drafter_service.fake_target import FakeRequest, true_hidden
from tests.drafter_service.harness import Harness, prompt_of

MakeEagle3 = Callable[..., Eagle3Speculator]
MakeDevice = Callable[..., DeviceHarness]
MakeHost = Callable[..., Harness]

EXACT_SIZES = DeviceOptions(graph_rows=(), shadow=True)


@torch.inference_mode()
def assert_true_kv(harness: DeviceHarness, decoder: Decoder, head: Eagle3Head, request: FakeRequest) -> None:
    """The cache at every committed position of the request's extent == a full draft prefill from true hidden states."""
    speculator = harness.speculator
    assert isinstance(speculator, Eagle3Speculator)
    resident = harness.resident(request.request_id)
    start, end = speculator.placements.extent(resident)
    assert end == request.context_len
    hidden = true_hidden(decoder, request.tokens[:end], LAYERS)[start:]
    following = torch.tensor(request.tokens[start + 1 : end + 1])
    _, k, v, _ = head.project(following, head.fuse(hidden), torch.arange(end - start))
    if speculator.placements.blocks is None:
        table = torch.from_numpy(harness.target.blocks.table_np[request.seat]).to(torch.int64)
    else:
        table = torch.from_numpy(speculator.placements.blocks.table_np[resident.seat]).to(torch.int64)
    positions = torch.arange(end - start)
    blocks, offsets = table[positions // 4], positions % 4
    torch.testing.assert_close(speculator.kv.k(0)[blocks, offsets], k, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(speculator.kv.v(0)[blocks, offsets], v, atol=2e-5, rtol=1e-4)


def drafts_of(harness: DeviceHarness | Harness, num_steps: int, chunk: int = 9) -> list[list[list[int]]]:
    """Drafts of every request after every step of a varied run: draft_len 0..7, requests that come and go."""
    seen = []
    for step in range(num_steps):
        if step in (0, 1, 4):
            harness.add(f"r{step}", prompt_of(3 + 7 * step, step))
            harness.add(f"s{step}", prompt_of(8, 50 + step))
        if step == 7:
            harness.remove("s0")
            harness.add("again", prompt_of(8, 50))  # its prompt is in the prefix cache
        harness.step({"r0": step % 8, "r1": 3, "s0": 7, "again": 2, "r4": 5}, chunk=chunk)
        seen.append([list(request.drafts) for request in harness.target.requests.values()])
    return seen


@pytest.mark.parametrize("options", [ALL_SIZES, EXACT_SIZES, DeviceOptions((2, 16), fused=False, shadow=True)])
def test_device_drafts_as_the_host(
    make_eagle3: MakeEagle3, make_device: MakeDevice, make_host: MakeHost, options: DeviceOptions
) -> None:
    host, device = make_host(make_eagle3(attention="torch")), make_device(make_eagle3(), options)
    assert drafts_of(device, 14) == drafts_of(host, 14)
    assert [report.num_drafted for report in device.reports] == [report.num_drafted for report in host.reports]
    device.speculator.check_integrity()


def test_build_and_reuse_draft_the_same(
    make_eagle3: MakeEagle3, make_device: MakeDevice, head: Eagle3Head, decoder: Decoder
) -> None:
    seen = []
    for source in ("build", "reuse"):
        harness = make_device(make_eagle3(metadata_source=source, prefix_caching=False), lookahead=8)
        seen.append(drafts_of(harness, 12))
        assert {report.metadata_builds for report in harness.reports} == {1 if source == "build" else 0}
        for request in harness.target.requests.values():
            assert_true_kv(harness, decoder, head, request)
    assert seen[0] == seen[1]


def test_kv_is_true_after_every_step(
    make_eagle3: MakeEagle3, make_device: MakeDevice, head: Eagle3Head, decoder: Decoder
) -> None:
    harness = make_device(make_eagle3())
    requests = [harness.add(f"r{i}", prompt_of(5 + 9 * i, i)) for i in range(3)]
    for step in range(12):
        harness.step(draft_len=step % 5, chunk=8)
        for request in requests:
            assert_true_kv(harness, decoder, head, request)
    harness.speculator.check_integrity()


def test_metadata_is_built_once_a_proposal(make_eagle3: MakeEagle3, make_device: MakeDevice) -> None:
    harness = make_device(make_eagle3())
    harness.add("a", prompt_of(9, 1))
    harness.add("b", prompt_of(4, 2))
    for draft_len in (5, 0, 1, 7):
        report = harness.step(draft_len)
        assert (report.metadata_builds, report.metadata_launches) == (1, 1)


@pytest.mark.parametrize("num_rows", [1, 2, 3, 5, 17, 33])
def test_any_number_of_rows(
    make_eagle3: MakeEagle3, make_device: MakeDevice, make_host: MakeHost, num_rows: int
) -> None:
    """Row counts that are no padded size, against the host."""
    sizes = {"num_seats": 40, "max_tokens": 400}
    host = make_host(make_eagle3(attention="torch", **sizes), max_rows=40)
    device = make_device(make_eagle3(**sizes), max_rows=40)
    for harness in (host, device):
        for index in range(num_rows):
            harness.add(f"r{index}", prompt_of(2 + index % 5, index))
        harness.run(3, 2)
    for name, request in device.target.requests.items():
        assert request.drafts == host.target.requests[name].drafts
        assert request.tokens == host.target.requests[name].tokens


def test_lagging_truth_changes_no_draft(
    make_eagle3: MakeEagle3, make_device: MakeDevice, make_host: MakeHost, head: Eagle3Head, decoder: Decoder
) -> None:
    """Three steps under way all the time, planned by bounds: the host knows nothing of them."""
    host, device = make_host(make_eagle3(attention="torch")), make_device(make_eagle3())
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
        assert_true_kv(device, decoder, head, request)
    device.speculator.check_integrity()


def test_prefixes_are_shared_only_once_they_are_true(make_eagle3: MakeEagle3, make_device: MakeDevice) -> None:
    harness = make_device(make_eagle3())
    prompt = prompt_of(17, 1)
    harness.add("first", prompt)
    harness.launch(3)
    assert harness.admit(harness.target.add("early", prompt), mid_stream=False) == 0
    harness.release("early")
    harness.settle()
    # Blocks of 4, whose last draft KV needs the token behind: the prompt's 17 tokens make four of them.
    assert harness.admit(harness.target.requests["early"], mid_stream=False) == 16
    harness.run(4, 3)
    first, early = harness.target.requests.values()
    assert first.output[: len(early.output)] == early.output


def test_blocks_of_a_released_request_are_safe_while_it_is_under_way(
    make_eagle3: MakeEagle3, make_device: MakeDevice, head: Eagle3Head, decoder: Decoder
) -> None:
    """Release with steps under way; the next request takes the same seat and blocks at once."""
    harness = make_device(make_eagle3(num_blocks=8, num_seats=16))
    for index in range(6):
        harness.add(f"r{index}", prompt_of(9, index))
        for _ in range(3):
            harness.launch(4)
        harness.remove(f"r{index}")
        if index > 0:
            harness.settle(3)  # of the request before this one
    last = harness.add("last", prompt_of(11, 9))
    for _ in range(2):
        harness.launch(4)
    harness.settle()
    assert harness.resident("last").tokens == last.tokens
    assert_true_kv(harness, decoder, head, last)
    harness.speculator.check_integrity()
    harness.remove("last")
    assert harness.speculator.num_free_blocks == 8


def test_a_missed_step_makes_the_request_cold(make_eagle3: MakeEagle3, make_device: MakeDevice) -> None:
    harness = make_device(make_eagle3())
    request, other = harness.add("r", prompt_of(9, 8)), harness.add("other", prompt_of(5, 3))
    harness.run(2, 3)
    report = harness.step(3, only=[request], publish=False)
    assert report.missed
    assert report.cold_request_ids == ()  # whether anything is missing shows with its next row
    assert request.drafts == []
    report = harness.step(3)
    assert not report.missed
    assert report.cold_request_ids == ("r",)
    assert request.drafts == []
    assert len(other.drafts) == 3
    harness.speculator.check_integrity()


def test_a_cold_request_starts_again_at_its_next_row(
    make_eagle3: MakeEagle3, make_device: MakeDevice, head: Eagle3Head, decoder: Decoder
) -> None:
    harness = make_device(make_eagle3())
    request = harness.add("r", prompt_of(9, 8))
    harness.run(2, 3)
    harness.step(3, publish=False)
    harness.step(3)
    assert harness.resident("r").warmth is Warmth.COLD
    begun = request.context_len
    assert harness.admit(request, mid_stream=True) == 0
    for _ in range(4):
        report = harness.step(3)
        assert report.cold_request_ids == ()
        assert len(request.drafts) == 3
        assert_true_kv(harness, decoder, head, request)
    speculator = harness.speculator
    assert isinstance(speculator, Eagle3Speculator)
    assert speculator.placements.extent(harness.resident("r"))[0] == begun


def test_a_late_request_joins(make_eagle3: MakeEagle3, make_device: MakeDevice, make_host: MakeHost) -> None:
    host, device = make_host(make_eagle3(attention="torch")), make_device(make_eagle3())
    for harness in (host, device):
        harness.add("first", prompt_of(6, 2))
        harness.target.add("late", prompt_of(9, 6))
        harness.run(3, 2)
        assert harness.reports[-1].cold_request_ids == ("late",)
        harness.admit(harness.target.requests["late"], mid_stream=True)
        harness.run(5, 3)
    for name, request in device.target.requests.items():
        assert request.drafts == host.target.requests[name].drafts
        assert len(request.drafts) == 3


def test_reuse_never_drafts_for_a_late_request(make_eagle3: MakeEagle3, make_device: MakeDevice) -> None:
    harness = make_device(make_eagle3(metadata_source="reuse"), lookahead=8)
    request = harness.target.add("r", prompt_of(9, 6))
    harness.step(2)
    harness.admit(request, mid_stream=True)
    for _ in range(3):
        report = harness.step(3)
        assert request.drafts == []
        assert report.cold_request_ids == ()
    assert harness.resident("r").warmth is Warmth.OFF


def test_reuse_without_look_ahead_never_drafts_into_the_null_block(
    make_eagle3: MakeEagle3, make_device: MakeDevice, head: Eagle3Head, decoder: Decoder
) -> None:
    speculator = make_eagle3(metadata_source="reuse")
    harness = make_device(speculator)
    request = harness.add("r", prompt_of(6, 3))
    for _ in range(10):
        harness.step(7)
        assert len(request.drafts) >= 1
        assert_true_kv(harness, decoder, head, request)
    assert not bool(speculator.kv.k(0)[0].any())


@pytest.mark.parametrize(("blocks", "max_len"), [(512, 24), (6, 256)])
def test_limits_are_those_of_the_host(
    make_eagle3: MakeEagle3, make_device: MakeDevice, make_host: MakeHost, blocks: int, max_len: int
) -> None:
    sizes = {"num_blocks": blocks, "max_len": max_len}
    host, device = make_host(make_eagle3(attention="torch", **sizes)), make_device(make_eagle3(**sizes))
    for harness in (host, device):
        harness.add("long", prompt_of(16, 1))
        harness.add("short", prompt_of(3, 2), max_total_len=14)
    for _ in range(14):
        for harness in (host, device):
            requests = [r for r in harness.target.requests.values() if r.context_len < 40]
            harness.step(5, only=requests)
        for name, request in device.target.requests.items():
            assert request.drafts == host.target.requests[name].drafts
    # By bounds alone it is not known whether the request could ever fit: it may be asked for again.
    expected = Warmth.OFF if max_len == 24 else Warmth.COLD
    assert device.resident("long").warmth is expected
    assert not bool(device.speculator.kv.k(0)[0].any())  # type: ignore[attr-defined]
    device.speculator.check_integrity()


def test_drawn_drafts_and_their_probabilities_are_the_host_s(
    make_eagle3: MakeEagle3, make_device: MakeDevice, make_host: MakeHost
) -> None:
    drawing = {"draft_sampling": "probabilistic"}
    host = make_host(make_eagle3(attention="torch", **drawing), draft_probs=True)
    device = make_device(make_eagle3(**drawing), draft_probs=True)
    for harness in (host, device):
        harness.add("warm", prompt_of(5, 1), temperature=0.9)
        harness.add("greedy", prompt_of(7, 2))
        harness.add("seeded", prompt_of(4, 3), temperature=0.7, seeded=True)
    lens = {"warm": 3, "greedy": 2, "seeded": 4}
    for _ in range(5):
        replies = []
        for harness in (host, device):
            harness.step(lens)
            reply = harness.target.channel.take_reply(harness.target.seq, 1.0)
            assert reply is not None
            replies.append(reply)
        ours, theirs = replies[1], replies[0]
        assert ours.tokens.tolist() == theirs.tokens.tolist()
        assert ours.probs is not None
        assert theirs.probs is not None
        assert ours.has_probs is not None
        assert ours.has_probs.tolist() == [True, False, False]
        torch.testing.assert_close(ours.probs[0, :3], theirs.probs[0, :3], atol=1e-5, rtol=1e-4)
    device.remove("warm")
    device.step(lens)
    reply = device.target.channel.take_reply(device.target.seq, 1.0)
    assert reply is not None
    assert reply.has_probs is not None
    assert reply.has_probs.tolist() == [False, False]


def test_poisoned_buffers_change_nothing(make_eagle3: MakeEagle3, make_device: MakeDevice) -> None:
    """Whatever an earlier step left in the persistent buffers, no later one reads it."""
    clean, dirty = make_device(make_eagle3()), make_device(make_eagle3())
    program = dirty.program
    for harness in (clean, dirty):
        for index in range(3):
            harness.add(f"r{index}", prompt_of(4 + index, index))
    for step in range(6):
        clean.step(step)
        for tensor in (program._hidden, program._carry):  # type: ignore[attr-defined]
            tensor.fill_(float("nan"))
        for tensor in (program.taken.positions, program.taken.anchors, program.drafts, program._ids):  # type: ignore[attr-defined]
            tensor.fill_(77_777_777)
        for tensor in (program.taken.seats, program.taken.seq_lens, program.taken.step_seq_lens):
            tensor.fill_(7)
        dirty.step(step)
        assert [r.drafts for r in clean.target.requests.values()] == [r.drafts for r in dirty.target.requests.values()]
