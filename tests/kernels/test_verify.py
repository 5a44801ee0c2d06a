"""The accept rule: worked rows, the distribution it must leave untouched, and what a seeded row is promised."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels.reference import verify as rule
from kernels.reference.philox import DRAFT, TARGET
from kernels.reference.sampling import gumbel_sample
from kernels.reference.verify import Verdict, verify, verify_greedy

VOCAB = 8


def one_hot_logits(tokens: list[int]) -> torch.Tensor:
    """Logits whose argmax is `tokens`."""
    return torch.nn.functional.one_hot(torch.tensor(tokens), VOCAB).float() * 5


def greedy(logits: torch.Tensor, cu_logits: list[int], drafts: list[list[int]]) -> Verdict:
    """`verify` with temperature 0, shown equal to `verify_greedy`."""
    rows = len(drafts)
    nothing = torch.zeros(rows, dtype=torch.int64)
    starts = torch.tensor(cu_logits, dtype=torch.int32)
    table = torch.tensor(drafts, dtype=torch.int64).reshape(rows, len(drafts[0]) if rows else 0)
    verdict = verify(logits, starts, table, torch.zeros(rows), nothing, nothing, nothing > 0, None, None)
    fast = verify_greedy(logits, starts, table)
    assert fast.tokens.tolist() == verdict.tokens.tolist()
    assert fast.num_sampled.tolist() == verdict.num_sampled.tolist()
    assert fast.num_accepted.tolist() == verdict.num_accepted.tolist()
    assert verdict.num_sampled.dtype == verdict.num_accepted.dtype == torch.int32
    return verdict


@pytest.mark.parametrize(
    ("best", "drafts", "tokens"),
    [
        ([1, 2, 3, 4], [1, 2, 3], [1, 2, 3, 4]),  # all accepted, and the bonus
        ([1, 2, 3, 4], [1, 5, 3], [1, 2, -1, -1]),  # a mismatch: the target's token, and nothing behind it
        ([1, 2, 3, 4], [5, 2, 3], [1, -1, -1, -1]),
        ([1, 2, 3, 4], [1, -1, 3], [1, 2, -1, -1]),  # an absent draft ends the row's drafts
        ([1, 2, 3, 4], [-1, -1, -1], [1, -1, -1, -1]),
        ([1], [1, 2, 3], [1, -1, -1, -1]),  # a row of one logit row verifies nothing
        ([1, 2], [1, 2, 3], [1, 2, -1, -1]),  # fewer logits than drafts
        ([], [1, 2, 3], [-1, -1, -1, -1]),  # a row that does not sample
    ],
)
def test_greedy_rows(best: list[int], drafts: list[int], tokens: list[int]) -> None:
    verdict = greedy(one_hot_logits(best) if best else torch.zeros(0, VOCAB), [0, len(best)], [drafts])
    assert verdict.tokens.tolist() == [tokens]
    sampled = sum(token >= 0 for token in tokens)
    assert verdict.num_sampled.tolist() == [sampled]
    assert verdict.num_accepted.tolist() == [max(0, sampled - 1)]


def test_rows_of_different_lengths_in_one_batch() -> None:
    verdict = greedy(one_hot_logits([1, 2, 3, 7, 4, 5]), [0, 3, 3, 4, 6], [[1, 9], [1, 2], [7, 7], [4, 0]])
    assert verdict.tokens.tolist() == [[1, 2, -1], [-1, -1, -1], [7, -1, -1], [4, 5, -1]]


def test_no_drafts_at_all_and_no_rows_at_all() -> None:
    assert greedy(one_hot_logits([3, 4]), [0, 1, 2], [[], []]).tokens.tolist() == [[3], [4]]
    assert greedy(torch.zeros(0, VOCAB), [0], []).tokens.shape[0] == 0


@given(st.integers(0, 10_000), st.integers(0, 4), st.integers(1, 5))
def test_greedy_output_equals_running_alone(seed: int, width: int, rows: int) -> None:
    """Whatever the drafts, accepted tokens are the target's own choices along the drafted prefix."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, 2, (rows * (width + 1), 3), generator=generator).float()
    drafts = torch.randint(-1, 3, (rows, width), generator=generator)
    verdict = greedy(logits, [row * (width + 1) for row in range(rows + 1)], drafts.tolist())
    for row in range(rows):
        expected = []
        for column in range(width + 1):
            best = int(logits[row * (width + 1) + column].argmax())
            expected.append(best)
            if column == width or int(drafts[row, column]) != best:
                break
        assert [token for token in verdict.tokens[row].tolist() if token >= 0] == expected


