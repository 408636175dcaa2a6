"""The model as it was handed in: its tensors, attributes and storage, read before anything is compiled."""
