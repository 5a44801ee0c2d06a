"""Attention over a paged cache behind one interface: plan once a step, run once a layer."""