TARGET_PROBS = torch.tensor([0.30, 0.20, 0.15, 0.10, 0.10, 0.05, 0.05, 0.05])
DRAFT_PROBS = torch.tensor([0.05, 0.05, 0.05, 0.10, 0.10, 0.15, 0.20, 0.30])
TRIALS = 65_536


def distance(tokens: torch.Tensor, probs: torch.Tensor) -> float:
    """Total variation between the tokens drawn and a distribution."""
    share = torch.bincount(tokens, minlength=VOCAB) / tokens.shape[0]
    return float((share - probs).abs().sum()) / 2


def run_trials(match_only: bool, with_probs: bool, draft_stream: int = DRAFT) -> tuple[Verdict, torch.Tensor]:
    """65,536 rows with one draft each, drawn from DRAFT_PROBS at the position that it is verified at."""
    seeds, positions = torch.arange(TRIALS) * 104_729, torch.arange(TRIALS) % 977
    one = torch.ones(TRIALS)
    drafts = gumbel_sample(DRAFT_PROBS.log().expand(TRIALS, VOCAB), one, seeds, positions, draft_stream)
    verdict = verify(
        TARGET_PROBS.log().expand(2 * TRIALS, VOCAB),
        torch.arange(0, 2 * TRIALS + 1, 2, dtype=torch.int32),
        drafts[:, None],
        one,
        seeds,
        positions,
        torch.full((TRIALS,), match_only),
        DRAFT_PROBS.expand(TRIALS, 1, VOCAB) if with_probs else None,
        None,
    )
    return verdict, drafts


def test_rejection_leaves_the_targets_distribution() -> None:
    verdict, _ = run_trials(match_only=False, with_probs=True)
    assert distance(verdict.tokens[:, 0], TARGET_PROBS) < 0.008
    accepted = verdict.num_accepted.double().mean().item()
    assert 0.47 < accepted < 0.53
    bonus = verdict.tokens[:, 1]
    assert torch.equal(bonus >= 0, verdict.num_accepted == 1)
    assert distance(bonus[bonus >= 0], TARGET_PROBS) < 0.011


@pytest.mark.parametrize("with_probs", [True, False])
def test_match_leaves_the_targets_distribution(with_probs: bool) -> None:
    verdict, drafts = run_trials(match_only=with_probs, with_probs=with_probs)
    assert distance(verdict.tokens[:, 0], TARGET_PROBS) < 0.008
    # Independent draws agree with probability sum(target * draft).
    expected = float((TARGET_PROBS * DRAFT_PROBS).sum())
    assert abs(verdict.num_accepted.double().mean().item() - expected) < 0.01
    assert torch.equal(verdict.num_accepted == 1, verdict.tokens[:, 0] == drafts)


def test_a_greedy_draft_is_accepted_with_the_targets_probability() -> None:
    """A draft that is always token 1: accepted with target(1) = 0.2, and the output is the target's still."""
    seeds = torch.arange(TRIALS)
    verdict = verify(
        TARGET_PROBS.log().expand(2 * TRIALS, VOCAB),
        torch.arange(0, 2 * TRIALS + 1, 2, dtype=torch.int32),
        torch.ones((TRIALS, 1), dtype=torch.int64),
        torch.ones(TRIALS),
        seeds,
        seeds,
        torch.zeros(TRIALS, dtype=torch.bool),
        torch.full((TRIALS, 1, VOCAB), torch.nan),  # not to be read where has_probs is false
        torch.zeros(TRIALS, dtype=torch.bool),
    )
    assert abs(verdict.num_accepted.double().mean().item() - 0.2) < 0.006
    assert distance(verdict.tokens[:, 0], TARGET_PROBS) < 0.008


