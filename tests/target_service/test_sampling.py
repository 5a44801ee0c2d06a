"""Sampling: seeded output does not depend on drafts or company, logprobs are transformers', distributions are right."""

from __future__ import annotations

import random
from collections import Counter
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from engine.channel import RingEntry
from kernels.reference.philox import DRAFT, TARGET
from kernels.reference.sampling import gumbel_sample
from target_service.messages import SamplingSettings
from target_service.verification import SeatSampling, VerifyRows, token_logprobs
from tests.target_service.gateway_client import Driver, Gateway, Running
from tests.target_service.scripted_drafter import ScriptedDrafter
from tests.target_service.test_greedy import prompt_of, ragged

FOUR = {50: 40.0, 51: 40.0, 52: 40.0, 53: 40.0}  # only these can come, so that they repeat

SEEDED: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.8},
    "hot": {"temperature": 3.0},
    "top_k": {"temperature": 2.0, "top_k": 20},
    "top_p": {"temperature": 1.5, "top_p": 0.8},
    "min_p": {"temperature": 2.0, "min_p": 0.05},
    "four": {"temperature": 5.0, "logit_bias": FOUR},
    "repetition": {"temperature": 5.0, "logit_bias": FOUR, "repetition_penalty": 20.0},
    "presence": {"temperature": 5.0, "logit_bias": FOUR, "presence_penalty": 9.0},
    "frequency": {"temperature": 5.0, "logit_bias": FOUR, "frequency_penalty": 4.0},
    "bias": {"temperature": 1.0, "logit_bias": {7: 12.0, 8: 11.0, 9: -100.0}},
    "greedy penalties": {"repetition_penalty": 1.5, "frequency_penalty": 0.5, "presence_penalty": 0.5},
    "greedy bias": {"logit_bias": {30: 6.0, 31: 6.0, 40: -8.0}},
    "all": {
        "temperature": 1.3,
        "top_k": 50,
        "top_p": 0.9,
        "min_p": 0.01,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.2,
        "logit_bias": {11: 3.0, 12: -5.0},
    },
}


def test_seeded_output_is_the_same_alone_in_a_crowd_and_with_drafts(target_address: str) -> None:
    names = list(SEEDED)
    with Gateway(target_address) as gateway:

        def requests(driver: Driver, **fields: Any) -> list[Running]:
            return [
                driver.request(
                    prompt_of(10 + index, seed=1),
                    14,
                    sampling={**SEEDED[name], "seed": (1 << 64) - 1 - index, "seeded": True},
                    **fields,
                )
                for index, name in enumerate(names)
            ]

        driver = Driver(gateway)
        alone = requests(driver)
        for running in alone:
            driver.run([running])
        crowd = requests(driver)
        driver.run(crowd)
        for name, one, many in zip(names, alone, crowd, strict=True):
            assert one.generated == many.generated, name
        # Drafts taken from the known output: mostly right, so that the accepting path is what runs.
        with ScriptedDrafter(target_address, "shm", ragged) as drafter:
            drafted_driver = Driver(gateway, drafter)
            drafted_driver.seq = driver.seq
            drafted = requests(drafted_driver, draft_len=6)
            for running, one in zip(drafted, alone, strict=True):
                running.full = one.prompt + one.generated
            drafted_driver.run(drafted)
        for name, one, with_drafts in zip(names, alone, drafted, strict=True):
            assert with_drafts.generated == one.generated, name
            assert with_drafts.from_draft > 0, name


def test_each_setting_changes_the_output(target_address: str) -> None:
    """A setting that is lost on the way would make two of these equal."""
    with Gateway(target_address) as gateway:
        driver = Driver(gateway)
        outputs: dict[tuple[int, ...], str] = {}
        for name, sampling in {**SEEDED, "plain": {"temperature": 1.0}, "greedy": {}}.items():
            running = driver.request(prompt_of(12), 14, sampling={"seed": 3, "seeded": True, **sampling})
            driver.run([running])
            assert tuple(running.generated) not in outputs, (name, outputs[tuple(running.generated)])
            outputs[tuple(running.generated)] = name
        other_seed = driver.request(prompt_of(12), 14, sampling={"seed": 4, "seeded": True, "temperature": 1.0})
        driver.run([other_seed])
        assert tuple(other_seed.generated) not in outputs


