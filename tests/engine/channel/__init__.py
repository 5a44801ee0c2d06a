"""Tests of engine/channel."""
