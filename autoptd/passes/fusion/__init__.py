"""Fuse operators: patterns in the graph, and the operators that replace them."""
