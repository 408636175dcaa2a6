"""Checkpoints: the state of a run in a folder, which any mesh reads. `autoptd/model/checkpoints.py` has the verbs."""
