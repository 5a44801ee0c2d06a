"""Which stacks do the end-to-end tests run, and what must every one of them answer?

A variant is a drafter (method, channel kind, metadata source) with a gateway and a target set so that chunking,
prefix hits or preemption really happen. The reference is always transformers' `generate` on the same weights in fp32.
"""

from __future__ import annotations

import functools
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from drafter_service.eagle3.checkpoint import random_head, save_head
from drafter_service.eagle3.config import Eagle3Config
from tests.tiny_models import VOCAB_SIZE, greedy_reference, load_reference, make_tiny_model


@dataclass(frozen=True, slots=True)
class Variant:
    """One stack. `draft`: the drafter's `checkpoint:`, a directory under the models root; None: it needs no weights."""

    name: str
    draft: str | None
    target: Mapping[str, Any] = field(default_factory=dict)
    drafter: Mapping[str, Any] | None = None
    gateway: Mapping[str, Any] = field(default_factory=dict)
    preempts: bool = False
    drafts_accepted: bool = False


CHUNKED = {"max_step_tokens": 12}
# Steps of the target launched ahead of their verdicts; without a GPU, on tensors of the CPU.
ON_DEVICE = {"execution": "device", "attention": "reference", "graph_rows": [1, 4, 16], "check_integrity": True}
# Room for about three of the sixteen requests at once, whatever the gateway admits: they preempt each other.
STARVED = {"num_blocks": 40, "block_size": 4}

VARIANTS = (
    Variant("eagle3-build-shm", "eagle3", drafter={"method": "eagle3"}),
    Variant("eagle3-reuse-shm", "eagle3", drafter={"method": "eagle3", "metadata_source": "reuse"}),
    Variant(
        "eagle3-bytes-chunked", "eagle3", drafter={"method": "eagle3", "channel_kinds": ["bytes"]}, gateway=CHUNKED
    ),
    Variant("draft-model-noisy", "noisy", drafter={"method": "draft_model"}, drafts_accepted=True),
    Variant(
        "draft-model-self-preempted",
        "target",
        target=STARVED,
        drafter={"method": "draft_model", "block_size": 4},
        gateway=CHUNKED,
        preempts=True,
        drafts_accepted=True,
    ),
    Variant("ngram", None, drafter={"method": "ngram"}, drafts_accepted=True),
    Variant("eagle3-preempted", "eagle3", target=STARVED, drafter={"method": "eagle3", "block_size": 4}, preempts=True),
    Variant(
        "eagle3-reuse-chunked-depth-2",
        "eagle3",
        target={"check_integrity": True},
        drafter={"method": "eagle3", "metadata_source": "reuse"},
        gateway={**CHUNKED, "depth": 2},
    ),
    Variant(
        "draft-model-noisy-bytes-preempted-depth-4",
        "noisy",
        target={**STARVED, "check_integrity": True},
        drafter={"method": "draft_model", "block_size": 4, "channel_kinds": ["bytes"]},
        gateway={"depth": 4},
        preempts=True,
        drafts_accepted=True,
    ),
    Variant(
        "target-on-device-eagle3-reuse-depth-2",
        "eagle3",
        target=ON_DEVICE,
        drafter={"method": "eagle3", "metadata_source": "reuse"},
        gateway={**CHUNKED, "depth": 2},
    ),
    Variant(
        "target-on-device-draft-model-noisy-preempted-depth-4",
        "noisy",
        target={**STARVED, **ON_DEVICE},
        drafter={"method": "draft_model", "block_size": 4},
        gateway={"depth": 4},
        preempts=True,
        drafts_accepted=True,
    ),
)


@functools.cache
def prompts(count: int = 16, longest: int = 90) -> tuple[tuple[int, ...], ...]:
    """`count` prompts of different odd and even lengths;

    the second half starts as the first half does, so prefixes are shared.
    """
    random_source = random.Random(7)
    result: list[tuple[int, ...]] = []
    for index in range(count):
        length = 1 + (index * 13) % longest
        own = [random_source.randrange(3, VOCAB_SIZE) for _ in range(length)]
        shared = list(result[index - count // 2]) if index >= count // 2 else []
        result.append(tuple((shared + own)[-longest:] if not shared else (shared + own)[:longest]))
    return tuple(result)


class Models:
    """The model directories of one test session, and what transformers answers on them."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.target = make_tiny_model(root / "target")
        self._noisy(root / "noisy")
        self._eagle3(root / "eagle3")
        self._reference = load_reference(self.target)
        self._answers: dict[tuple[tuple[int, ...], int], list[int]] = {}

    def greedy(self, prompt: tuple[int, ...], num_tokens: int) -> list[int]:
        """transformers' greedy continuation, past the end token."""
        key = (prompt, num_tokens)
        if key not in self._answers:
            self._answers[key] = greedy_reference(self._reference, list(prompt), num_tokens)
        return self._answers[key]

    def _noisy(self, directory: Path) -> None:
        """The target with noise on its weights:

        right often enough to be accepted, wrong often enough to be rejected.
        """
        make_tiny_model(directory)
        weights = load_file(directory / "model.safetensors")
        generator = torch.Generator().manual_seed(1)
        noisy = {k: v + 0.01 * torch.randn(v.shape, generator=generator) for k, v in weights.items()}
        save_file(noisy, directory / "model.safetensors", metadata={"format": "pt"})

    def _eagle3(self, directory: Path) -> None:
        config = Eagle3Config(
            hidden_size=64,
            intermediate_size=96,
            num_heads=4,
            num_kv_heads=2,
            head_dim=16,
            rms_eps=1e-6,
            vocab_size=VOCAB_SIZE,
            draft_vocab_size=200,
            target_hidden_size=64,
            rope={"rope_type": "default", "rope_theta": 10000.0},
            max_len=512,
            hidden_layers=(0, 1, 2),
        )
        save_head(random_head(config, torch.float32, torch.device("cpu"), seed=3), directory)


def drafter_section(variant: Variant, models: Models) -> dict[str, Any]:
    """The `drafter:` section of a variant's config."""
    section: dict[str, Any] = {"max_draft_len": 7, **(variant.drafter or {})}
    if variant.draft is not None:
        section["checkpoint"] = str(models.root / variant.draft)
    return section
