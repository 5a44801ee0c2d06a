"""What runs in a step, and as which tensors?

From the plan's rows to a `StepBatch`: who has blocks, how many tokens each row runs, and the tensors that the forward
and the verification read. Positions and anchors come from per-seat device state (`SeatState`), as run-ahead needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from engine.request_blocks import RequestBlocks
from kernels.attention.interface import AttentionMetadata
from kernels.layout import make_query_start_loc
from kernels.reference.slot_mapping import compute_slot_mapping
from kernels.reference.target_inputs import prepare_target_inputs
from target_service.messages import RowStatus
from target_service.sessions import Session


@dataclass(frozen=True, slots=True)
class SeatState:
    """Per-seat device state. context_lens: [S] int32, committed KV; anchors: [S] int64, last sampled token."""

    context_lens: torch.Tensor
    anchors: torch.Tensor

    @classmethod
    def empty(cls, num_seats: int, device: torch.device) -> SeatState:
        """State of seats that nobody sits on."""
        return cls(
            torch.zeros(num_seats, dtype=torch.int32, device=device),
            torch.full((num_seats,), -1, dtype=torch.int64, device=device),
        )


@dataclass(frozen=True, slots=True)
class StepRow:
    """One row as it really runs. session None or status not OK: query_len 0.

    num_logits: logit rows it needs, the last ones of its query. drafts: the real drafts it verifies.
    """

    session: Session | None
    status: RowStatus
    query_len: int = 0
    num_logits: int = 0
    drafts: tuple[int, ...] = ()
    is_prompt: bool = False

    @property
    def runs(self) -> bool:
        """Whether the forward sees it."""
        return self.query_len > 0


@dataclass(frozen=True, slots=True)
class StepBatch:
    """A step's tensors; R rows in the plan's order, T tokens.

    seats: [R] int32, -1 where the row does not run. query_lens: [R] int32.
    draft_tokens: [R, K] int64. next_prompt_tokens: [R] int64, the token after a chunk that does not sample, else -1.
    logit_rows: [N] int64, the tokens whose logits are needed. metadata: for attention.
    """

    rows: tuple[StepRow, ...]
    seats: torch.Tensor
    query_lens: torch.Tensor
    draft_tokens: torch.Tensor
    next_prompt_tokens: torch.Tensor
    input_ids: torch.Tensor
    positions: torch.Tensor
    logit_rows: torch.Tensor
    metadata: AttentionMetadata

    @property
    def num_tokens(self) -> int:
        """T."""
        return self.input_ids.shape[0]


def build_batch(
    rows: Sequence[StepRow], state: SeatState, blocks: RequestBlocks, max_len: int, device: torch.device
) -> StepBatch:
    """Tensors of a step whose rows have their blocks. max_len: positions at or past it are never written, in tokens."""
    num_rows = len(rows)
    query_lens_np = np.fromiter((row.query_len for row in rows), dtype=np.int32, count=num_rows)
    query_start_loc_np = make_query_start_loc(query_lens_np)
    num_tokens = int(query_start_loc_np[-1])
    seats_np = np.full(num_rows, -1, dtype=np.int32)
    seq_lens_np = np.zeros(num_rows, dtype=np.int32)
    is_prompt_np = np.zeros(num_rows, dtype=np.bool_)
    prompt_start_np = np.zeros(num_rows, dtype=np.int64)
    next_prompt_np = np.full(num_rows, -1, dtype=np.int64)
    draft_width = max((len(row.drafts) for row in rows), default=0)
    drafts_np = np.full((num_rows, draft_width), -1, dtype=np.int64)
    prompt: list[int] = []
    logit_rows: list[int] = []
    for index, row in enumerate(rows):
        session = row.session
        if not row.runs or session is None:
            continue
        seats_np[index] = session.seat
        seq_lens_np[index] = session.context_len + row.query_len
        if row.is_prompt:
            is_prompt_np[index] = True
            prompt_start_np[index] = len(prompt)
            chunk_end = session.context_len + row.query_len
            prompt.extend(session.tokens[session.context_len : chunk_end])
            if row.num_logits == 0:
                next_prompt_np[index] = session.tokens[chunk_end]
        if row.drafts:
            drafts_np[index, : len(row.drafts)] = row.drafts
        end = int(query_start_loc_np[index + 1])
        logit_rows.extend(range(end - row.num_logits, end))

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    seats, query_start_loc = put(seats_np), put(query_start_loc_np)
    draft_tokens = put(drafts_np)
    input_ids = torch.empty(num_tokens, dtype=torch.int64, device=device)
    positions = torch.empty(num_tokens, dtype=torch.int64, device=device)
    prepare_target_inputs(
        state.context_lens,
        state.anchors,
        seats,
        torch.tensor(prompt, dtype=torch.int64, device=device),
        put(prompt_start_np),
        draft_tokens,
        query_start_loc,
        put(is_prompt_np),
        input_ids,
        positions,
    )
    block_tables = blocks.sync()[seats.clamp(min=0).to(torch.int64)]
    slot_mapping = torch.empty(num_tokens, dtype=torch.int64, device=device)
    compute_slot_mapping(positions, query_start_loc, block_tables, blocks.pool.block_size, max_len, slot_mapping)
    metadata = AttentionMetadata(
        query_start_loc=query_start_loc,
        seq_lens=put(seq_lens_np),
        block_tables=block_tables,
        slot_mapping=slot_mapping,
        max_query_len=int(query_lens_np.max(initial=0)),
        max_seq_len=int(seq_lens_np.max(initial=0)),
        query_start_loc_np=query_start_loc_np,
        seq_lens_np=seq_lens_np,
    )
    return StepBatch(
        rows=tuple(rows),
        seats=seats,
        query_lens=put(query_lens_np),
        draft_tokens=draft_tokens,
        next_prompt_tokens=put(next_prompt_np),
        input_ids=input_ids,
        positions=positions,
        logit_rows=torch.tensor(logit_rows, dtype=torch.int64, device=device),
        metadata=metadata,
    )
