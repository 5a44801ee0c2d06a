"""How does a rank get everything compiled before the others can wait for it?

Kernels for GPUs are compiled when they first run, which takes seconds to minutes: longer than a collective may wait,
and not equally long on every rank. So each rank runs steps by itself first, of every sort that it will meet: prompt
chunks long enough for the kernels of long queries, and short rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from kernels.attention.interface import AttentionBackend
from target_service.model import LoadedModel
from target_service.pcp.forward import RankForward
from target_service.pcp.group import SoloGroup
from target_service.pcp.order import StepOrder, table_columns

_PROMPT_LENS = (256, 48)
_SHORT_LENS = (1, 4, 8)
_SHORT_CONTEXT_LEN = 40


def warm_up(model: LoadedModel, backend_sets: Sequence[Sequence[AttentionBackend]], max_step_tokens: int) -> None:
    """Run steps on this rank alone, with each set of backends. Writes KV that nobody reads: before the first
    request.
    """
    for backends in backend_sets:
        forward = RankForward(replace(model, attention_backends=tuple(backends)), backends, SoloGroup())
        for lens, context_len in ((_PROMPT_LENS, 0), (_SHORT_LENS, _SHORT_CONTEXT_LEN)):
            order = _order(model, [length for length in lens if length <= max_step_tokens], context_len)
            if order is not None:
                forward.run(order)


def _order(model: LoadedModel, lens: list[int], context_len: int) -> StepOrder | None:
    """Rows of these lengths on the cache's first blocks; None where the cache is too small for any."""
    block_size = model.kv.block_size
    most = min((model.kv.num_blocks - 1) * block_size, model.max_model_len)
    query_lens = np.array([length for length in lens if context_len + length <= most], dtype=np.int64)
    if not len(query_lens):
        return None
    context_lens = np.full(len(query_lens), context_len, dtype=np.int64)
    columns = table_columns(context_lens, query_lens, block_size)
    return StepOrder(
        context_lens=context_lens,
        query_lens=query_lens,
        num_logits=np.ones(len(query_lens), dtype=np.int64),
        splits=np.zeros(len(query_lens), dtype=np.bool_),
        input_ids=np.zeros(int(query_lens.sum()), dtype=np.int64),
        block_tables=np.tile(np.arange(1, columns + 1, dtype=np.int32), (len(query_lens), 1)),
        hidden_layers=(),
    )
