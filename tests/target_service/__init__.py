"""Tests of target_service."""
