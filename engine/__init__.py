"""What do target and drafter share? The model, its weights, its KV cache and blocks, and the channel between them."""
