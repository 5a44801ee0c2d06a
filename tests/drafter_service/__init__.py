"""Tests of drafter_service."""
