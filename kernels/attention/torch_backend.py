"""How does attention run in plain torch, fast enough on a CPU?

Everything that does not depend on the layer is decided once, in `plan`: which tokens are written where, which stretch
of the cache each row reads, and the masks. A row whose blocks are one run of the cache is read through a view; any
other is gathered block by block. Few query tokens are folded with the query heads that share a KV head, so that a
decode row is one small product per KV head and needs no mask; a long chunk is cut in pieces that read no further than
they see.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from kernels.attention.interface import AttentionMetadata
from kernels.layout import PAD_SLOT, blocks_needed

# Up to this many query tokens of a row are folded with the heads of a group. Measured on two cores: folding wins by up
# to 2x at 5 tokens and loses nothing at 64; its mask is `group` times larger.
_FOLD_LEN = 32
# Query tokens per piece of a long chunk: enough for efficient products, few enough to skip the keys that no token sees.
_PIECE_LEN = 128


@dataclass(frozen=True, slots=True)
class TorchAttention:
    """Paged attention in plain torch, on any device. A frozen value: any number of plans may be alive at once.

    num_heads, num_kv_heads, head_dim: of the layer (or of a shard of it); scale: of the scores; window: how many last
    positions a token sees, itself included, or None for all of them.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    name: str = field(default="torch", init=False)
    needs_host_lens: bool = field(default=True, init=False)

    def plan(self, metadata: AttentionMetadata) -> TorchPlan:
        """Prepare one step. Raises ValueError where the metadata has no host lengths.

        The block tables are read here and not again; on a device the gather indices stay there. The cache's block
        size is learnt from the first `run`, so what depends on it is prepared then, once.
        """
        if metadata.query_start_loc_np is None:
            raise ValueError("metadata.query_start_loc_np: the torch attention backend needs it")
        if metadata.seq_lens_np is None:
            raise ValueError("metadata.seq_lens_np: the torch attention backend needs it")
        return TorchPlan(self, metadata, metadata.query_start_loc_np, metadata.seq_lens_np)


