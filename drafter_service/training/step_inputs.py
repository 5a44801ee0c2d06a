"""How does a training batch become a few fixed shapes, so that a GPU can replay a recorded step?

Conversations of similar length share a shape of `rows` by `length`; what a step needs beside the tokens (where chains
begin, which target positions speak) is counted on the host and laid side by side in one int32 array: one copy a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from drafter_service.training.corpus import Batch, Conversation, Ints, make_batch
from drafter_service.training.target_view import ChainStarts, chain_arrays

Packed = npt.NDArray[np.int32]
_LENGTHS = (128, 192, 256, 320, 384, 448, 512, 640, 768, 1024, 1536, 2048, 3072, 4096)
_CHAIN_SHARE = 0.78


@dataclass(frozen=True, slots=True)
class StepShape:
    """rows * length tokens, with room for `capacity` chains of num_steps steps and as many target positions."""

    rows: int
    length: int
    num_steps: int

    @property
    def tokens(self) -> int:
        return self.rows * self.length

    @property
    def capacity(self) -> int:
        """Some of a batch is always questions and padding; what exceeds this is left out of the batch's loss."""
        return max(8, int(self.tokens * _CHAIN_SHARE) // 8 * 8)

    @property
    def size(self) -> int:
        """Values of the packed array."""
        return self.tokens + self.capacity * (2 + 2 * self.num_steps)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """A batch, packed on the host. num_tokens: without padding."""

    shape: StepShape
    packed: Packed
    num_tokens: int


def step_shapes(batch_tokens: int, max_len: int, num_steps: int) -> tuple[StepShape, ...]:
    """All shapes of a run, shortest first."""
    lengths = [length for length in _LENGTHS if length < max_len] + [max_len]
    return tuple(StepShape(max(1, batch_tokens // length), length, num_steps) for length in lengths)


def epoch_inputs(
    conversations: Sequence[Conversation], shapes: Sequence[StepShape], seed: int, skip: int = 0
) -> Iterator[StepInputs]:
    """All conversations once, in a new order for each seed. What does not fill a shape's last batch goes to the next
    longer shape. skip: batches to leave out at the beginning.
    """
    rng = np.random.default_rng(seed)
    longest = shapes[-1].length
    lens = np.array([min(item.tokens.size, longest) for item in conversations], dtype=np.int64)
    bucket_of = np.searchsorted([shape.length for shape in shapes], lens)
    groups: list[tuple[StepShape, Ints]] = []
    left = np.zeros(0, dtype=np.int64)
    for index, shape in enumerate(shapes):
        members = np.concatenate((left, rng.permutation(np.flatnonzero(bucket_of == index))))
        whole = members.size // shape.rows * shape.rows
        groups += [(shape, members[at : at + shape.rows]) for at in range(0, whole, shape.rows)]
        left = members[whole:]
    if left.size:
        groups.append((shapes[-1], left))
    for place in rng.permutation(len(groups))[skip:]:
        shape, chosen = groups[place]
        yield pack(make_batch([conversations[item] for item in chosen], shape.length), shape)


def pack(batch: Batch, shape: StepShape) -> StepInputs:
    """A batch of at most the shape's rows and length, padded to it. Padding chains are not valid in any step."""
    height, width = batch.token_ids.shape
    token_ids = np.zeros((shape.rows, shape.length), dtype=np.int64)
    answers = np.zeros((shape.rows, shape.length), dtype=np.bool_)
    token_ids[:height, :width] = batch.token_ids
    answers[:height, :width] = batch.answers
    answers.reshape(-1)[np.flatnonzero(answers)[shape.capacity :]] = False
    chains = chain_arrays(Batch(token_ids, answers, batch.lens), shape.num_steps)
    packed = np.zeros(shape.size, dtype=np.int32)
    parts = _split(packed, shape)
    parts[0][:] = token_ids.reshape(-1)
    # Padding entries point to different rows: gradients (zeros) that are added into one row would queue up.
    for part, given in ((parts[1], chains.starts), (parts[2], chains.wanted)):
        part[:] = np.arange(shape.capacity) % shape.tokens
        part[: given.size] = given
    number = chains.starts.size
    parts[3].reshape(shape.capacity, -1)[:number] = chains.valid
    parts[4].reshape(shape.capacity, -1)[:number] = chains.rows
    return StepInputs(shape, packed, batch.num_tokens)


def unpack(packed: torch.Tensor, shape: StepShape) -> tuple[torch.Tensor, ChainStarts]:
    """(token_ids [rows, length], chains) of a packed array on any device; copies, so the array may be overwritten."""
    ends = np.cumsum([part.size for part in _split(np.zeros(shape.size, dtype=np.int32), shape)]).tolist()
    token_ids, starts, wanted, valid, rows = (
        packed[begin:end].long() for begin, end in zip([0, *ends[:-1]], ends, strict=True)
    )
    chains = ChainStarts(starts, valid.view(-1, shape.num_steps).bool(), rows.view(-1, shape.num_steps), wanted)
    return token_ids.view(shape.rows, shape.length), chains


def _split(packed: Packed, shape: StepShape) -> list[Packed]:
    """token ids, starts, wanted, valid, rows."""
    steps = shape.capacity * shape.num_steps
    sizes = [shape.tokens, shape.capacity, shape.capacity, steps, steps]
    return np.split(packed, np.cumsum(sizes)[:-1])
