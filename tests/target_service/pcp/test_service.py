"""Targets of two and four ranks against one of a single rank: same commands, same events, same ring entries.

The same scenario runs on each target: prompts in chunks of odd lengths, prefix hits, many rows, drafts right and wrong,
greedy, seeded and penalised requests with log probabilities, both channel kinds.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
import torch

from protos import target_pb2
from tests.processes import ProcessGroup
from tests.target_service.conftest import start_target, write_config
from tests.target_service.gateway_client import Driver, Gateway, Running
from tests.target_service.scripted_drafter import ScriptedDrafter
from tests.target_service.test_greedy import all_free, prompt_of, ragged

SIZES = (1, 2, 4)
LAYERS = (2, 0)
EXACT = (
    "positions",
    "input_ids",
    "query_start_loc",
    "seq_lens",
    "seats",
    "num_sampled",
    "num_rejected",
    "anchors",
    "next_prompt_tokens",
    "temperatures",
    "seeds",
    "slot_mapping",
    "block_tables",
)


@pytest.fixture(scope="module")
def targets(tmp_path_factory: pytest.TempPathFactory, tiny_dir: Path) -> Iterator[dict[int, str]]:
    """Addresses by number of ranks: 160 blocks of 16, 40 seats, integrity always checked."""
    directory = tmp_path_factory.mktemp("pcp")
    group = ProcessGroup(directory)
    try:
        yield {
            size: start_target(
                group,
                write_config(directory / f"{size}.yaml", tiny_dir, pcp_size=size, num_seats=40, num_blocks=160),
            )[0]
            for size in SIZES
        }
    finally:
        group.close()


def requests_of(driver: Driver, num: int, seed: int, draft_len: int) -> list[Running]:
    """Requests of all sorts; ids that are the same on every target, as their seeds are."""
    source = random.Random(seed)
    shared = prompt_of(40, seed)
    found = []
    for index in range(num):
        own = prompt_of(source.randrange(1, 60), seed * 100 + index)
        sampling: dict[str, Any] = {"num_logprobs": 2}
        if index % 3 == 1:
            sampling |= {"temperature": 0.9, "seed": 1000 + index, "seeded": True, "top_k": 40}
        if index % 3 == 2:
            sampling |= {"repetition_penalty": 1.3, "presence_penalty": 0.5, "logit_bias": {7: 2.0}}
        prompt = shared + own if index % 4 == 3 else own
        # What its drafts are taken from; they are right where the model happens to say the same.
        full = prompt + [source.randrange(3, 512) for _ in range(60)]
        found.append(driver.request(prompt, source.randrange(1, 14), full=full, sampling=sampling, draft_len=draft_len))
    return found


def run_scenario(
    address: str, num: int, chunk: int, kind: str | None, known: list[list[int]] | None
) -> tuple[list[Running], list[Any], list[dict[str, Any]]]:
    """known: what each request generates, so that some drafts are right. Returns requests, results, ring entries."""
    drafter = None if kind is None else ScriptedDrafter(address, kind, ragged, hidden_layers=LAYERS)
    results = []
    with Gateway(address) as gateway:
        driver = Driver(gateway, drafter, chunk)
        requests = requests_of(driver, num, seed=num, draft_len=5)
        for running, tokens in zip(requests, known or [[]] * num, strict=True):
            running.full = (running.prompt + tokens + running.full)[: len(running.prompt) + 60]
        waiting = list(requests)
        active: list[Running] = []
        while waiting or active:  # they join two at a time, so that steps hold chunks and decode rows
            for running in waiting[:2]:
                driver.admit(running)
            active += waiting[:2]
            del waiting[:2]
            results.append(driver.step(active))
            for running in [running for running in active if running.done]:
                gateway.release(running.request_id)
                active.remove(running)
        assert all_free(gateway)
    if drafter is not None:
        with drafter:
            pass
    return requests, results, [] if drafter is None else drafter.entries


def test_same_events_without_a_drafter(targets: dict[int, str]) -> None:
    for num, chunk in ((1, 3), (5, 7), (33, 19)):
        compare({size: run_scenario(address, num, chunk, None, None) for size, address in targets.items()})


@pytest.mark.parametrize("kind", ["shm", "bytes"])
def test_same_events_and_entries_with_a_drafter(targets: dict[int, str], kind: str) -> None:
    for num, chunk in ((2, 5), (9, 13), (33, 11)):
        # On all of them: blocks and prefix hits depend on what a target has run before.
        plain, *_ = [run_scenario(address, num, chunk, None, None)[0] for address in targets.values()]
        known = [running.generated for running in plain]
        found = {size: run_scenario(address, num, chunk, kind, known) for size, address in targets.items()}
        assert any(running.from_draft for running in found[1][0])
        assert any(int(entry["num_rejected"].sum()) for entry in found[1][2])
        for running, again in zip(plain, found[1][0], strict=True):
            assert running.generated == again.generated
        compare(found)


def compare(found: dict[int, tuple[list[Running], list[Any], list[dict[str, Any]]]]) -> None:
    requests, results, entries = found.pop(1)
    for size, (other_requests, other_results, other_entries) in found.items():
        for one, other in zip(requests, other_requests, strict=True):
            assert one.generated == other.generated, size
            assert one.cached_len == other.cached_len
            for expected, value in zip(one.logprobs, other.logprobs, strict=True):
                assert value.logprob == pytest.approx(expected.logprob, abs=1e-4)
                assert value.top_ids == expected.top_ids
                assert value.top_logprobs == pytest.approx(expected.top_logprobs, abs=1e-4)
        assert len(results) == len(other_results)
        for one_result, other_result in zip(results, other_results, strict=True):
            for row, other_row in zip(one_result.rows, other_result.rows, strict=True):
                for name in ("status", "token_ids", "num_accepted", "num_drafted", "context_len"):
                    assert getattr(row, name) == getattr(other_row, name), (size, name)
        assert len(entries) == len(other_entries)
        for entry, other_entry in zip(entries, other_entries, strict=True):
            for name in EXACT:
                assert torch.equal(entry[name], other_entry[name]), (size, name)
            torch.testing.assert_close(other_entry["hidden"], entry["hidden"], rtol=2e-5, atol=2e-5)


def test_a_target_that_starves_answers_alike(tmp_path: Path, tiny_dir: Path, processes: ProcessGroup) -> None:
    """More rows than blocks: who starves, and what the others say, is the same on two ranks."""
    found = []
    for size in (1, 2):
        config = write_config(tmp_path / f"{size}.yaml", tiny_dir, pcp_size=size, num_blocks=6, num_seats=8)
        with Gateway(start_target(processes, config)[0]) as gateway:
            driver = Driver(gateway)
            requests = [driver.request(prompt_of(20 + index, index), 30) for index in range(4)]
            for running in requests:
                driver.admit(running)
            statuses = []
            for _ in range(25):
                result = driver.step(requests)
                statuses.append([row.status for row in result.rows])
            found.append((statuses, [running.generated for running in requests]))
    assert found[0] == found[1]
    assert any(target_pb2.ROW_STATUS_STARVED in row for row in found[0][0])


def test_reuse_is_refused_with_the_reason(targets: dict[int, str]) -> None:
    with pytest.raises(grpc.RpcError) as error:
        ScriptedDrafter(targets[2], metadata_source="reuse")
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.value.details() == "metadata_source: reuse needs a target of one rank, this one has 2; use build"
