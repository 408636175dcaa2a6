"""Predict the time and memory of a step from descriptions of the model and the cluster, and search for plans."""
