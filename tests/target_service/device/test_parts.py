"""The parts of device execution, each alone: block tables, plans, sampling, synthetic acceptance, the inbox."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch

from engine.block_pool import BlockPool
from engine.request_blocks import RequestBlocks
from kernels.kernel_set import kernels_for
from kernels.reference.philox import uniform
from kernels.reference.sampling import SamplingTensors
from kernels.reference.verify import Verdict
from target_service.acceptance import SyntheticAcceptance, chance_for
from target_service.config import parse_acceptance
from target_service.device.plan_buffer import FIELDS, PlanBuffer
from target_service.device.sampling import DeviceSampling, SampledRows
from target_service.device.tables import DeviceTables
from target_service.inbox import Inbox
from target_service.messages import SamplingSettings
from target_service.verification import SeatSampling, VerifyRows
from tests.target_service.device.test_equality import SETTINGS

CPU = torch.device("cpu")


@pytest.mark.parametrize("seed", range(5))
def test_the_device_knows_the_blocks_of_the_seats_that_run(seed: int) -> None:
    chance = random.Random(seed)
    blocks = RequestBlocks(BlockPool(20, 4), 5, 40)
    tables = DeviceTables(blocks, 13, CPU)
    for _ in range(300):
        seat = chance.randrange(5)
        kind = chance.randrange(4)
        if kind == 0:
            blocks.release(seat)
        elif kind == 1:
            blocks.trim(seat, chance.randrange(40))
        else:
            blocks.reserve(seat, chance.randrange(1, 41))
        if chance.random() < 0.5:
            running = chance.sample(range(5), chance.randint(1, 5))
            if chance.random() < 0.1:
                tables.changes(running)  # never sent: the launch went wrong
                tables.forget(running)
            changes = tables.changes(running)
            if changes is not None:
                tables.apply((torch.from_numpy(changes[0]), torch.from_numpy(changes[1])))
            for seat in running:
                row = tables.table[seat].tolist()
                assert row == [*blocks.blocks(seat), *[0] * (13 - len(blocks.blocks(seat)))]
            assert tables.changes(running) is None


def test_plans() -> None:
    plans = PlanBuffer(3, 40, 2, CPU)
    assert len(plans.host) == 2
    plan = plans.host[0]
    for name, (_, padding) in FIELDS.items():
        assert plan.rows[name].tolist() == [padding] * 4
    plan.rows["seats"][:2] = [4, 5]
    plan.rows["top_p"][1] = 0.5
    small, big = np.arange(3, dtype=np.int64), np.arange(100, dtype=np.int32)
    there, by_itself = plans.added(plan, small), plans.added(plan, big)
    assert there.tolist() == [0, 0, 0], "it comes with the plan"
    plans.upload(plan)
    assert there.tolist() == [0, 1, 2]
    assert by_itself.tolist() == list(range(100))
    assert plans.rows["seats"].tolist() == [4, 5, -1, -1]
    assert plans.rows["top_p"].tolist() == [1, 0.5, 1, 1]
    plans.upload(plans.host[1])
    assert plans.rows["seats"].tolist() == [-1] * 4
    plan.clear()
    assert plan.rows["seats"].tolist() == [-1] * 4
    assert plans.added(plan, small).data_ptr() == there.data_ptr()


@pytest.mark.parametrize("with_probs", [False, True])
@pytest.mark.parametrize("seed", range(4))
def test_sampling_gives_what_host_execution_gives(seed: int, with_probs: bool) -> None:
    """The same logits, drafts and probabilities, rows of every kind; here with rows that do not run between them."""
    noise = torch.Generator().manual_seed(seed)
    num, width, vocab = 12, 3, 512
    host = SeatSampling(num, vocab, CPU)
    device = DeviceSampling(num, vocab, CPU, kernels_for(CPU), None)
    chance = random.Random(seed)
    settings = [
        SamplingSettings(**{**SETTINGS[seat % len(SETTINGS)], "seed": seat, "seeded": chance.random() < 0.5})
        for seat in range(num)
    ]
    for seat in range(num):
        tokens = [chance.randrange(vocab) for _ in range(20)]
        host.place(seat, settings[seat], tokens, 11)
        device.place(seat, settings[seat], tokens, 11)
    order = chance.sample(range(num), num)
    runs = [chance.random() < 0.8 for _ in range(num)]
    runs[0] = True
    lens = [chance.randint(1, width + 1) if running else 0 for running in runs]
    starts = torch.tensor([0, *np.cumsum(lens)], dtype=torch.int32)
    logits = torch.randn((int(starts[-1]), vocab), generator=noise) * 3
    drafts = torch.full((num, width), -1, dtype=torch.int64)
    for row in range(num):
        for column in range(lens[row] - 1):
            likely = logits[int(starts[row]) + column].argmax()
            drafts[row, column] = likely if chance.random() < 0.7 else chance.randrange(vocab)
    positions = torch.arange(num) * 7 + 3
    probs = torch.softmax(torch.randn((num, width, vocab), generator=noise) * 3, dim=-1) if with_probs else None
    has_probs = torch.rand(num, generator=noise) < 0.7 if with_probs else None
    where = [row for row in range(num) if runs[row]]
    expected = host.verdict(
        logits,
        VerifyRows(
            torch.tensor([order[row] for row in where]),
            tuple(order[row] for row in where),
            torch.tensor([0, *np.cumsum([lens[row] for row in where])], dtype=torch.int32),
            drafts[where],
            positions[where],
            probs[where] if probs is not None else None,
            has_probs[where] if has_probs is not None else None,
        ),
    )
    seats_np = np.array([order[row] if runs[row] else -1 for row in range(num)], dtype=np.int32)
    needs = device.needs(order[row] for row in where)
    plans = PlanBuffer(num, 8, 1, CPU)
    device.fill(plans.host[0], seats_np, needs)
    plans.upload(plans.host[0])
    got = device.verdict(
        logits,
        SampledRows(
            torch.from_numpy(seats_np),
            starts,
            torch.repeat_interleave(torch.arange(num), torch.tensor(lens)),
            drafts,
            positions,
            SamplingTensors(**{name: plans.rows[name][:num] for name in SamplingTensors.__dataclass_fields__}),
            probs,
            has_probs,
        ),
        needs,
    )
    assert got.tokens[where].tolist() == expected.tokens.tolist()
    assert got.num_sampled[where].tolist() == expected.num_sampled.tolist()
    assert int(got.num_sampled.sum()) == int(expected.num_sampled.sum())
    assert int(expected.num_accepted.sum()) > 3
    # Both count the same output for the penalties of the next step.
    for index, row in enumerate(where):
        host.count_output(order[row], expected.tokens[index, : int(expected.num_sampled[index])].tolist())
    device.count_output(torch.from_numpy(seats_np), got.tokens, torch.where(torch.tensor(runs), got.num_sampled, 0))
    assert host._output_counts is not None
    assert device._output_counts is not None
    penalised = [order[row] for row in where if settings[order[row]].has_penalties]
    assert torch.equal(device._output_counts[penalised], host._output_counts[penalised])


@pytest.mark.parametrize(
    "text", ["", "exactly", "synthetic", "synthetic:", "synthetic:much", "synthetic:0.9", "synthetic:nan"]
)
def test_acceptance_that_is_none(text: str) -> None:
    with pytest.raises(ValueError):
        parse_acceptance(text)


def test_acceptance_is_read() -> None:
    assert parse_acceptance("exact") is None
    assert parse_acceptance("synthetic:2.5") == 2.5
    for mean in (0.5, 9.0):
        with pytest.raises(ValueError, match="not possible"):
            SyntheticAcceptance.of_mean(mean, 7, CPU, uniform)


@pytest.mark.parametrize(("mean", "num_drafts"), [(1.0, 3), (1.7, 1), (2.5, 3), (3.9, 3), (4.0, 3), (4.2, 7), (9.0, 3)])
def test_synthetic_acceptance_has_its_mean(mean: float, num_drafts: int) -> None:
    rows = 4000
    acceptance = SyntheticAcceptance.of_mean(mean, 8, CPU, uniform)
    drafts = torch.randint(0, 50, (rows, num_drafts), generator=torch.Generator().manual_seed(1))
    own = torch.arange(rows * (num_drafts + 1)).view(rows, -1) + 1000
    verdict = Verdict(
        torch.where(torch.arange(num_drafts + 1) < 1, own, -1),
        torch.ones(rows, dtype=torch.int32),
        torch.zeros(rows, dtype=torch.int32),
    )
    seeds, positions = torch.arange(rows) * 7, torch.arange(rows) % 91
    got = acceptance.apply(verdict, drafts, seeds, positions)
    possible = min(mean, num_drafts + 1)
    assert got.num_sampled.double().mean().item() == pytest.approx(possible, abs=0.08)
    for row in range(0, rows, 97):
        accepted = int(got.num_accepted[row])
        tokens = got.tokens[row].tolist()
        assert tokens == [
            *drafts[row, :accepted].tolist(),
            1000 + row * (num_drafts + 1),
            *[-1] * (num_drafts - accepted),
        ]
    again = acceptance.apply(verdict, drafts, seeds, positions)
    assert torch.equal(again.tokens, got.tokens)
    assert chance_for(mean, num_drafts) <= 1


def test_only_drafts_that_are_there_are_accepted() -> None:
    acceptance = SyntheticAcceptance.of_mean(9, 8, CPU, uniform)
    drafts = torch.tensor([[4, -1, 6], [-1, 5, 6], [7, 8, 9], [1, 2, 3]])
    tokens = torch.tensor([[90, -1, -1, -1], [91, -1, -1, -1], [7, 8, 92, -1], [-1, -1, -1, -1]])
    verdict = Verdict(tokens, torch.tensor([1, 1, 3, 0]), torch.tensor([0, 0, 2, 0]))
    got = acceptance.apply(verdict, drafts, torch.arange(4), torch.arange(4))
    assert got.tokens.tolist() == [[4, 90, -1, -1], [91, -1, -1, -1], [7, 8, 9, 92], [-1] * 4]
    assert got.num_sampled.tolist() == [2, 1, 4, 0]
    assert got.num_accepted.tolist() == [1, 0, 3, 0]


def test_the_inbox_has_a_bound_and_news_go_first() -> None:
    inbox: Inbox[int, str] = Inbox(2)
    assert inbox.take(0) == (None, None)
    assert inbox.put(1, 0)
    assert inbox.put(2, 0)
    assert not inbox.put(3, 0.01)
    inbox.tell("done")
    assert inbox.take(0) == (None, "done")
    waiting = threading.Thread(target=lambda: inbox.put(3, 10))
    waiting.start()
    assert [inbox.take(1)[0] for _ in range(3)] == [1, 2, 3]
    waiting.join(10)
    assert not waiting.is_alive()
