"""Models without memory: what their constructors do is recorded, and replayed where the weights are needed."""
