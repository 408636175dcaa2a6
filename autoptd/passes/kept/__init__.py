"""Which values are kept for backward, and which are made again there."""
