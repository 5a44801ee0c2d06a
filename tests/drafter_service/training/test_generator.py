"""The batched generator writes what the target alone would write."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from drafter_service.training.generator import BatchGenerator, Job, Written
from engine.decoder import Decoder
from tests.tiny_models import EOS_TOKEN_ID, greedy_reference, load_reference, make_tiny_model

CPU = torch.device("cpu")
PROMPTS = [[5, 9, 200], [17], [300, 301, 302, 303, 304, 305, 306], [44, 45], [500, 1, 77, 78]]


def generate(
    decoder: Decoder, jobs: list[Job], seats: int, stop_loops: bool = False, seed: int = 0
) -> dict[int, Written]:
    generator = BatchGenerator(decoder, seats, 96, torch.float32, CPU, seed, stop_loops, burst=4)
    found: dict[int, Written] = {}
    for written in generator.run(jobs):
        assert isinstance(written.job.tag, int)
        found[written.job.tag] = written
    return found


@pytest.mark.parametrize("family", ["llama", "mistral"])
def test_greedy_texts_equal_transformers_whatever_shares_the_batch(tmp_path: Path, family: str) -> None:
    overrides = {"sliding_window": 6} if family == "mistral" else {}
    directory = make_tiny_model(tmp_path / family, family, **overrides)
    reference = load_reference(directory)
    decoder = Decoder.load(directory, torch.float32, CPU)
    jobs = [Job(tuple(prompt), 24, 0.0, tag=index) for index, prompt in enumerate(PROMPTS)]
    found = generate(decoder, jobs, seats=2)
    for index, prompt in enumerate(PROMPTS):
        expected = greedy_reference(reference, prompt, 24)
        if EOS_TOKEN_ID in expected:
            expected = expected[: expected.index(EOS_TOKEN_ID) + 1]
        assert list(found[index].tokens) == expected
        assert found[index].reason == ("stop" if expected[-1] == EOS_TOKEN_ID else "length")


def test_sampling_follows_the_target_distribution(decoder: Decoder) -> None:
    """4,000 first tokens after one prompt, at temperature 0.5: total variation to the softmax stays small."""
    prompt = (5, 9, 200)
    found = generate(decoder, [Job(prompt, 1, 0.5, tag=index) for index in range(4000)], seats=500)
    drawn = torch.tensor([found[index].tokens[0] for index in range(4000)])
    observed = torch.bincount(drawn, minlength=decoder.config.vocab_size) / 4000
    again = generate(decoder, [Job(prompt, 1, 0.5, tag=index) for index in range(4000)], seats=500, seed=1)
    other = torch.bincount(torch.tensor([again[i].tokens[0] for i in range(4000)]), minlength=512) / 4000
    from drafter_service.training.target_view import TargetView

    with torch.inference_mode():
        hidden, _ = TargetView(decoder, (0,)).run(torch.tensor([prompt]))
        expected = (decoder.logits(hidden[-1:])[0] / 0.5).softmax(-1)
    noise = (observed - other).abs().sum() / 2
    assert (observed - expected).abs().sum() / 2 < noise  # two samples differ more than one from the truth


def test_min_p_never_draws_an_unlikely_token(decoder: Decoder) -> None:
    prompt = (5, 9, 200)
    found = generate(decoder, [Job(prompt, 1, 1.0, min_p=0.3, tag=index) for index in range(400)], seats=100)
    from drafter_service.training.target_view import TargetView

    with torch.inference_mode():
        hidden, _ = TargetView(decoder, (0,)).run(torch.tensor([prompt]))
        probs = decoder.logits(hidden[-1:])[0].softmax(-1)
    allowed = set((probs >= 0.3 * probs.max() * 0.999).nonzero()[:, 0].tolist())
    assert {item.tokens[0] for item in found.values()} <= allowed


def test_loops_are_cut_and_said_so(decoder: Decoder) -> None:
    """A prompt that repeats does not count; only what was written does."""
    generator = BatchGenerator(decoder, 3, 400, torch.float32, CPU, 0, stop_loops=True)
    generator._positions.copy_(torch.tensor([200, 200, 200]))
    generator._prompt_lens.copy_(torch.tensor([10, 10, 150]))
    generator._done.fill_(False)
    pattern = torch.arange(400) % 7 + 3
    generator._tokens.copy_(torch.stack([pattern, torch.arange(400), pattern]))
    assert generator._looping().tolist() == [True, False, False]


def test_jobs_that_depend_on_what_was_written_are_asked_for(decoder: Decoder) -> None:
    waiting: list[Job] = [Job((7, 8), 3, 0.0, tag=0)]

    class Source:
        def __iter__(self) -> Iterator[Job]:
            return self

        def __next__(self) -> Job:
            if not waiting:
                raise StopIteration
            return waiting.pop()

    generator = BatchGenerator(decoder, 4, 64, torch.float32, CPU, 0, stop_loops=False)
    seen = []
    for written in generator.run(Source()):
        seen.append(written)
        if len(seen) < 3:
            waiting.append(Job((*written.job.prompt, *written.tokens), 3, 0.0, tag=len(seen)))
    assert len(seen) == 3
    assert len(seen[2].job.prompt) == 8
