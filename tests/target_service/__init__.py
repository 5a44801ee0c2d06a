"""Tests of the target service."""
