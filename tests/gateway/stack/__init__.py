"""Tests of the supervisor, the command line and the quickstart."""
