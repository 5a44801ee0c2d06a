"""The target: runs the model whose output counts, verifies drafts, owns the channel memory."""
