"""How does rank 0 lead the others into a step?

By its order on the board, after which there is no way back: an error in what follows would leave the other ranks in
collectives that nobody completes, so it ends the target.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from engine.errors import RanksLost
from target_service.pcp.order import LaunchOrder, StepOrder
from target_service.pcp.ranks import Ranks


class Lead:
    """Owner of the orders' numbers. Used by one thread. seq: of the last order."""

    def __init__(self, ranks: Ranks, timeout_s: float) -> None:
        """timeout_s: how long the board may have no room."""
        self.seq = 0
        self._ranks = ranks
        self._timeout_s = timeout_s

    @contextlib.contextmanager
    def step(self, order: StepOrder | LaunchOrder) -> Iterator[None]:
        """The other ranks have the order when this is entered; what is inside is this rank's share. RanksLost when a
        rank is gone, or this one failed after the others had begun.
        """
        ranks = self._ranks
        if ranks.lost:
            raise RanksLost("a rank is gone")
        self.seq += 1
        try:
            ranks.board.publish(order, self.seq, self._timeout_s, lambda: ranks.lost)
            yield
        except RanksLost:
            raise
        except Exception as error:  # whatever it is, the others cannot go on without this rank
            if (loss := ranks.loss_behind(error)) is not None:
                raise RanksLost(f"step {self.seq}: {loss}") from None
            raise RanksLost(f"step {self.seq} over {ranks.board.num_ranks} ranks failed: {error}") from error
