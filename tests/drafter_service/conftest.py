"""Fixtures of the drafter's tests: the tiny target's decoder, a random head for it, speculators, and a harness."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from drafter_service.draft_model import DraftModelSpeculator
from drafter_service.eagle3.checkpoint import random_head
from drafter_service.eagle3.config import Eagle3Config
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.eagle3.speculator import Eagle3Speculator
from drafter_service.settings import CacheSettings
from drafter_service.speculator import Speculator
from engine.decoder import Decoder
from tests.drafter_service.fake_target import FakeTarget
from tests.drafter_service.harness import Harness
from tests.tiny_models import make_tiny_model

LAYERS = (0, 1, 2)

SETTINGS = CacheSettings(num_seats=16, max_tokens=512, max_draft_len=7, block_size=4, num_blocks=512, max_len=256)


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("drafter") / "target")


@pytest.fixture(scope="session")
def decoder(tiny_directory: Path) -> Decoder:
    return Decoder.load(tiny_directory, torch.float32)


def head_config(**overrides: Any) -> Eagle3Config:
    config = Eagle3Config(
        hidden_size=64,
        intermediate_size=96,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rms_eps=1e-5,
        vocab_size=512,
        draft_vocab_size=128,
        target_hidden_size=64,
        rope={"rope_type": "default", "rope_theta": 10000.0},
        max_len=512,
        hidden_layers=LAYERS,
    )
    return replace(config, **overrides)


def widen(head: Eagle3Head, factor: float = 8.0) -> Eagle3Head:
    """Weights large enough that attention and positions change which token is best."""
    with torch.no_grad():
        for name, parameter in head.named_parameters():
            if "norm" not in name and name != "embed_tokens":
                parameter.mul_(factor)
    return head


@pytest.fixture
def head(decoder: Decoder) -> Eagle3Head:
    head = widen(random_head(head_config(), torch.float32, torch.device("cpu"), seed=3))
    head.attach_embedding(decoder.embed_weight)
    return head


@pytest.fixture
def eagle3(head: Eagle3Head) -> Eagle3Speculator:
    return Eagle3Speculator(head, LAYERS, SETTINGS)


@pytest.fixture
def draft_model(decoder: Decoder) -> DraftModelSpeculator:
    return DraftModelSpeculator(decoder, SETTINGS)


@pytest.fixture
def make_harness(decoder: Decoder) -> Iterator[Callable[..., Harness]]:
    """`make_harness(speculator, **fake_target_options)`."""
    made: list[Harness] = []

    def make(speculator: Speculator, **options: Any) -> Harness:
        made.append(Harness(FakeTarget(decoder, speculator.needs.hidden_layers, **options), speculator))
        return made[-1]

    yield make
    for harness in made:
        harness.close()
