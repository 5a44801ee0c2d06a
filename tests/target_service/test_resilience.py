"""Nothing leaks and nothing waits for ever: epochs, starvation, broken streams, silent drafters, random use."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from protos import common_pb2, target_pb2
from target_service.assembly import Target
from tests.target_service.conftest import LocalTarget
from tests.target_service.gateway_client import Driver, Gateway, Running
from tests.target_service.scripted_drafter import ScriptedDrafter
from tests.target_service.test_greedy import all_free, prompt_of, ragged
from tests.tiny_models import greedy_reference

OK, STARVED, UNKNOWN = (
    target_pb2.ROW_STATUS_OK,
    target_pb2.ROW_STATUS_STARVED,
    target_pb2.ROW_STATUS_UNKNOWN,
)


def eventually_free(target: Target, deadline_s: float = 10.0) -> None:
    """Every seat and block is free soon; for what another thread is about to do."""
    end = time.monotonic() + deadline_s
    while len(target.core.sessions) and time.monotonic() < end:
        time.sleep(0.01)  # between two looks at another thread's work
    capacity = target.core.sessions.capacity
    assert (capacity.free_seats, capacity.free_blocks) == (target.info.num_seats, target.info.num_blocks)
    target.core.sessions.check_integrity()


def test_epochs(target_address: str, reference: PreTrainedModel) -> None:
    with Gateway(target_address) as gateway:
        driver = Driver(gateway)
        running = driver.request(prompt_of(20, seed=2), 6)
        driver.admit(running)
        driver.step([running])
        stale_plan = common_pb2.StepPlan(seq=3, rows=[driver.row(running)])
        running.epoch = 2  # placed anew: the older placement gives way
        driver.admit(running)
        driver.seq = 1
        driver.step([running])
        driver.seq = 3
        stale = gateway.plan(stale_plan).rows[0]
        assert (stale.status, list(stale.token_ids), stale.epoch) == (UNKNOWN, [], 1)
        before = gateway.release(running.request_id, 1).capacity
        assert before.free_seats == gateway.info.num_seats - 1, "a stale release must be dropped"
        for epoch in (1, 2):
            running.epoch = epoch
            reply = gateway.admit(driver.admission(running))
            assert (reply.status, reply.field) == (common_pb2.ADMIT_STATUS_INVALID, "epoch")
        while not running.done:
            driver.step([running])
        assert running.generated == greedy_reference(reference, running.prompt, 6)
        gateway.release(running.request_id, 2)
        assert all_free(gateway)


def test_unknown_rows_run_beside_known_ones(target_address: str, reference: PreTrainedModel) -> None:
    with Gateway(target_address) as gateway, ScriptedDrafter(target_address) as drafter:
        driver = Driver(gateway, drafter)
        first, ghost, last = (driver.request(prompt_of(n), 5) for n in (9, 4, 13))
        ghost.draft_len = 0
        for running in (first, last):
            driver.admit(running)
        result = driver.step([first, ghost, last])
        assert [row.status for row in result.rows] == [OK, UNKNOWN, OK]
        while not first.done:
            driver.step([first, last])
        for running in (first, last):
            assert running.generated == greedy_reference(reference, running.prompt, 5)
            gateway.release(running.request_id)
    entry = drafter.entries[0]
    assert entry["query_start_loc"].tolist() == [0, 9, 9, 22]
    assert entry["seats"].tolist() == [0, -1, 1]
    assert entry["seq_lens"].tolist() == [9, 0, 13]
    assert entry["num_sampled"].tolist() == [1, 0, 1]
    assert entry["anchors"].tolist() == [first.generated[0], -1, last.generated[0]]


def test_another_gateways_requests_cannot_be_run(target_address: str) -> None:
    with Gateway(target_address) as one, Gateway(target_address) as other:
        driver = Driver(one)
        running = driver.request(prompt_of(9), 5)
        driver.admit(running)
        rows = [driver.row(running)]
        assert other.plan(common_pb2.StepPlan(seq=1, rows=rows)).rows[0].status == UNKNOWN
        assert one.plan(common_pb2.StepPlan(seq=1, rows=rows)).rows[0].status == OK


def test_another_gateways_requests_cannot_be_released(target_address: str) -> None:
    with Gateway(target_address) as one, Gateway(target_address) as other:
        driver = Driver(one)
        running = driver.request(prompt_of(9), 5)
        driver.admit(running)
        other.release(running.request_id)
        assert driver.step([running]).rows[0].status == OK


def test_starved_rows_recover_after_a_release(
    local_target: Callable[..., LocalTarget], reference: PreTrainedModel
) -> None:
    address, target = local_target(num_blocks=6, prefix_caching=False)
    with Gateway(address) as gateway:
        driver = Driver(gateway)
        first, second = driver.request(prompt_of(40), 20), driver.request(prompt_of(47), 20)
        driver.admit(first)
        driver.admit(second)
        statuses = [row.status for row in driver.step([first, second]).rows]
        assert statuses == [OK, OK]
        assert gateway.release("nobody").capacity.free_blocks == 0
        driver.step([first, second])  # the second request's 48th token fills its third block
        result = driver.step([first, second])
        assert [row.status for row in result.rows] == [OK, STARVED]
        assert result.rows[1].context_len == second.context_len
        generated = list(second.generated)
        driver.step([second])
        assert second.generated == generated, "a starved row does not run"
        gateway.release(first.request_id)
        while not second.done:
            assert driver.step([second]).rows[0].status == OK
        assert second.generated == greedy_reference(reference, second.prompt, 20)
        gateway.release(second.request_id)
        assert all_free(gateway)
    eventually_free(target)


def test_drafts_give_way_before_a_row_starves(
    local_target: Callable[..., LocalTarget], reference: PreTrainedModel
) -> None:
    address, _ = local_target(num_blocks=3, prefix_caching=False)
    with Gateway(address) as gateway, ScriptedDrafter(address) as drafter:
        driver = Driver(gateway, drafter)
        prompt = prompt_of(44)
        running = driver.request(prompt, 4, full=prompt + greedy_reference(reference, prompt, 12), draft_len=7)
        admission = driver.admission(running)
        admission.max_total_len = 60
        assert gateway.admit(admission).status == common_pb2.ADMIT_STATUS_OK
        driver.step([running])
        result = driver.step([running])  # room for 48 tokens: the anchor at 44 and three drafts
        assert (result.rows[0].num_drafted, result.rows[0].num_accepted) == (3, 3)
        assert driver.step([running]).rows[0].status == STARVED
        gateway.release(running.request_id)
        assert running.generated == running.full[44:49]


@pytest.mark.parametrize("metadata_source", ["build", "reuse"])
def test_drafts_give_way_before_another_row_starves(
    local_target: Callable[..., LocalTarget], reference: PreTrainedModel, metadata_source: str
) -> None:
    """The last free block goes to the row that cannot run without it, not to an earlier row's drafts."""
    address, _ = local_target(num_blocks=3, prefix_caching=False)
    with Gateway(address) as gateway, ScriptedDrafter(address, metadata_source=metadata_source) as drafter:
        driver = Driver(gateway, drafter)
        prompt, plain_prompt = prompt_of(10), prompt_of(16)
        full = prompt + greedy_reference(reference, prompt, 12)
        drafted, plain = driver.request(prompt, 12, full=full, draft_len=7), driver.request(plain_prompt, 2)
        driver.admit(drafted)
        driver.admit(plain)
        driver.step([drafted, plain])
        result = driver.step([drafted, plain])  # its block has room for the anchor at 10 and five drafts
        assert [row.status for row in result.rows] == [OK, OK]
        assert (result.rows[0].num_drafted, result.rows[0].num_accepted) == (5, 5)
        assert plain.generated == greedy_reference(reference, plain_prompt, 2)
        assert drafted.generated == full[10:17]
        for running in (drafted, plain):
            gateway.release(running.request_id)
        assert all_free(gateway)


