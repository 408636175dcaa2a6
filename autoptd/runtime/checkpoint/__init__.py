"""Checkpoints: the state of a run in a folder, which any mesh reads. `autoptd/model/state.py` has the verbs."""