def test_seeded_output_survives_a_new_placement(target_address: str) -> None:
    sampling = {**SEEDED["all"], "seed": 11, "seeded": True}
    with Gateway(target_address) as gateway:
        driver = Driver(gateway)
        whole = driver.request(prompt_of(18), 12, sampling=sampling)
        driver.run([whole])
        moved = driver.request(prompt_of(18), 12, sampling=sampling)
        driver.admit(moved)
        while len(moved.generated) < 5:
            driver.step([moved])
        gateway.release(moved.request_id, moved.epoch)
        moved.epoch += 1
        driver.admit(moved)
        while not moved.done:
            driver.step([moved])
        gateway.release(moved.request_id, moved.epoch)
        assert moved.generated == whole.generated


@pytest.mark.parametrize("draft_len", [0, 5])
def test_logprobs_are_those_of_the_unprocessed_logits(
    target_address: str, reference: PreTrainedModel, draft_len: int
) -> None:
    sampling = {**SEEDED["all"], "seed": 5, "seeded": True, "num_logprobs": 3}
    with Gateway(target_address) as gateway:
        driver = Driver(gateway)
        running = driver.request(prompt_of(17), 15, sampling=sampling)
        silent = driver.request(prompt_of(19), 15, sampling={**sampling, "num_logprobs": -1})
        own_only = driver.request(prompt_of(17), 15, sampling={**sampling, "num_logprobs": 0})
        requests = [silent, running, own_only]
        driver.run(requests)
        if draft_len:
            known = [request.tokens for request in requests]
            with ScriptedDrafter(target_address, "shm", ragged) as drafter:
                drafted = Driver(gateway, drafter)
                drafted.seq = driver.seq
                silent, running, own_only = requests = [
                    drafted.request(request.prompt, 15, sampling=request.sampling, full=full, draft_len=draft_len)
                    for request, full in zip(requests, known, strict=True)
                ]
                drafted.run(requests)
            assert running.from_draft > 0
    with torch.inference_mode():
        logits = reference(torch.tensor([running.tokens])).logits[0, len(running.prompt) - 1 : -1]
    expected = torch.log_softmax(logits.float(), dim=-1)
    assert not silent.logprobs
    assert len(running.logprobs) == len(own_only.logprobs) == 15
    for position, (token, item, own) in enumerate(
        zip(running.generated, running.logprobs, own_only.logprobs, strict=True)
    ):
        assert item.logprob == pytest.approx(float(expected[position, token]), abs=1e-4)
        assert own.logprob == pytest.approx(item.logprob, abs=1e-4)
        assert not own.top_ids
        best = expected[position].topk(3)
        assert list(item.top_ids) == best.indices.tolist()
        assert list(item.top_logprobs) == pytest.approx(best.values.tolist(), abs=1e-4)


