"""What do the tests of training run on? A tiny target, its chat format, and a head that was never trained."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from drafter_service.eagle3.config import default_hidden_layers
from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.chat_format import ChatFormat, load_chat_format
from drafter_service.training.head_setup import choose_draft_vocab, head_config, initial_head
from drafter_service.training.session import rope_of
from drafter_service.training.target_view import TargetView
from engine.decoder import Decoder
from tests.tiny_models import make_tiny_model

CPU = torch.device("cpu")


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target") / "tiny", num_hidden_layers=5)


@pytest.fixture(scope="session")
def decoder(tiny_directory: Path) -> Decoder:
    return Decoder.load(tiny_directory, torch.float32, CPU)


@pytest.fixture(scope="session")
def chat(tiny_directory: Path) -> ChatFormat:
    return load_chat_format(tiny_directory)


@pytest.fixture(scope="session")
def target(decoder: Decoder) -> TargetView:
    return TargetView(decoder, default_hidden_layers(decoder.config.num_layers))


@pytest.fixture
def head(decoder: Decoder, tiny_directory: Path) -> Eagle3Head:
    """Its draft vocabulary is every second token; it takes captured states as they are."""
    counts = torch.zeros(decoder.config.vocab_size, dtype=torch.int64).numpy()
    counts[::2] = 5
    vocab = choose_draft_vocab(counts, 256, ())
    config = head_config(decoder.config, rope_of(tiny_directory), 256, 128)
    return initial_head(config, decoder, vocab, torch.ones(3 * 64), CPU, seed=3)
