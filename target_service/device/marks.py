"""Which are the points of a target's step?

It begins, has its drafts (or has waited in vain), has its logits or verdicts, and has ended.
"""

from __future__ import annotations

from engine.step_marks import NUM_POINTS, StepMarks

BEGAN, WAITED, FORWARDED, ENDED = range(NUM_POINTS)
Marks = StepMarks
