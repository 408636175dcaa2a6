"""Hostile cases, second round: repairs of optimizers, buffers, precision, state in Python, loops and names, attacked from outside."""
