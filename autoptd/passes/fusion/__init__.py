"""Fused-op substitution: patterns in the graph, and what stands in their place."""

from autoptd.passes.fusion.fuse import Groups, find_fusions, substitute

__all__ = ["Groups", "find_fusions", "substitute"]
