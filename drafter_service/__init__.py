"""The drafter: proposes tokens from its own KV cache and its own attention metadata."""
