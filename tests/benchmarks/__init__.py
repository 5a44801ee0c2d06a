"""Tests of what the benchmarks stand on."""
