"""Checkpoints: the state of a run in a folder, which any mesh reads. `autoptd/state.py` has the verbs."""