def test_sampled_output_with_draft_probabilities_follows_the_target(
    target_address: str, reference: PreTrainedModel
) -> None:
    """Two tokens each of 2,000 requests, the second one drafted from another distribution: their joint distribution."""
    prompt, temperature, top_k, num_trials, per_round = prompt_of(9, seed=8), 4.0, 4, 2000, 25
    expected = _two_token_distribution(reference, prompt, temperature, top_k)
    counts: Counter[tuple[int, int]] = Counter()
    accepted = 0
    rng = random.Random(1)

    with (
        Gateway(target_address) as gateway,
        ScriptedDrafter(target_address, "shm", draft_probs=True, hidden_layers=(0, 1)) as drafter,
    ):
        first_tokens = sorted({first for first, _ in expected})
        choices = {first: [second for one, second in expected if one == first] for first in first_tokens}

        def propose(entry: RingEntry) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
            """Drafts from 0.6, 0.2, 0.1, 0.1 on the four tokens that can come, whatever the target thinks of them."""
            probs = torch.zeros(entry.num_rows, 1, 512)
            tokens = torch.full((entry.num_rows, 1), -1, dtype=torch.int64)
            for row, anchor in enumerate(entry.anchors.tolist()):
                if anchor in choices:
                    probs[row, 0, torch.tensor(choices[anchor])] = torch.tensor([0.6, 0.2, 0.1, 0.1])
                    positions = (entry.seq_lens[row] - entry.num_rejected[row] + 1).to(torch.int64)[None]
                    tokens[row] = gumbel_sample(
                        probs[row].log(), torch.ones(1), entry.seeds[row : row + 1], positions, DRAFT
                    )
            return tokens, probs, torch.ones(entry.num_rows, dtype=torch.bool)

        drafter.propose = propose
        driver = Driver(gateway, drafter)
        for _ in range(num_trials // per_round):
            requests = [
                driver.request(
                    prompt,
                    2,
                    draft_len=1,
                    sampling={"temperature": temperature, "top_k": top_k, "seed": rng.getrandbits(63)},
                )
                for _ in range(per_round)
            ]
            for running in requests:  # room for the draft and the token after it
                running.max_tokens = 3
                driver.admit(running)
            driver.step(requests)
            result = driver.step(requests)
            accepted += sum(row.num_accepted for row in result.rows)
            for running in requests:
                counts[running.generated[0], running.generated[1]] += 1
                gateway.release(running.request_id)
    assert set(counts) <= set(expected)
    distance = sum(abs(counts[pair] / num_trials - probability) for pair, probability in expected.items()) / 2
    assert distance < 0.06, distance
    by_drafts = sum(
        sum(expected[first, second] for second in choices[first])
        * sum(
            min(weight, expected[first, second] / sum(expected[first, other] for other in choices[first]))
            for weight, second in zip([0.6, 0.2, 0.1, 0.1], choices[first], strict=True)
        )
        for first in first_tokens
    )
    assert abs(accepted / num_trials - by_drafts) < 0.05


def test_noise_is_keyed_by_the_absolute_position(target_address: str, reference: PreTrainedModel) -> None:
    """The token at position n is the Gumbel draw of (seed, n): so a request may move, and drafts may come or not."""
    seed, temperature = 123456789, 2.5
    with Gateway(target_address) as gateway:
        driver = Driver(gateway, chunk=8)
        running = driver.request(prompt_of(19), 10, sampling={"temperature": temperature, "seed": seed})
        driver.run([running])
    with torch.no_grad():
        logits = reference(torch.tensor([running.tokens])).logits[0, 18:-1].float()
    expected = gumbel_sample(
        logits, torch.full((10,), temperature), torch.full((10,), seed), torch.arange(19, 29), TARGET
    )
    assert running.generated == expected.tolist()


def test_seeded_rows_do_not_see_draft_probabilities(target_address: str) -> None:
    """Unseeded, a draft published with probabilities changes which token is drawn; seeded, it must not."""
    outputs: dict[bool, list[list[int]]] = {}

    def propose(entry: RingEntry) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
        probs = torch.zeros(entry.num_rows, 3, 512)
        probs[:, :, 20:24] = 0.25
        tokens = torch.full((entry.num_rows, 3), 20, dtype=torch.int64) + (entry.seeds[:, None] + torch.arange(3)) % 4
        return tokens, probs, torch.ones(entry.num_rows, dtype=torch.bool)

    with (
        Gateway(target_address) as gateway,
        ScriptedDrafter(target_address, "shm", draft_probs=True) as drafter,
    ):
        drafter.propose = propose
        driver = Driver(gateway)
        for seeded in (True, False):
            outputs[seeded] = []
            for draft_len in (0, 3):
                driver.drafter = drafter if draft_len else None
                sampling = {"temperature": 3.0, "logit_bias": {20: 30.0, 21: 30.0, 22: 30.0, 23: 30.0}, "seed": 77}
                running = driver.request(prompt_of(9), 16, draft_len=draft_len, sampling={**sampling, "seeded": seeded})
                driver.run([running])
                outputs[seeded].append(running.generated[:16])
                assert bool(running.from_draft) == bool(draft_len)
    assert outputs[True][0] == outputs[True][1]
    assert outputs[False][0] != outputs[False][1]


def test_the_accept_rule_through_seat_sampling() -> None:
    """The distribution check of 65,536 trials: total variation to the target, and the sum of minima accepted."""
    target = torch.tensor([0.30, 0.20, 0.15, 0.10, 0.10, 0.05, 0.05, 0.05])
    draft = torch.tensor([0.05, 0.05, 0.05, 0.10, 0.10, 0.15, 0.20, 0.30])
    num_trials = 65_536
    seats = SeatSampling(num_trials, 8, torch.device("cpu"))
    rng = random.Random(0)
    for seat in range(num_trials):
        seats.place(seat, SamplingSettings(temperature=1.0, seed=rng.getrandbits(63)), [1], 1)
    positions = torch.full((num_trials,), 4, dtype=torch.int64)
    drafts = gumbel_sample(
        draft.log().expand(num_trials, 8), torch.ones(num_trials), seats.tensors.seeds, positions, DRAFT
    )
    verdict = seats.verdict(
        target.log().repeat(2 * num_trials, 1),
        VerifyRows(
            seats=torch.arange(num_trials),
            seats_np=tuple(range(num_trials)),
            cu_logits=torch.arange(0, 2 * num_trials + 1, 2, dtype=torch.int32),
            draft_tokens=drafts[:, None],
            start_positions=positions,
            draft_probs=draft.expand(num_trials, 1, 8),
            has_probs=torch.ones(num_trials, dtype=torch.bool),
        ),
    )
    frequencies = torch.bincount(verdict.tokens[:, 0], minlength=8) / num_trials
    assert float((frequencies - target).abs().sum() / 2) < 0.008
    assert 0.47 < float(verdict.num_accepted.float().mean()) < 0.53


def test_penalties_count_the_drafts_before_a_row() -> None:
    """A draft that repeats a token is judged by logits in which its first copy counts already."""
    seats = SeatSampling(1, 4, torch.device("cpu"))
    seats.place(0, SamplingSettings(frequency_penalty=1.0), [0], 1)
    logits = torch.tensor([[0.0, 3.0, 2.5, 0.0]]).repeat(3, 1)
    rows = VerifyRows(
        seats=torch.tensor([0]),
        seats_np=(0,),
        cu_logits=torch.tensor([0, 3], dtype=torch.int32),
        draft_tokens=torch.tensor([[1, 1]]),
        start_positions=torch.tensor([1]),
    )
    # 1 wins (3.0); counted once it has 2.0 and token 2 wins, so the second draft is refused.
    assert seats.verdict(logits, rows).tokens.tolist() == [[1, 2, -1]]
    seats.count_output(0, [1, 2])
    # Now 1 and 2 have been output once each: 2.0 against 1.5.
    assert seats.verdict(logits, rows).tokens.tolist() == [[1, 2, -1]]
    # A new request on the seat starts from nothing; its earlier output (after prompt_len) counts.
    seats.place(0, SamplingSettings(frequency_penalty=1.0), [3, 1, 1], 1)
    assert seats.verdict(logits, rows).tokens.tolist() == [[2, -1, -1]]


def test_token_logprobs() -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0], [5.0, 0.0, 0.0]])
    expected = torch.log_softmax(logits, dim=-1)
    items = token_logprobs(logits, [1, 0], 2)
    assert items[0].top_ids == (2, 1)
    assert items[0].logprob == pytest.approx(float(expected[0, 1]))
    assert items[1].top_logprobs[0] == pytest.approx(float(expected[1, 0]))
    assert token_logprobs(logits, [1, 0], 0)[0].top_ids == ()


def _two_token_distribution(
    reference: PreTrainedModel, prompt: list[int], temperature: float, top_k: int
) -> dict[tuple[int, int], float]:
    """Probability of each pair of next tokens."""

    def distribution(tokens: list[int]) -> list[tuple[int, float]]:
        with torch.no_grad():
            best = (reference(torch.tensor([tokens])).logits[0, -1].float() / temperature).topk(top_k)
        return list(zip(best.indices.tolist(), torch.softmax(best.values, dim=0).tolist(), strict=True))

    return {
        (first, second): p_first * p_second
        for first, p_first in distribution(prompt)
        for second, p_second in distribution([*prompt, first])
    }
