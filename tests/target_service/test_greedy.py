"""Greedy output equals transformers' own, whatever is batched, chunked, cached or drafted."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from transformers import PreTrainedModel

from tests.target_service.conftest import LocalTarget
from tests.target_service.gateway_client import Driver, Gateway, Running
from tests.target_service.scripted_drafter import Script, ScriptedDrafter
from tests.tiny_models import greedy_reference

PROMPT_LENS = (1, 2, 15, 16, 17, 31, 32, 33, 40, 5, 3, 48, 7, 20, 11, 64)


def prompt_of(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(f"{seed}-{length}")
    return [rng.randrange(3, 512) for _ in range(length)]


def all_free(gateway: Gateway) -> bool:
    capacity = gateway.release("nobody").capacity
    return capacity.free_seats == gateway.info.num_seats and capacity.free_blocks == gateway.info.num_blocks


def wrong_from(offset: int) -> Script:
    """The known drafts, but for the one at `offset`."""

    def script(row: int, position: int, drafts: list[int]) -> list[int]:
        return [(token + 1) % 512 if index == offset else token for index, token in enumerate(drafts)]

    return script


def ragged(row: int, position: int, drafts: list[int]) -> list[int]:
    """Of each row another number of drafts, sometimes none, every third wrong somewhere."""
    kept = drafts[: (row + position) % 8]
    if kept and (row + position) % 3 == 0:
        kept[-1] = (kept[-1] + 7) % 512
    return kept


@pytest.mark.parametrize("chunk", [512, 16, 7])
@pytest.mark.parametrize("num_rows", [1, 16])
def test_without_drafts(target_address: str, reference: PreTrainedModel, chunk: int, num_rows: int) -> None:
    with Gateway(target_address) as gateway:
        driver = Driver(gateway, chunk=chunk)
        requests = [driver.request(prompt_of(n, seed=chunk), 12) for n in PROMPT_LENS[-num_rows:]]
        driver.run(requests)
        for running in requests:
            assert running.generated == greedy_reference(reference, running.prompt, 12), len(running.prompt)
        assert all_free(gateway)


def test_prefix_hits_change_nothing(target_address: str, reference: PreTrainedModel) -> None:
    prompt = prompt_of(50, seed=99)
    with Gateway(target_address) as gateway:
        driver = Driver(gateway)
        first, again, longer = (
            driver.request(prompt, 8),
            driver.request(prompt, 8),
            driver.request(prompt + prompt_of(9), 8),
        )
        driver.run([first])
        driver.run([again])
        driver.run([longer])
        assert (first.cached_len, again.cached_len, longer.cached_len) == (0, 48, 48)
        for running in (first, again, longer):
            assert running.generated == greedy_reference(reference, running.prompt, 8)
        # Generated tokens are shared as well: the whole of the first request is a prefix of this one.
        more = driver.request(prompt + first.generated + [5, 6, 7, 8, 9, 10, 11, 12], 8)
        driver.run([more])
        assert more.cached_len == 48
        assert more.generated == greedy_reference(reference, more.prompt, 8)


@pytest.mark.parametrize("start_at", [0, 16, 20, 31, 47])
def test_starts_below_the_prefix_hit(target_address: str, reference: PreTrainedModel, start_at: int) -> None:
    """The drafter may have a shorter hit: the first row says where to begin, at any token."""
    prompt = prompt_of(50, seed=98)
    with Gateway(target_address) as gateway:
        driver = Driver(gateway, chunk=13)
        driver.run([driver.request(prompt, 2)])
        running = driver.request(prompt, 8)
        driver.admit(running, start_at=start_at)
        assert running.cached_len == 48
        while not running.done:
            driver.step([running])
        gateway.release(running.request_id)
        assert running.generated == greedy_reference(reference, prompt, 8)
        assert all_free(gateway)


@pytest.mark.parametrize("kind", ["shm", "bytes"])
@pytest.mark.parametrize("draft_len", range(8))
def test_with_right_drafts(target_address: str, reference: PreTrainedModel, kind: str, draft_len: int) -> None:
    with Gateway(target_address) as gateway, ScriptedDrafter(target_address, kind) as drafter:
        driver = Driver(gateway, drafter, chunk=16)
        running = _known(driver, reference, prompt_of(21), 25, draft_len)
        driver.run([running])
        assert running.generated == running.full[21:]
        # All drafts are right, so every step after the first token commits draft_len + 1 tokens.
        assert running.from_draft == running.drafted > 0 or draft_len == 0
        assert driver.seq <= 2 + -(-24 // (draft_len + 1))
        assert all_free(gateway)


@pytest.mark.parametrize("kind", ["shm", "bytes"])
@pytest.mark.parametrize("offset", [0, 2, 4])
def test_with_wrong_drafts(target_address: str, reference: PreTrainedModel, kind: str, offset: int) -> None:
    with (
        Gateway(target_address) as gateway,
        ScriptedDrafter(target_address, kind, wrong_from(offset)) as drafter,
    ):
        driver = Driver(gateway, drafter)
        running = _known(driver, reference, prompt_of(30), 30, 5)
        driver.run([running])
        assert running.generated == running.full[30:]
        assert running.from_draft < running.drafted
        assert all_free(gateway)


@pytest.mark.parametrize("trim", [True, False])
def test_sixteen_rows_of_ragged_drafts(
    local_target: Callable[..., LocalTarget], reference: PreTrainedModel, trim: bool
) -> None:
    address, target = local_target(num_blocks=128, trim_absent_drafts=trim)
    with Gateway(address) as gateway, ScriptedDrafter(address, "shm", ragged) as drafter:
        driver = Driver(gateway, drafter, chunk=16)
        requests = [_known(driver, reference, prompt_of(n), 20 + n % 5, n % 8) for n in PROMPT_LENS]
        driver.run(requests)
        for running in requests:
            assert running.generated == running.full[len(running.prompt) :]
        assert 0 < sum(running.from_draft for running in requests) < sum(running.drafted for running in requests)
        assert all_free(gateway)
    target.core.sessions.check_integrity()


def test_requests_come_and_go_with_drafts_on_and_off(target_address: str, reference: PreTrainedModel) -> None:
    """Steps with drafts, without, with again; rows join and leave; a request is placed anew in the middle."""
    rng = random.Random(5)
    with Gateway(target_address) as gateway, ScriptedDrafter(target_address, "shm", ragged) as drafter:
        driver = Driver(gateway, drafter, chunk=9)
        waiting = [_known(driver, reference, prompt_of(n, seed=4), 16, 5) for n in PROMPT_LENS]
        active: list[Running] = []
        finished: list[Running] = []
        while waiting or active:
            while waiting and len(active) < 5:
                driver.admit(waiting[0])
                active.append(waiting.pop(0))
            for running in active:
                running.draft_len = rng.choice([0, 0, 3, 5, 7])
            driver.step(active)
            if rng.random() < 0.2:  # preempted: released, and placed again with what it has
                running = rng.choice(active)
                gateway.release(running.request_id, running.epoch)
                running.epoch += 1
                if not running.done:
                    driver.admit(running)
            for running in [running for running in active if running.done]:
                gateway.release(running.request_id, running.epoch)
                active.remove(running)
                finished.append(running)
        for running in finished:
            assert running.generated[:16] == running.full[len(running.prompt) :]
        assert all_free(gateway)


def _known(driver: Driver, reference: PreTrainedModel, prompt: list[int], max_tokens: int, draft_len: int) -> Running:
    full = prompt + greedy_reference(reference, prompt, max_tokens)
    return driver.request(prompt, max_tokens, full=full, draft_len=draft_len)
