"""Tests of the drafter's device execution, on a CPU."""
