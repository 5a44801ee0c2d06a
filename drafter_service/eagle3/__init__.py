"""EAGLE-3 (Li et al. 2025): one decoder layer that drafts from the target's hidden states."""
