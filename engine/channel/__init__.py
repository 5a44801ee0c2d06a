"""The memory that target and drafter share, and the ways to wait on it."""
