"""In which size does a step run, so that a captured graph of that size serves it?

Rows are padded to one of the configured counts, tokens to a power of two of them a row. What is larger runs as it is,
without a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

DEFAULT_GRAPH_ROWS = (1, 2, 4, 8, 16, 32, 64)


@dataclass(frozen=True, slots=True)
class StepShape:
    """num_rows: of the plan. max_tokens: the most that its entry can have. padded_rows, padded_tokens: what runs.

    max_query_len: the most tokens of one row. draft_len: the longest draft of any row. captured: whether the prefill
    runs through a graph. drawn: whether a row's drafts are drawn from the draft distribution.
    """

    num_rows: int
    padded_rows: int
    max_tokens: int
    padded_tokens: int
    max_query_len: int
    draft_len: int
    captured: bool
    drawn: bool


def tokens_per_row(max_draft_len: int) -> tuple[int, ...]:
    """Tokens a row of the captured prefills: powers of two, up to a row that verifies max_draft_len drafts."""
    sizes = [1]
    while sizes[-1] < max_draft_len + 1:
        sizes.append(2 * sizes[-1])
    return tuple(sizes)


def graph_rows_within(configured: Sequence[int], max_rows: int) -> tuple[int, ...]:
    """The row counts to capture: those configured that a step can have."""
    return tuple(sorted({rows for rows in configured if rows <= max_rows}))


def step_shape(
    num_rows: int,
    max_tokens: int,
    max_query_len: int,
    draft_len: int,
    drawn: bool,
    graph_rows: Sequence[int],
    row_tokens: Sequence[int],
    token_limit: int,
) -> StepShape:
    """The size to run in. max_query_len: 0 where it does not matter which row has how many tokens. graph_rows,
    row_tokens: ascending; token_limit: of the captured sizes.
    """
    padded_rows = next((rows for rows in graph_rows if rows >= num_rows), None)
    if padded_rows is None:
        return StepShape(num_rows, num_rows, max_tokens, max_tokens, max_query_len, draft_len, False, drawn)
    # Drawn drafts go straight to the reply, which lies elsewhere each step: nothing to capture.
    for tokens in () if drawn else row_tokens:
        if max_tokens <= tokens * padded_rows <= token_limit and max_query_len <= tokens:
            return StepShape(num_rows, padded_rows, max_tokens, tokens * padded_rows, tokens, draft_len, True, drawn)
    return StepShape(num_rows, padded_rows, max_tokens, max_tokens, max_query_len, draft_len, False, drawn)
