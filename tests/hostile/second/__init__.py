"""Hostile cases, second round: optimizers, buffers, precision, Python state, loops and names, attacked from outside."""
