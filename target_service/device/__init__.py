"""Steps that are put on the device ahead of the verdicts of those before them, and completed when those come back."""
