"""Model, weights, KV cache and block pool: what target and drafter share."""
