"""Ring entries and replies whose every byte follows from the step's number, so that either process can check them."""

from __future__ import annotations

import base64
import pickle
from dataclasses import fields, replace

import torch

from engine.channel import ChannelDescription, ChannelSpec, RingEntry

SPEC = ChannelSpec(
    channel_id="target-1/drafter-1",
    epoch=3,
    depth=3,
    max_rows=5,
    max_tokens=17,
    max_draft_len=3,
    hidden_width=7,
    hidden_dtype=torch.float32,
    vocab_size=11,
    max_blocks_per_row=3,
    block_size=4,
    num_blocks=9,
    draft_probs=True,
)


def spec_with(**changes: object) -> ChannelSpec:
    return replace(SPEC, **changes)  # type: ignore[arg-type]  # the tests pass wrong values on purpose


def tensors_of(entry: RingEntry) -> dict[str, torch.Tensor]:
    return {
        field.name: value for field in fields(entry) if isinstance(value := getattr(entry, field.name), torch.Tensor)
    }


def pattern(name: str, tensor: torch.Tensor, seq: int) -> torch.Tensor:
    """What the tensor called `name` holds in step `seq`: another value in every element, step and tensor."""
    start = seq * 1000 + sum(name.encode())
    values = torch.arange(start, start + tensor.numel(), device=tensor.device).view(tensor.shape)
    return (values % 251).to(tensor.dtype) if tensor.dtype.is_floating_point else values.to(tensor.dtype)


def fill(entry: RingEntry) -> None:
    for name, tensor in tensors_of(entry).items():
        tensor.copy_(pattern(name, tensor, entry.seq))


def wrong_tensors(entry: RingEntry) -> list[str]:
    """Names of the tensors that are not what `fill` wrote."""
    return [
        name for name, tensor in tensors_of(entry).items() if not torch.equal(tensor, pattern(name, tensor, entry.seq))
    ]


def reply_tokens(seq: int, num_rows: int, draft_len: int, vocab_size: int) -> torch.Tensor:
    return (torch.arange(num_rows * draft_len).view(num_rows, draft_len) + seq) % vocab_size


def reply_probs(seq: int, num_rows: int, draft_len: int, vocab_size: int) -> torch.Tensor:
    return torch.arange(num_rows * draft_len * vocab_size).view(num_rows, draft_len, vocab_size).float() + seq


def encode(description: ChannelDescription) -> str:
    """One word for a command line or a line of output."""
    return base64.b64encode(pickle.dumps(description)).decode()


def decode(word: str) -> ChannelDescription:
    description = pickle.loads(base64.b64decode(word))
    assert isinstance(description, ChannelDescription)
    return description
