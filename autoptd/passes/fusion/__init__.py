"""Fused-op substitution: patterns in the graph, and what stands in their place."""