def test_a_draft_len_beyond_the_channels_takes_no_more_blocks(local_target: Callable[..., LocalTarget]) -> None:
    address, _ = local_target(num_blocks=32)
    with Gateway(address) as gateway, ScriptedDrafter(address, metadata_source="reuse") as drafter:
        driver = Driver(gateway, drafter)
        running = driver.request(prompt_of(20), 3, draft_len=1 << 31)
        driver.admit(running)
        assert driver.step([running]).capacity.free_blocks == 30  # 20 tokens and 7 drafts
        gateway.release(running.request_id)


def test_never_grows_past_max_total_len(target_address: str, reference: PreTrainedModel) -> None:
    with Gateway(target_address) as gateway, ScriptedDrafter(target_address) as drafter:
        driver = Driver(gateway, drafter)
        prompt = prompt_of(11)
        for max_tokens in (1, 2, 5, 9):
            full = prompt + greedy_reference(reference, prompt, 20)
            running = driver.request(prompt, max_tokens, full=full, draft_len=7)
            driver.run([running])
            assert running.generated == full[11 : 11 + max_tokens]
        # At the very end of the model's positions too.
        long = prompt_of(505)
        full = long + greedy_reference(reference, long, 7)
        running = driver.request(long, 7, full=full + [0] * 8, draft_len=7)
        driver.run([running])
        assert running.generated == full[505:]


