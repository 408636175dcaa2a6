"""Differences between torch releases (2.11 to 2.13), and every private import, in one place."""

from __future__ import annotations

from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

__all__ = ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
