"""One way to run an operator, or to store a parameter, over a mesh axis: what the solver chooses from (`strategies.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from torch.fx import Node

from autoptd.ir.layout import Layout

WHOLE = "whole on every rank"


@dataclass(frozen=True)
class Strategy:
    """The types of each operand (I for values without parameters) and of the result, the cost, the reason, the local form."""

    needs: dict[Node, Layout]
    gives: Layout
    seconds: float
    why: str
    form: str = ""

    @property
    def is_split(self) -> bool:
        """Whether ranks compute, or store, different parts of something."""
        return any(types.shards for types in (self.gives, *self.needs.values()))

    @property
    def is_whole(self) -> bool:
        """Whether every rank computes, or stores, all of it."""
        return self.gives.is_whole and not self.is_split


__all__ = ["WHOLE", "Strategy"]
