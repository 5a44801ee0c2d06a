"""Tests of gateway/text."""
