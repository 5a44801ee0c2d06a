"""Drafting that never waits on the host: a plan is enqueued when it comes, its outcome read back once it is done.

steps.py runs plans; plan_buffers.py, seat_tables.py and shapes.py prepare what the host says of one; eagle3.py and
draft_model.py are what a step does on the device between the kernels `take_entry` and `finish_reply`; metadata.py is
their attention metadata, completion.py the thread that waits for the device.
"""
