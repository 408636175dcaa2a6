"""Kernels: a plain form of each in torch, and a fast one where there is a device for it."""
