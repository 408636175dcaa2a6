"""One step of a rank: its actions, its messages, its stages."""
