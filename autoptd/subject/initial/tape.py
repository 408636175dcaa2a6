"""The operators of a constructor, in their order, and which of them make a tensor.

A tensor is a *place*: a storage, by number, and how the tensor lies in it. So views need no operator, and
`weight[:3].normal_()` is one that writes to the storage of `weight`.

    tape.steps[3]                     # uniform_ on Place(storage=0, ...)
    tape.makers([0])                  # [3]: it overwrites everything, the allocation before it is not needed
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoptd.subject.initial.streams import Draw


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor: its storage, by number, and how it lies there."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """A tensor with values, as it was when an operator read it."""

    value: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One operator: its operands with places for tensors, and the storages that it reads and writes.

    `covered` are those that it overwrites altogether. `default` is torch's default dtype at the time.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Place, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    covered: frozenset[int]
    default: torch.dtype
    draw: Draw | None = None


class Tape:
    """What was recorded under a seed. With `order`, all draws follow one another as in torch."""

    def __init__(self, seed: int, order: bool) -> None:
        self.seed, self.order = seed, order
        self.steps: list[Step] = []
        # By storage: its bytes, and the steps that write to it, ascending.
        self.sizes: list[int] = []
        self.writers: list[list[int]] = []
        # The states in which streams of draws begin (streams.py).
        self.roots: list[Tensor] = []
        # Draws whose values were asked for, numbered: they need a seed before tensors have names.
        self.asked: dict[int, int] = {}

    def add(self, step: Step) -> None:
        for storage in step.writes:
            self.writers[storage].append(len(self.steps))
        self.steps.append(step)

    def is_named(self, number: int) -> bool:
        """Tell whether a step draws from a seed of its own, and not in its turn from a stream."""
        draw = self.steps[number].draw
        return draw is not None and draw.root == 0 and not self.order

    def draws_down_to(self, number: int | None, known: Container[int]) -> list[int]:
        """Return the draws of a stream down to step `number`, in order, from the first one that is not `known`."""
        found: list[int] = []
        while number is not None and number not in known:
            found.append(number)
            draw = self.steps[number].draw
            assert draw is not None
            number = draw.before
        return found[::-1]

    def makers(self, storages: Iterable[int], before: int | None = None) -> list[int]:
        """Return the steps, ascending, that make what the storages hold (before step `before` runs)."""
        chosen: list[int] = []
        needed = set(storages)
        # Of each storage that is needed the last writer before the steps that were looked at; the greatest first.
        waiting: list[int] = []

        def follow(storage: int, end: int) -> None:
            place = bisect.bisect_left(self.writers[storage], end)
            if place:
                heapq.heappush(waiting, -self.writers[storage][place - 1])

        for storage in needed:
            follow(storage, len(self.steps) if before is None else before)
        while waiting:
            number = -heapq.heappop(waiting)
            while waiting and waiting[0] == -number:
                heapq.heappop(waiting)
            chosen.append(number)
            step = self.steps[number]
            for storage in step.writes & needed:
                if storage in step.covered:
                    needed.discard(storage)
                else:
                    follow(storage, number)
            for storage in step.reads - needed:
                needed.add(storage)
                follow(storage, number)
        return chosen[::-1]


__all__ = ["Constant", "Place", "Step", "Tape"]