def test_shared_noise_would_bend_the_distribution(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check above can fail: replacements drawn with the draft's own noise miss the target by more than that."""
    monkeypatch.setattr(rule, "RESIDUAL", DRAFT)
    verdict, _ = run_trials(match_only=False, with_probs=True)
    assert distance(verdict.tokens[:, 0], TARGET_PROBS) > 0.01


def test_equal_distributions_accept_everything() -> None:
    seeds = torch.arange(500)
    probs = torch.softmax(torch.randn((500, 2, VOCAB), generator=torch.Generator().manual_seed(1)), dim=-1)
    logits = torch.cat((probs, probs[:, :1]), dim=1).log().reshape(-1, VOCAB)
    drafts = torch.stack(
        [gumbel_sample(probs[:, i].log(), torch.ones(500), seeds, seeds + i, DRAFT) for i in range(2)], dim=1
    )
    starts = torch.arange(0, 1501, 3, dtype=torch.int32)
    # log and softmax do not undo each other to the last bit; a hair's breadth below 1 may be refused.
    verdict = verify(logits, starts, drafts, torch.ones(500), seeds, seeds, seeds < 0, probs, None)
    assert int(verdict.num_accepted.sum()) >= 2 * 500 - 1
    assert int(verdict.tokens[:, :2].min()) >= -1


def test_an_empty_residual_falls_back_to_the_target() -> None:
    """Draft probabilities that cover the target's everywhere (rounded up) leave no positive part."""
    target = torch.tensor([[0.5, 0.5, 0, 0, 0, 0, 0, 0]])
    token, accepted = rule._weigh(
        target.expand(400, 8),
        (target * 1.5).expand(400, 8),
        torch.zeros(400, dtype=torch.int64),
        torch.arange(400),
        torch.arange(400),
    )
    assert set(token.tolist()) == {0, 1}
    assert 0.55 < accepted.double().mean().item() < 0.78


@settings(max_examples=40)
@given(st.integers(0, 10_000), st.integers(0, 4), st.sampled_from([0.0, 0.8, 1.0]))
def test_a_seeded_row_gives_the_same_with_and_without_drafts(seed: int, width: int, temperature: float) -> None:
    """The target as a function of the last token alone: steps with drafts commit what steps without drafts commit."""
    generator = torch.Generator().manual_seed(seed)
    model = torch.randn((VOCAB, VOCAB), generator=generator)

    def run(width: int) -> list[int]:
        output = [0]
        while len(output) < 12:
            drafts = torch.randint(-1, VOCAB, (1, width), generator=generator)
            inputs = [output[-1], *drafts[0].clamp(min=0).tolist()]
            verdict = verify(
                model[inputs],
                torch.tensor([0, len(inputs)], dtype=torch.int32),
                drafts,
                torch.tensor([temperature]),
                torch.tensor([seed * 31]),
                torch.tensor([100 + len(output)]),
                torch.tensor([True]),
                None,
                None,
            )
            output += verdict.tokens[0, : int(verdict.num_sampled[0])].tolist()
        return output[:12]

    assert run(width) == run(0)


def test_a_row_is_the_same_in_a_crowd() -> None:
    generator = torch.Generator().manual_seed(3)
    lens = [3, 1, 0, 4, 2, 3]
    starts = [0]
    for length in lens:
        starts.append(starts[-1] + length)
    logits = torch.randn((starts[-1], VOCAB), generator=generator)
    drafts = torch.randint(-1, VOCAB, (6, 3), generator=generator)
    probs = torch.softmax(torch.randn((6, 3, VOCAB), generator=generator), dim=-1)
    temperatures = torch.tensor([1.0, 0.5, 1.0, 0.0, 2.0, 1.0])
    seeds, positions = torch.arange(6) * 17, torch.arange(6) + 40
    match_only = torch.tensor([False, True, False, False, False, True])
    has_probs = torch.tensor([True, True, True, True, False, True])
    crowd = verify(
        logits,
        torch.tensor(starts, dtype=torch.int32),
        drafts,
        temperatures,
        seeds,
        positions,
        match_only,
        probs,
        has_probs,
    )
    for row, length in enumerate(lens):
        one = slice(row, row + 1)
        alone = verify(
            logits[starts[row] : starts[row + 1]],
            torch.tensor([0, length], dtype=torch.int32),
            drafts[one],
            temperatures[one],
            seeds[one],
            positions[one],
            match_only[one],
            probs[one],
            has_probs[one],
        )
        assert alone.tokens[0].tolist() == crowd.tokens[row].tolist()
        assert alone.num_sampled[0] == crowd.num_sampled[row]


def test_a_row_without_drafts_draws_with_the_targets_stream() -> None:
    """What a drafter's absence leaves is the plain sampler's token, for unseeded rows too."""
    logits = torch.randn((64, VOCAB), generator=torch.Generator().manual_seed(8))
    rows = torch.arange(64)
    absent = torch.full((64, 2), -1)
    verdict = verify(
        logits,
        torch.arange(65, dtype=torch.int32),
        absent,
        torch.ones(64),
        rows,
        rows,
        rows < 0,
        torch.rand((64, 2, VOCAB)),
        rows >= 0,
    )
    assert torch.equal(verdict.tokens[:, 0], gumbel_sample(logits, torch.ones(64), rows, rows, TARGET))
