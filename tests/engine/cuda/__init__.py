"""Tests of engine/cuda that need no GPU."""
