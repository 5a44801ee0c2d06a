"""Tests of steps that are launched ahead of the verdicts, on tensors of the CPU."""
