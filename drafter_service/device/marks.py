"""Which are the points of a drafter's step?

The wait for the entry begins, and is over; draft prefill and first draft are done; everything is.
"""

from __future__ import annotations

from engine.step_marks import NUM_POINTS

ASKED, BEGUN, PREFILLED, DONE = range(NUM_POINTS)
