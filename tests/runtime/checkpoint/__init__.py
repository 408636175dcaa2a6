"""Checkpoints: what ranks hold, the files, and what comes back from them."""
