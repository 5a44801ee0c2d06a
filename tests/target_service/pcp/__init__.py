"""Tests of ranks: sharded steps, the board, processes that die."""
