"""A rank's parameters, gradients and optimizer."""
