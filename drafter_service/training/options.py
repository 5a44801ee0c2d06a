"""What can be asked of a training run?

Everything that changes the result, so that a checkpoint of another run is recognised by its fingerprint and not
continued.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch

from drafter_service.training.interviews import InterviewOptions
from drafter_service.training.loss import LossOptions
from engine.errors import ConfigError

# Where, how long and in how many sittings: a run may be extended.
_NOT_THE_RESULT = (
    "sitting_minutes",
    "checkpoint_seconds",
    "num_seats",
    "generate_minutes",
    "generate_tokens",
    "train_minutes",
    "train_steps",
)


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """One run of `train`.

    generate_minutes, train_minutes: wall time of the two phases, over all sittings. generate_tokens, train_steps: end
    a phase by count instead, the same on every machine; 0: by time.
    num_seats: texts written at once; 0: by the memory there is. max_len: longest conversation, in tokens.
    batch_tokens: tokens a training step, padding included. draft_vocab_size: 0: as large as max_bytes allows.
    muon: inner matrices by Muon instead of AdamW. intermediate_size: the layer's MLP width; 0: the target's.
    sitting_minutes: stop after that long, at a checkpoint, and go on when the same command is given again; 0: no limit.
    """

    generate_minutes: float = 7.0
    train_minutes: float = 12.0
    generate_tokens: int = 0
    train_steps: int = 0
    num_seats: int = 0
    max_len: int = 1024
    batch_tokens: int = 16384
    learning_rate: float = 3e-3
    weight_decay: float = 0.01
    warmup: float = 0.02
    clip: float = 1.0
    muon: bool = True
    draft_vocab_size: int = 0
    intermediate_size: int = 0
    max_bytes: int = 16_000_000
    seed: int = 0
    checkpoint_seconds: float = 60.0
    sitting_minutes: float = 0.0
    interview: InterviewOptions = field(default_factory=InterviewOptions)
    loss: LossOptions = field(default_factory=LossOptions)

    def __post_init__(self) -> None:
        checks = {
            "generate_minutes": self.generate_minutes >= 0,
            "train_minutes": self.train_minutes > 0 or self.train_steps > 0,
            "max_len": self.max_len >= 64,
            "batch_tokens": self.batch_tokens >= self.max_len,
            "learning_rate": self.learning_rate > 0,
            "draft_steps": 1 <= self.loss.num_steps <= 16,
            "draft_vocab_size": self.draft_vocab_size >= 0,
        }
        for key, holds in checks.items():
            if not holds:
                raise ConfigError(key, f"{getattr(self, key, self.loss.num_steps)} cannot be used")

    def fingerprint(self, model: Path) -> str:
        """The same for two sittings of one run, and for a run that is given more time afterwards."""
        values = asdict(self)
        for name in _NOT_THE_RESULT:
            values.pop(name)
        config = (model / "config.json").read_bytes()
        return hashlib.sha256(json.dumps(values, sort_keys=True).encode() + config).hexdigest()[:16]


def default_device() -> torch.device:
    """The GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def target_dtype(device: torch.device) -> torch.dtype:
    """In which the target writes and is listened to: bf16 on a GPU, fp32 on a CPU."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32
