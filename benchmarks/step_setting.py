"""What can be set about the measurement of a step, and which config follows from it?"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.plan_driver import Load
from benchmarks.shared_gpu import has_gpu
from drafter_service.eagle3.config import Eagle3Config
from engine.model_config import ModelConfig

WAYS = {
    "a": "split, run-ahead",
    "b": "split, lockstep",
    "c": "one process",
    "d": "no drafting",
    "e": "split, halves in turn",
}
WARM_STEPS = 12
ITEM_SIZE = {"float32": 4, "bfloat16": 2}


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured: the model, the load and how long for."""

    model: Path
    head: str | None
    device: str
    drafter_device: str
    dtype: str
    load_format: str
    attention: str
    accept: float | None
    pcp_size: int
    batches: tuple[int, ...]
    draft_len: int
    draft_vocab: int
    context_len: int
    depth: int
    steps: int
    rounds: int
    ways: str

    @property
    def max_new_tokens(self) -> int:
        """Of a request: all its steps, every draft accepted, and the bounds of what is under way."""
        return (self.steps + WARM_STEPS + self.depth + 2) * (self.draft_len + 1)

    @property
    def shares_gpu(self) -> bool:
        """Whether the drafter has its GPU together with a rank of the target."""
        first, drafter = (torch.device(name) for name in (self.device, self.drafter_device))
        if "cpu" in (first.type, drafter.type):
            return False
        return 0 <= (drafter.index or 0) - (first.index or 0) < self.pcp_size

    def sections(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The config sections of target and drafter."""
        cuda = self.device.startswith("cuda")
        per_row = -(-(self.context_len + self.max_new_tokens) // 16)
        both: dict[str, Any] = {
            "device": self.device,
            "dtype": self.dtype,
            "num_seats": max(self.batches),
            "num_blocks": per_row * max(self.batches) + 64,
            "max_model_len": self.context_len + self.max_new_tokens,
            "channel_kinds": ["cuda_ipc"] if cuda else ["shm"],
        }
        if cuda:
            both |= {"attention": self.attention, "load_format": self.load_format, "execution": "device"}
        else:
            both |= {"threads": 1}
        target = {**both, "max_step_tokens": 4096, "max_verify_len": self.draft_len, "max_wait_ms": 20_000}
        target["pcp_size"] = self.pcp_size
        if self.accept is not None:
            target["accept"] = f"synthetic:{self.accept}"
        drafter = {
            **both,
            "device": self.drafter_device,
            "max_step_tokens": 4096,
            "max_draft_len": self.draft_len,
            "method": "eagle3",
        }
        if self.head is not None:
            drafter["checkpoint"] = self.head
        else:
            drafter["random_head"] = {"draft_vocab_size": self.draft_vocab}
        return target, drafter

    def load(self, batch: int, vocab_size: int, draft_len: int) -> Load:
        """`batch` prompts of random tokens, the same in every way and round, so that later ones hit the cache."""
        source = random.Random(5)
        prompts = [[source.randrange(3, vocab_size) for _ in range(self.context_len)] for _ in range(batch)]
        return Load(prompts, draft_len, self.max_new_tokens)


def head_shape(setting: Setting, model: ModelConfig) -> Eagle3Config:
    """The head that drafts: the checkpoint's, or one shaped like the target."""
    if setting.head is not None:
        from drafter_service.eagle3.config import read_config
        from engine.fetch import fetch_model

        return read_config(json.loads((fetch_model(setting.head) / "config.json").read_text()))
    return Eagle3Config(
        hidden_size=model.hidden_size,
        intermediate_size=model.intermediate_size,
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        rms_eps=model.rms_eps,
        vocab_size=model.vocab_size,
        draft_vocab_size=setting.draft_vocab,
        target_hidden_size=model.hidden_size,
        rope={"rope_type": "default", "rope_theta": 10_000.0},
        max_len=model.max_model_len,
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What this module and `benchmarks.step_profile` take."""
    parser.add_argument("--model", help="directory or name of the model; default: a tiny one made on the spot")
    parser.add_argument("--head", help="the EAGLE-3 head's checkpoint; default: random weights, shaped like the model")
    parser.add_argument("--device", default="cuda" if has_gpu() else "cpu")
    parser.add_argument("--drafter-device", help="where the drafter runs, if not on --device, such as cuda:1")
    parser.add_argument("--dtype", choices=sorted(ITEM_SIZE), default="bfloat16")
    parser.add_argument("--load-format", choices=("safetensors", "dummy"), default="safetensors")
    parser.add_argument("--attention", default="triton")
    parser.add_argument("--accept", type=float, help="mean tokens a row gives in a step, instead of the real verdict")
    parser.add_argument("--pcp-size", type=int, choices=(1, 2, 4, 8), default=1, help="ranks of the target; no way c")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--draft-len", type=int, default=3)
    parser.add_argument("--draft-vocab", type=int, default=32_000, help="of the head with random weights")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ways", default="abcd", help="some of a, b, c, d, e")


def setting_of(options: argparse.Namespace) -> Setting:
    """Of what `add_arguments` took."""
    if options.model is None:
        from tests.tiny_models import VOCAB_SIZE, make_tiny_model

        model = make_tiny_model(Path(tempfile.gettempdir()) / "outrider-tiny-step")
        options.draft_vocab = min(options.draft_vocab, VOCAB_SIZE)
    else:
        from engine.fetch import fetch_model

        model = fetch_model(options.model)
    return Setting(
        model=model,
        head=options.head,
        device=options.device,
        drafter_device=options.drafter_device or options.device,
        dtype=options.dtype,
        load_format=options.load_format,
        attention=options.attention,
        accept=options.accept,
        batches=tuple(options.batches),
        draft_len=options.draft_len,
        draft_vocab=options.draft_vocab,
        context_len=options.context,
        depth=options.depth,
        steps=options.steps,
        rounds=options.rounds,
        pcp_size=options.pcp_size,
        # One process has one rank.
        ways="".join(way for way in WAYS if way in options.ways and (way != "c" or options.pcp_size == 1)),
    )
