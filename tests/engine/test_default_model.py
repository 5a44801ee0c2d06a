"""Does the decoder speak SmolLM2's own words: token for token what transformers' generate gives, in fp32?"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer

from engine.decoder import Decoder
from tests.engine.batches import BatchRunner
from tests.tiny_models import greedy_reference, load_reference

PROMPT = (
    "<|im_start|>user\nWrite a short story about a lighthouse keeper and 3 ships.<|im_end|>\n<|im_start|>assistant\n"
)
NUM_TOKENS = 128


@pytest.fixture(scope="module")
def decoder(default_model: Path) -> Decoder:
    return Decoder.load(default_model, torch.float32)


@pytest.fixture(scope="module")
def prompt(default_model: Path) -> list[int]:
    ids: list[int] = Tokenizer.from_file(str(default_model / "tokenizer.json")).encode(PROMPT).ids
    return ids


@pytest.fixture(scope="module")
def expected(default_model: Path, prompt: list[int]) -> list[int]:
    return greedy_reference(load_reference(default_model), prompt, NUM_TOKENS)


def test_greedy_tokens_equal_transformers_one_at_a_time(
    decoder: Decoder, prompt: list[int], expected: list[int]
) -> None:
    runner = BatchRunner(decoder, num_seats=1, max_len=256, block_size=16)
    tokens = [int(decoder.logits(runner.step([(0, prompt)]).hidden[-1:]).argmax())]
    while len(tokens) < NUM_TOKENS:
        tokens.append(int(decoder.logits(runner.step([(0, tokens[-1:])]).hidden).argmax()))
    assert tokens == expected


def test_greedy_tokens_are_the_same_in_chunks_and_steps_of_five(
    decoder: Decoder, prompt: list[int], expected: list[int]
) -> None:
    runner = BatchRunner(decoder, num_seats=1, max_len=256, block_size=16)
    runner.step([(0, prompt[:7])])
    text = [*prompt[7:], *expected]
    predicted: list[int] = []
    for start in range(0, len(text) - 1, 5):  # as when every draft is right
        chunk = text[start : min(start + 5, len(text) - 1)]
        predicted += decoder.logits(runner.step([(0, chunk)]).hidden).argmax(-1).tolist()
    assert predicted[len(prompt) - 8 :] == expected
