"""How many rows is a uniform step padded to, and how many graphs can there be of such steps?"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from target_service.config import TargetConfig
from target_service.device.buffers import Sizes

# Sets of hidden layers, the empty one included, whose graphs are kept: each drafter brings its own, and may come again
# with another.
MAX_LAYER_SETS = 4


def most_graphs(num_row_counts: int, max_drafts: int, num_forms: int = 1) -> int:
    """How many graphs are kept of uniform steps: for each row count, length and form, to the end and to the logits."""
    return 2 * MAX_LAYER_SETS * num_row_counts * (max_drafts + 1) * num_forms


def captured_rows(config: TargetConfig) -> tuple[int, ...]:
    """The row counts that uniform steps are padded to, ascending: those that this many seats can have a use for."""
    return tuple(rows for rows in sorted(set(config.graph_rows)) if rows < 2 * config.num_seats)


class Padding:
    """warmed: the row counts whose steps are run once before they are needed, ascending. rows: those that uniform steps
    are padded to, none where steps are not captured, for then there is nothing to be gained by it.
    """

    def __init__(self, row_counts: Sequence[int], sizes: Sizes, captures: bool) -> None:
        """row_counts: in any order. sizes: of the buffers that a padded step must fit."""
        self.warmed = tuple(sorted(set(row_counts)))
        self.rows = self.warmed if captures else ()
        self._sizes = sizes

    def padded_rows(self, num_rows: int, query_len: int) -> int | None:
        """How many rows a uniform step of num_rows is padded to; None: such a step runs as it is."""
        place = bisect.bisect_left(self.rows, num_rows)
        if num_rows == 0 or place == len(self.rows):
            return None
        padded = self.rows[place]
        sizes = self._sizes
        fits = padded <= sizes.max_rows and padded * query_len <= sizes.max_tokens and query_len <= sizes.max_drafts + 1
        return padded if fits else None