@pytest.mark.parametrize("kind", ["shm", "bytes"])
def test_a_silent_drafter_costs_the_deadline_once_a_step(
    target_address: str, reference: PreTrainedModel, kind: str
) -> None:
    with (
        Gateway(target_address) as gateway,
        ScriptedDrafter(target_address, kind, silent=True) as drafter,
    ):
        driver = Driver(gateway, drafter)
        driver.deadline_ms = 100
        running = driver.request(prompt_of(10), 4, draft_len=3)
        driver.admit(running)
        driver.step([running])
        began = time.monotonic()
        result = driver.step([running])
        assert result.drafts_missed
        assert 90 < result.wait_ms < 600
        assert time.monotonic() - began < 2
        while not running.done:
            driver.step([running])
        assert running.generated == greedy_reference(reference, running.prompt, 4)
        gateway.release(running.request_id)


@pytest.mark.parametrize("kind", ["shm", "bytes"])
def test_a_dead_drafter_is_not_waited_for_and_its_channel_is_freed(
    local_target: Callable[..., LocalTarget], reference: PreTrainedModel, kind: str
) -> None:
    address, target = local_target(heartbeat_deadline_s=0.3, drafter_lease_s=1.0)
    prompt = prompt_of(10)
    full = prompt + greedy_reference(reference, prompt, 12)
    with Gateway(address) as gateway:
        drafter = ScriptedDrafter(address, kind)
        driver = Driver(gateway, drafter)
        driver.deadline_ms = 4000
        running = driver.request(prompt, 12, full=full, draft_len=2)
        driver.admit(running)
        driver.step([running])
        assert driver.step([running]).rows[0].num_accepted == 2
        drafter.close(detach=False)  # gone without a word to the target
        drafter.expect = lambda seq, rows: None  # type: ignore[method-assign]
        driver.step([running])  # the reply to the step before may have been published already
        began = time.monotonic()
        while not running.done:
            assert not driver.step([running]).rows[0].num_drafted
        assert time.monotonic() - began < 3, "a drafter without heartbeat was waited for"
        assert running.generated == full[10:]
        end = time.monotonic() + 10
        while target.channels.find(drafter.channel_id, drafter.channel_epoch) and time.monotonic() < end:
            time.sleep(0.02)  # until the reaper has been round
        assert target.channels.find(drafter.channel_id, drafter.channel_epoch) is None
        # The same drafter again: a new epoch, used at once.
        with ScriptedDrafter(address, kind) as again:
            assert again.channel_epoch > drafter.channel_epoch
            driver.drafter = again
            running2 = driver.request(prompt, 12, full=full, draft_len=2)
            driver.run([running2])
            assert running2.from_draft > 0
            assert running2.generated == full[10:]


def test_a_newer_attach_replaces_the_older_channel(target_address: str) -> None:
    with ScriptedDrafter(target_address) as older, ScriptedDrafter(target_address) as newer:
        assert newer.channel_id == older.channel_id
        assert newer.channel_epoch > older.channel_epoch
        end = time.monotonic() + 10
        while older.end.peer_alive() and time.monotonic() < end:
            time.sleep(0.02)  # until the device thread has closed it
        assert not older.end.peer_alive()
        older.detach()  # late, and of the older epoch: it must not reach the newer channel
        assert not newer.end.closed
        with Gateway(target_address) as gateway:
            gateway.release("nobody")  # the device thread has been round
            driver = Driver(gateway, newer)
            running = driver.request(prompt_of(5), 3)
            driver.run([running])
            while len(newer.entries) < 3 and time.monotonic() < end:
                time.sleep(0.02)  # until its thread has read what was published
            assert len(newer.entries) == 3


