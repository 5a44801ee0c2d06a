"""Tests of drafter_service.training."""
