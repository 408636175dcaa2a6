"""Choose the values that are kept for backward, and those that it recomputes."""