@dataclass(frozen=True, slots=True)
class _Piece:
    """Query tokens first .. last (exclusive) of the batch, over keys first_key .. last_key of the row's stretch.

    mask: None where every key is seen; else float32, 0 or -inf, [n * group, keys] when folded, [n, keys] when not.
    """

    first: int
    last: int
    first_key: int
    last_key: int
    folded: bool
    mask: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class _Row:
    """The stretch of cache that one row reads: slots first_slot .. + length of the cache, or of the blocks gathered."""

    first_slot: int
    length: int
    blocks: torch.Tensor | None
    pieces: tuple[_Piece, ...]


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What every layer of a step shares.

    first_slot: where the tokens' KV goes when all of it is one run of slots, else None, and token i of `tokens` goes to
    slots[i]. covers: the rows' tokens are all the tokens there are, in order.
    """

    num_tokens: int
    first_slot: int | None
    tokens: torch.Tensor
    slots: torch.Tensor
    rows: tuple[_Row, ...]
    covers: bool


class TorchPlan:
    """One step's plan."""

    def __init__(
        self,
        backend: TorchAttention,
        metadata: AttentionMetadata,
        query_start_loc_np: np.ndarray,
        seq_lens_np: np.ndarray,
    ) -> None:
        self._backend = backend
        self._metadata = metadata
        # Copies: the caller's persistent host buffers may move on to the next step before the last layer has run.
        self._starts: list[int] = query_start_loc_np.tolist()
        self._seq_lens: list[int] = seq_lens_np.tolist()
        self._tables = metadata.block_tables.clone()
        self._slot_mapping = metadata.slot_mapping.clone()
        self._prepared: dict[tuple[int, int], _Prepared] = {}

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """Write k, v to their slots, then attend: see AttentionPlan.run. Tokens of no row, or of padded rows, get
        zeros.
        """
        key = (q.shape[0], k_cache.shape[1])
        prepared = self._prepared.get(key)
        if prepared is None:
            prepared = self._prepared[key] = self._prepare(*key)
        _write(prepared, k, v, k_cache, v_cache)
        outputs = []
        for row in prepared.rows:
            keys, values = _stretch(row, k_cache, q.dtype), _stretch(row, v_cache, q.dtype)
            outputs += [self._attend(piece, q, keys, values) for piece in row.pieces]
        if prepared.covers:
            return outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        result = torch.zeros_like(q)
        pieces = [piece for row in prepared.rows for piece in row.pieces]
        for piece, output in zip(pieces, outputs, strict=True):
            result[piece.first : piece.last] = output
        return result

    def _attend(self, piece: _Piece, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """One piece. keys, values: [1, Hkv, row's length, D]. Returns [n, Hq, D]."""
        backend = self._backend
        heads, kv_heads = backend.num_heads, backend.num_kv_heads
        queries, dim = q[piece.first : piece.last], q.shape[2]
        if piece.last_key - piece.first_key != keys.shape[2]:
            keys, values = keys[:, :, piece.first_key : piece.last_key], values[:, :, piece.first_key : piece.last_key]
        mask = None if piece.mask is None else piece.mask.to(q.dtype)
        if not piece.folded:
            return scaled_dot_product_attention(
                queries.transpose(0, 1).unsqueeze(0),
                keys,
                values,
                mask,
                scale=backend.scale,
                enable_gqa=heads != kv_heads,
            )[0].transpose(0, 1)
        num, group = queries.shape[0], heads // kv_heads
        folded = queries.reshape(num, kv_heads, group, dim).transpose(0, 1).reshape(1, kv_heads, num * group, dim)
        output = scaled_dot_product_attention(folded, keys, values, mask, scale=backend.scale)
        return output.view(kv_heads, num, group, dim).transpose(0, 1).reshape(num, heads, dim)

    def _prepare(self, num_tokens: int, block_size: int) -> _Prepared:
        """Everything that the layers share, for `num_tokens` query tokens (padded ones included)."""
        slots = self._slot_mapping[:num_tokens]
        tokens = torch.nonzero(slots != PAD_SLOT).squeeze(1)
        kept = slots[tokens]
        first_slot = None
        if kept.device.type == "cpu" and 0 < kept.shape[0] == num_tokens:
            first_slot = int(kept[0]) if bool((kept[1:] == kept[:-1] + 1).all()) else None
        rows = []
        covered = 0
        for row, seq_len in enumerate(self._seq_lens):
            first, last = self._starts[row], self._starts[row + 1]
            if first == last or seq_len == 0:
                continue
            rows.append(self._prepare_row(row, first, last, seq_len, block_size))
            covered += last - first
        return _Prepared(num_tokens, first_slot, tokens, kept, tuple(rows), 0 < covered == num_tokens)

    def _prepare_row(self, row: int, first: int, last: int, seq_len: int, block_size: int) -> _Row:
        window = self._backend.window
        query_len = last - first
        context_len = seq_len - query_len
        # The oldest position that the row's first token sees, hence any of them.
        oldest = 0 if window is None else max(0, context_len - window + 1)
        first_column = oldest // block_size
        blocks = self._tables[row, first_column : blocks_needed(seq_len, block_size)]
        first_slot = oldest - first_column * block_size
        gathered: torch.Tensor | None = blocks.to(torch.int64)
        if blocks.device.type == "cpu" and bool((blocks[1:] == blocks[:-1] + 1).all()):
            first_slot += int(blocks[0]) * block_size
            gathered = None
        pieces = []
        step = query_len if query_len <= _FOLD_LEN else _PIECE_LEN
        for start in range(0, query_len, step):
            end = min(start + step, query_len)
            begin = context_len + start  # position of the piece's first token
            seen_from = 0 if window is None else max(0, begin - window + 1)
            mask = None
            folded = end - start <= _FOLD_LEN
            if end - start > 1:
                mask = _mask(begin, context_len + end, seen_from, window, self._tables.device)
                if folded:
                    mask = mask.repeat_interleave(self._backend.num_heads // self._backend.num_kv_heads, dim=0)
            pieces.append(
                _Piece(first + start, first + end, seen_from - oldest, context_len + end - oldest, folded, mask)
            )
        return _Row(first_slot, seq_len - oldest, gathered, tuple(pieces))


def _mask(begin: int, end: int, seen_from: int, window: int | None, device: torch.device) -> torch.Tensor:
    """0 where a token at position begin .. end - 1 sees a key at seen_from .. end - 1, else -inf. Float32."""
    behind = torch.arange(begin, end, device=device)[:, None] - torch.arange(seen_from, end, device=device)[None, :]
    hidden = behind < 0
    if window is not None:
        hidden |= behind >= window
    return torch.zeros(hidden.shape, device=device).masked_fill_(hidden, float("-inf"))


def _write(prepared: _Prepared, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
    """The step's keys and values to their slots; k_cache and v_cache are written through views, never copied."""
    flat_k, flat_v = k_cache.view(-1, *k_cache.shape[2:]), v_cache.view(-1, *v_cache.shape[2:])
    if prepared.first_slot is not None:
        end = prepared.first_slot + prepared.num_tokens
        flat_k[prepared.first_slot : end] = k
        flat_v[prepared.first_slot : end] = v
        return
    if prepared.tokens.shape[0] != k.shape[0]:
        k, v = k[prepared.tokens], v[prepared.tokens]
    flat_k.index_copy_(0, prepared.slots, k.to(flat_k.dtype))
    flat_v.index_copy_(0, prepared.slots, v.to(flat_v.dtype))


def _stretch(row: _Row, cache: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The keys or values that a row reads. Returns [1, Hkv, length, D], a view where the blocks are one run."""
    source = cache if row.blocks is None else cache.index_select(0, row.blocks)
    flat = source.view(-1, *cache.shape[2:])
    return flat.narrow(0, row.first_slot, row.length).transpose(0, 1).unsqueeze(0).to(dtype)
