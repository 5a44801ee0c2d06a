"""What makes a reply valid, whichever way it travels: its sizes, its padding, and which of its tokens may be used?"""

from __future__ import annotations

import torch

from engine.channel.interface import ChannelSpec
from engine.errors import ChannelError

ABSENT = -1


def check_reply_shapes(
    spec: ChannelSpec, tokens: torch.Tensor, probs: torch.Tensor | None, has_probs: torch.Tensor | None
) -> int:
    """The number of rows R of a reply that fits the channel; arguments as in DrafterChannel.publish_reply.

    ChannelError names the bound or the argument at fault.
    """
    if tokens.dim() != 2 or tokens.dtype != torch.int64:
        raise ChannelError(f"tokens: must be [R, k] int64, got {list(tokens.shape)} {tokens.dtype}")
    num_rows, draft_len = tokens.shape
    if num_rows > spec.max_rows:
        raise ChannelError(f"max_rows: the reply has {num_rows} rows, the channel takes {spec.max_rows}")
    if draft_len > spec.max_draft_len:
        raise ChannelError(f"max_draft_len: the reply has {draft_len} drafts, the channel takes {spec.max_draft_len}")
    if probs is None:
        if has_probs is not None and bool(has_probs.any()):
            raise ChannelError("has_probs: says there are probs, and none were given")
        return int(num_rows)
    if not spec.draft_probs:
        raise ChannelError("probs: the channel was opened without draft_probs")
    wanted = (num_rows, draft_len, spec.vocab_size)
    if tuple(probs.shape) != wanted or probs.dtype != torch.float32:
        raise ChannelError(f"probs: must be {list(wanted)} float32, got {list(probs.shape)} {probs.dtype}")
    if has_probs is not None and (tuple(has_probs.shape) != (num_rows,) or has_probs.dtype != torch.bool):
        raise ChannelError(f"has_probs: must be [{num_rows}] bool, got {list(has_probs.shape)} {has_probs.dtype}")
    return int(num_rows)


def fill_reply(
    parts: dict[str, torch.Tensor], tokens: torch.Tensor, probs: torch.Tensor | None, has_probs: torch.Tensor | None
) -> None:
    """Write a checked reply into an entry's tensors (by region name, cut to R rows), its missing columns included.

    Of probs only the rows that have them are written: the others' are never read.
    """
    draft_len = tokens.shape[1]
    parts["reply.tokens"][:, :draft_len] = tokens
    parts["reply.tokens"][:, draft_len:] = ABSENT
    if "reply.probs" not in parts:
        return
    if probs is None:
        parts["reply.has_probs"].fill_(False)
        return
    if has_probs is None:
        parts["reply.has_probs"].fill_(True)
        parts["reply.probs"][:, :draft_len] = probs
        parts["reply.probs"][:, draft_len:] = 0.0
        return
    parts["reply.has_probs"].copy_(has_probs)
    for row in has_probs.nonzero().flatten().tolist():
        parts["reply.probs"][row, :draft_len] = probs[row]
        parts["reply.probs"][row, draft_len:] = 0.0


def usable_tokens(tokens: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """A copy of published draft tokens, any shape, in which every id outside the vocabulary is ABSENT.

    The drafter is another process, of another version perhaps: what it writes must never reach an embedding unchecked.
    """
    return torch.where((tokens >= 0) & (tokens < vocab_size), tokens, ABSENT)
