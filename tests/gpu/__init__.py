"""What is only true on a GPU, through the real processes; skipped, with the reason, where there is none."""