def test_only_real_drafts_are_counted(target_address: str, reference: PreTrainedModel) -> None:
    """A row's drafts end at the first absent one, or at one that is no token at all."""
    prompt = prompt_of(10)
    full = prompt + greedy_reference(reference, prompt, 40)
    for hole in (-1, 512, 1 << 40):

        def script(row: int, position: int, drafts: list[int], hole: int = hole) -> list[int]:
            return [*drafts[:2], hole, *drafts[3:]]

        with Gateway(target_address) as gateway, ScriptedDrafter(target_address, script=script) as drafter:
            driver = Driver(gateway, drafter)
            running = driver.request(prompt, 12, full=full, draft_len=5)
            driver.admit(running)
            driver.step([running])
            row = driver.step([running]).rows[0]
            assert (row.num_drafted, row.num_accepted) == (2, 2)
            assert running.generated == full[10 : 10 + len(running.generated)]
            gateway.release(running.request_id)


def test_drafts_of_another_step_or_placement_are_not_used(target_address: str, reference: PreTrainedModel) -> None:
    """A row left out of a step must not verify what was drafted before it; nor a new placement."""
    prompt = prompt_of(10)
    full = prompt + greedy_reference(reference, prompt, 40)
    with Gateway(target_address) as gateway, ScriptedDrafter(target_address) as drafter:
        driver = Driver(gateway, drafter)
        running = driver.request(prompt, 36, full=full, draft_len=3)
        other = driver.request(prompt_of(5), 12, draft_len=0)
        driver.admit(running)
        driver.admit(other)
        driver.step([running, other])
        driver.step([other])
        assert driver.step([running, other]).rows[0].num_drafted == 0
        assert driver.step([running, other]).rows[0].num_drafted == 3
        # One step without verifying; then the drafts of the step before that one follow an anchor that is gone.
        running.draft_len = 0
        driver.step([running, other])
        running.draft_len = 3
        driver.drafts_age = 2
        assert driver.step([running, other]).rows[0].num_drafted == 0
        driver.drafts_age = 1
        assert driver.step([running, other]).rows[0].num_drafted == 3
        gateway.release(running.request_id)
        running.epoch += 1
        driver.admit(running)
        driver.step([running, other])
        assert driver.step([running, other]).rows[0].num_drafted == 3
        assert running.generated == full[10 : 10 + len(running.generated)]
        for request in (running, other):
            gateway.release(request.request_id, request.epoch)


def test_the_end_of_a_stream_frees_everything(local_target: Callable[..., LocalTarget]) -> None:
    address, target = local_target()
    for close in (Gateway.close, Gateway.half_close):
        gateway = Gateway(address)
        driver = Driver(gateway)
        requests = [driver.request(prompt_of(n), 9) for n in (3, 30, 18)]
        for running in requests:
            driver.admit(running)
        driver.step(requests)
        assert len(target.core.sessions) == 3
        close(gateway)
        eventually_free(target)
        gateway.close()


def test_three_hundred_random_commands_leave_nothing_behind(local_target: Callable[..., LocalTarget]) -> None:
    address, target = local_target(num_blocks=10, num_seats=6)
    rng = random.Random(7)
    with Gateway(address) as gateway, ScriptedDrafter(address, "shm", ragged) as drafter:
        driver = Driver(gateway, drafter, chunk=9)
        placed: list[Running] = []
        refused = starved = 0
        for _ in range(300):
            action = rng.random()
            if action < 0.3:
                running = driver.request(prompt_of(rng.randrange(1, 60), seed=rng.randrange(3)), 40, draft_len=4)
                reply = gateway.admit(driver.admission(running))
                if reply.status == common_pb2.ADMIT_STATUS_OK:
                    running.context_len = rng.choice([reply.cached_len, reply.cached_len // 2, 0])
                    placed.append(running)
                else:
                    assert reply.status == common_pb2.ADMIT_STATUS_NO_SEAT
                    refused += 1
            elif action < 0.45 and placed:
                running = placed.pop(rng.randrange(len(placed)))
                gateway.release(running.request_id, running.epoch)
            elif action < 0.5 and placed:
                gateway.release(placed[0].request_id, placed[0].epoch + 1)
            elif placed:
                chosen = rng.sample(placed, rng.randrange(1, len(placed) + 1))
                result = driver.step(chosen)
                starved += sum(row.status == STARVED for row in result.rows)
                for running in [running for running in chosen if running.done]:
                    placed.remove(running)
                    gateway.release(running.request_id, running.epoch)
            target.core.sessions.check_integrity()
        assert refused
        assert starved
        for running in placed:
            gateway.release(running.request_id, running.epoch)
        assert all_free(gateway)
    eventually_free(target)
