"""Prefill-context parallelism: one target as several ranks that share out a step's tokens.

Rank 0 is the service: it alone has requests, blocks, sampling and channels. What the others must know of a step comes
in one order (`order.py`) through shared memory (`board.py`); what they compute comes back through collectives.
"""
