"""Tests of gateway/rest."""
