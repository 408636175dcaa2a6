"""Read the user's model before compilation: its tensors, attributes and storage."""
