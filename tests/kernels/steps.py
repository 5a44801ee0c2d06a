"""Random steps for property tests: rows of any (context_len, query_len), distinct blocks, padding, poisoned outputs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import NDArray

from kernels.layout import blocks_needed, make_positions, make_query_start_loc

POISON = 987_654_321


@dataclass(frozen=True, slots=True)
class Step:
    """R rows over a cache of `num_blocks` blocks; block 0 is in no row's table."""

    context_lens: NDArray[np.int32]
    query_lens: NDArray[np.int32]
    block_size: int
    max_len: int
    num_blocks: int
    block_tables: NDArray[np.int32]
    padded_tokens: int

    @property
    def query_start_loc(self) -> NDArray[np.int32]:
        return make_query_start_loc(self.query_lens)

    @property
    def positions(self) -> NDArray[np.int64]:
        return make_positions(self.context_lens, self.query_lens)

    @property
    def num_tokens(self) -> int:
        return int(self.query_lens.sum())


@st.composite
def steps(draw: st.DrawFn, max_rows: int = 6, max_context: int = 24, max_query: int = 7) -> Step:
    rows = draw(st.integers(1, max_rows))
    context_lens = np.array(draw(st.lists(st.integers(0, max_context), min_size=rows, max_size=rows)), np.int32)
    query_lens = np.array(draw(st.lists(st.integers(0, max_query), min_size=rows, max_size=rows)), np.int32)
    block_size = draw(st.integers(1, 7))
    longest = int((context_lens + query_lens).max())
    max_len = draw(st.integers(max(1, longest - 3), longest + 8))
    # Room for draft steps behind the longest row; sometimes a table narrower than the length limit.
    width = blocks_needed(longest, block_size) + draw(st.integers(0, 2))
    num_blocks = rows * width + 1
    order = draw(st.permutations(range(1, num_blocks)))
    tables = np.array(order, np.int32).reshape(rows, width)
    padded = int(query_lens.sum()) + draw(st.integers(0, 5))
    return Step(context_lens, query_lens, block_size, max_len, num_blocks, tables, padded)


def tensor(array: NDArray[Any]) -> torch.Tensor:
    """A copy as a tensor of the same dtype."""
    return torch.from_numpy(np.array(array))


def poisoned(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """A buffer full of garbage: what a kernel leaves unwritten shows."""
    return torch.full(shape, POISON, dtype=dtype)
