"""The unrolled pass computes what a service computes draft by draft."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from drafter_service.eagle3.head import Eagle3Head
from drafter_service.training.acceptance import AcceptanceCount, accepted_lengths, walk
from drafter_service.training.corpus import Batch, Conversation, make_batch
from drafter_service.training.target_view import TargetView, chain_starts
from drafter_service.training.unroll import unroll
from kernels.attention.interface import AttentionMetadata
from kernels.attention.torch_backend import TorchAttention

CPU = torch.device("cpu")
DRAFT_LEN = 4


class PagedDrafting:
    """The head on a paged cache, one row, the way a service runs it: prefill from true states, then draft steps."""

    def __init__(self, head: Eagle3Head) -> None:
        config = head.config
        self.head = head
        self.backend = TorchAttention(config.num_heads, config.num_kv_heads, config.head_dim, config.head_dim**-0.5)
        self.k_cache = torch.zeros(9, 16, config.num_kv_heads, config.head_dim)
        self.v_cache = torch.zeros_like(self.k_cache)

    def run(self, ids: list[int], hidden: torch.Tensor, first: int) -> torch.Tensor:
        length = len(ids)
        starts, lens = np.array([0, length], dtype=np.int32), np.array([first + length], dtype=np.int32)
        metadata = AttentionMetadata(
            query_start_loc=torch.from_numpy(starts),
            seq_lens=torch.from_numpy(lens),
            block_tables=torch.arange(1, 9, dtype=torch.int32)[None],
            slot_mapping=torch.arange(first, first + length) + 16,
            max_query_len=length,
            max_seq_len=first + length,
            query_start_loc_np=starts,
            seq_lens_np=lens,
        )
        plan = self.backend.plan(metadata)
        positions = torch.arange(first, first + length)
        return self.head(torch.tensor(ids), hidden, positions, plan, self.k_cache, self.v_cache)

    def draft(
        self, captured: torch.Tensor, tokens: list[int], start: int, follow: list[int] | None
    ) -> list[torch.Tensor]:
        """Logits of the drafts after position `start`; `follow`: tokens fed instead of the drafts."""
        hidden = self.head.fuse(captured[: start + 1])
        output = self.run(tokens[1 : start + 2], hidden, 0)[-1:]
        logits = [self.head.logits(output)[0]]
        for step in range(1, DRAFT_LEN):
            token = follow[step - 1] if follow else int(self.head.target_ids(logits[-1].argmax()))
            output = self.run([token], self.head.next_hidden(output), start + step)
            logits.append(self.head.logits(output)[0])
        return logits


def texts() -> Batch:
    rng = np.random.default_rng(0)
    lens = [37, 24]
    items = [
        Conversation(rng.integers(3, 512, size=length).astype(np.int32), ((10, length),), "chat", True)
        for length in lens
    ]
    return make_batch(items, 64)


@torch.inference_mode()
def test_every_step_equals_a_paged_draft(head: Eagle3Head, target: TargetView) -> None:
    batch = texts()
    token_ids = torch.from_numpy(batch.token_ids)
    _, captured = target.run(token_ids)
    outputs = list(unroll(head, head.fuse(captured), token_ids, DRAFT_LEN))
    width = token_ids.shape[1]
    for row, length in enumerate(batch.lens.tolist()):
        tokens = token_ids[row].tolist()
        states = captured.view(2, width, -1)[row]
        for start in (0, 9, 15, length - DRAFT_LEN - 2):
            follow = tokens[start + 2 : start + 2 + DRAFT_LEN]
            expected = PagedDrafting(head).draft(states, tokens, start, follow)
            for step in range(DRAFT_LEN):
                got = head.logits(outputs[step][row * width + start])
                assert torch.allclose(got, expected[step], atol=2e-4), (row, start, step)


@torch.inference_mode()
def test_walk_equals_drafting_and_verifying_step_by_step(head: Eagle3Head, target: TargetView) -> None:
    """The slow way: draft with the head's own tokens, compare with the text, go on from the new anchor."""
    batch = texts()
    # Make some drafts right: put the head's own proposals into the text, then take its states afresh.
    token_ids = torch.from_numpy(batch.token_ids)
    for at in (12, 13, 14, 20, 28, 29):
        _, captured = target.run(token_ids)
        output = next(unroll(head, head.fuse(captured), token_ids, 1))
        flat = at - 2
        token_ids[0, at] = head.target_ids(head.logits(output[flat : flat + 1]).argmax(-1))[0]
    lengths = accepted_lengths(head, target, batch, DRAFT_LEN, CPU)
    count, slow = AcceptanceCount(DRAFT_LEN), AcceptanceCount(DRAFT_LEN)
    _, captured = target.run(token_ids)
    width = token_ids.shape[1]
    for row, length in enumerate(batch.lens.tolist()):
        walk(lengths[row], 10, length, DRAFT_LEN, count)
        tokens, anchor = token_ids[row].tolist(), 10
        states = captured.view(2, width, -1)[row]
        while anchor < length - 1:
            drafts = PagedDrafting(head).draft(states, tokens, anchor - 1, None)
            ids = [int(head.target_ids(logits.argmax())) for logits in drafts]
            offered = min(DRAFT_LEN, length - 1 - anchor)
            accepted = 0
            while accepted < offered and ids[accepted] == tokens[anchor + 1 + accepted]:
                accepted += 1
            committed = min(accepted + 1, length - 1 - anchor)
            slow.add_step(offered, accepted, committed)
            anchor += committed
    assert count == slow
    assert sum(count.accepted) >= 3  # the text was made so that some are
    assert count.tokens == (37 - 11) + (24 - 11)


def test_chains_begin_where_a_service_would_draft() -> None:
    """Two answers with a user turn between: tokens 4..7 and 11..13 of 14."""
    batch = make_batch([Conversation(np.arange(14, dtype=np.int32), ((4, 8), (11, 14)), "chat", True)], 64)
    chains = chain_starts(batch, 3, CPU)
    # The anchor is start + 1, the first draft start + 2: both of one answer.
    assert chains.starts.tolist() == [3, 4, 5, 10, 11]
    assert chains.valid.tolist() == [
        [True, True, True],
        [True, True, False],
        [True, False, False],
        [True, True, False],
        [True, False, False],
    ]
    wanted = chains.wanted.tolist()
    assert wanted == [3, 4, 5, 6, 10, 11, 12]
    spoken = [
        [wanted[row] for row, ok in zip(rows, valid, strict=True) if ok]
        for rows, valid in zip(chains.rows.tolist(), chains.valid.tolist(), strict=True)
    ]
    assert spoken == [[4, 5, 6], [5, 6], [6], [11, 12], [12]]


@pytest.mark.parametrize(
    ("lengths", "steps", "tokens", "accepted"),
    [
        ([9, 9, 9, 0, 0, 0, 0, 0, -1, -1], 5, 5, [0, 0]),  # nothing accepted: one token a step
        ([9, 9, 9, 2, 0, 0, 2, 0, -1, -1], 2, 5, [2, 2]),  # 2 + 1, then the last two drafts end the text
        ([9, 9, 9, 0, 0, 0, 0, 2, -1, -1], 5, 5, [1, 0]),  # one draft left to offer: the second does not count
    ],
)
def test_walk_counts(lengths: list[int], steps: int, tokens: int, accepted: list[int]) -> None:
    """An answer at 4 .. 9 of a text of 10, draft_len 2: its first token comes with the prompt."""
    count = AcceptanceCount(2)
    walk(np.array(lengths), 4, 10, 2, count)
    assert (count.steps, count.tokens, count.accepted) == (steps, tokens, accepted)
