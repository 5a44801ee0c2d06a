"""Paged attention behind one interface: plan once a step, run once a layer (interface.py)."""
