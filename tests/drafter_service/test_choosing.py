"""Are drafts drawn from the distribution that is published with them, and never with verification's noise?"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from drafter_service.choosing import DraftChooser
from drafter_service.draft_model import DraftModelSpeculator
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.messages import Admission
from drafter_service.residency import Resident, Residents
from drafter_service.speculator import DraftRow
from engine.channel.interface import RingEntry
from engine.decoder import Decoder
from kernels.reference.philox import DRAFT, TARGET
from kernels.reference.sampling import gumbel_sample
from tests.drafter_service.conftest import LAYERS, SETTINGS
from tests.drafter_service.harness import Harness, prompt_of


def residents_of(seeded: list[bool]) -> list[Resident]:
    residents = Residents(len(seeded))
    made = []
    for index, is_seeded in enumerate(seeded):
        admission = Admission(f"r{index}", 1, (1, 2), 2, 99, "c", seeded=is_seeded)
        resident = residents.add(admission, 1)
        assert resident is not None
        made.append(resident)
    return made


def make_entry(temperatures: list[float], seeds: list[int]) -> RingEntry:
    rows = len(temperatures)
    zeros = torch.zeros(rows, dtype=torch.int64)
    return RingEntry(
        1, rows, 0, None, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros,
        torch.tensor(temperatures), torch.tensor(seeds), zeros, zeros,
    )  # fmt: skip


def rows_of(residents: list[Resident], context_len: int = 10) -> list[DraftRow]:
    return [DraftRow(index, resident, 0, 1, context_len, 0, 5, -1, 3) for index, resident in enumerate(residents)]


def test_greedy_unless_asked() -> None:
    residents = residents_of([False, False])
    logits = torch.randn(2, 8, generator=torch.Generator().manual_seed(0))
    chooser = DraftChooser(rows_of(residents), [1, 1], make_entry([1.0, 0.0], [3, 4]), 8, None, probabilistic=False)
    assert chooser.choose(logits, 0).tolist() == logits.argmax(-1).tolist()
    assert chooser.probs is None
    assert chooser.has_probs is None


def test_only_unseeded_rows_with_a_temperature_are_drawn() -> None:
    residents = residents_of([False, True, False])
    entry = make_entry([0.7, 0.7, 0.0], [3, 4, 5])
    logits = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    chooser = DraftChooser(rows_of(residents), [2, 2, 2], entry, 8, None, probabilistic=True)
    tokens = chooser.choose(logits, 1)
    assert chooser.has_probs is not None
    assert chooser.probs is not None
    assert chooser.has_probs.tolist() == [True, False, False]
    assert tokens[1:].tolist() == logits[1:].argmax(-1).tolist()
    # The noise of row 0 is that of (its seed, the draft's absolute position, DRAFT): position 11 is the anchor's.
    expected = gumbel_sample(logits[:1], torch.tensor([0.7]), torch.tensor([3]), torch.tensor([13]), DRAFT)
    assert tokens[0] == expected[0]
    torch.testing.assert_close(chooser.probs[0, 1], torch.softmax(logits[0] / 0.7, -1))
    assert not bool(chooser.probs[0, 0].any())


def test_reduced_vocabulary_is_mapped_in_tokens_and_probs() -> None:
    target_ids = torch.tensor([1, 4, 9])
    entry = make_entry([1.0], [3])
    logits = torch.tensor([[0.1, 2.0, 0.3]])
    chooser = DraftChooser(rows_of(residents_of([False])), [1], entry, 12, target_ids, probabilistic=True)
    token = int(chooser.choose(logits, 0)[0])
    assert token in (1, 4, 9)
    assert chooser.probs is not None
    torch.testing.assert_close(chooser.probs[0, 0, target_ids], torch.softmax(logits[0], -1))
    torch.testing.assert_close(chooser.probs.sum(), torch.tensor(1.0))


def test_drawn_tokens_follow_the_published_distribution_and_not_the_verifier_s_noise() -> None:
    count = 20_000
    residents = residents_of([False]) * count
    rows = [replace(row, index=index) for index, row in enumerate(rows_of(residents))]
    entry = make_entry([1.0] * count, list(range(count)))
    logits = torch.tensor([0.3, -0.5, 1.0, 0.0]).expand(count, 4)
    chooser = DraftChooser(rows, [1] * count, entry, 4, None, probabilistic=True)
    tokens = chooser.choose(logits, 0)
    shares = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(shares, torch.softmax(logits[0], -1), atol=0.012, rtol=0)
    verifier = gumbel_sample(logits, torch.ones(count), torch.arange(count), torch.full((count,), 12), TARGET)
    # Independent draws agree as often as chance has it.
    by_chance = float((torch.softmax(logits[0], -1) ** 2).sum())
    assert abs(float((tokens == verifier).float().mean()) - by_chance) < 0.015


def test_probabilities_reach_the_target(make_harness: Callable[..., Harness], head: Eagle3Head) -> None:
    speculator = Eagle3Speculator(head, LAYERS, replace(SETTINGS, draft_sampling="probabilistic"))
    harness = make_harness(speculator, draft_probs=True)
    hot = harness.add("hot", prompt_of(6, 1), temperature=0.8)
    harness.add("cold", prompt_of(7, 2))
    harness.add("seeded", prompt_of(8, 3), temperature=0.8, seeded=True)
    harness.step(3)
    reply = harness.target.channel.take_reply(harness.target.seq, 1.0)
    assert reply is not None
    assert reply.has_probs is not None
    assert reply.probs is not None
    assert reply.has_probs.tolist() == [True, False, False]
    torch.testing.assert_close(reply.probs[0, :3].sum(-1), torch.ones(3))
    for step, token in enumerate(hot.drafts):
        assert float(reply.probs[0, step, token]) > 0
    outside = ~head.t2d
    assert not bool(reply.probs[0, :3][:, outside].any())


def test_a_channel_without_probabilities_gets_greedy_drafts(
    make_harness: Callable[..., Harness], decoder: Decoder
) -> None:
    speculator = DraftModelSpeculator(decoder, replace(SETTINGS, draft_sampling="probabilistic"))
    harness = make_harness(speculator, draft_probs=False)
    request = harness.add("hot", prompt_of(6, 1), temperature=0.8)
    harness.run(4, 3)
    assert request.num_drafted == request.num_accepted > 0
