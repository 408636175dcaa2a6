"""The values that a program saves for backward, the price that ranks paid to save fewer (recompute="auto"),
and a plan's pins for both.

In: the result of `passes.keep`. Out: `Kept`, and the entries of `keep` in `plan.json`: the rate of a pipeline
rank, or how the values of some modules are kept. `SavedForBackward` is the memory that every operator saves
(`compiler/saved.py` finds it).

    Rate(price=0.0, more=1e-9, share=0.25).of_layers(4)     # [1e-9, 0.0, 0.0, 0.0]
    read_keep([{"pattern": "*.mlp.gelu", "way": "again"}])  # ((), (KeepPin("*.mlp.gelu", "again"),))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple

from autoptd.errors import PlanError

# Options read plans, and `autoptd --help` loads no torch.
if TYPE_CHECKING:
    import torch
    from torch.fx import Node


class Rate(NamedTuple):
    """Seconds that a pipeline rank pays to save one byte less per microbatch.

    It pays `more` in the first `share` of every stage's layers, whose backward comes last, and `price` in the
    others.
    """

    price: float
    more: float
    share: float

    def of_layers(self, count: int) -> list[float]:
        """Return the price in each of a stage's layers."""
        # A quarter of four layers is one, despite rounding.
        dearer = math.ceil(self.share * count - 1e-9)
        return [self.more] * dearer + [self.price] * (count - dearer)


class KeepPin(NamedTuple):
    """How the results of the modules or operators matching `pattern` are kept: `whole`, as a `shard`, or made
    `again`.
    """

    pattern: str
    way: str

    def __str__(self) -> str:
        return f"{self.pattern} {HOW[self.way]}"


HOW = {"whole": "kept whole", "shard": "kept as a shard", "again": "made again"}


@dataclass(frozen=True)
class Kept:
    """Per stage: bytes saved per microbatch, and seconds to recompute the rest; per pipeline rank its rate
    ("auto").
    """

    nbytes: tuple[int, ...]
    again: tuple[float, ...]
    rates: tuple[Rate, ...] = ()


class KeptValue(NamedTuple):
    """A value that backward needs: the module and the operator that compute it, its bytes, whether it is dropped, the
    seconds to recompute it by its own operator alone (infinite if it cannot be), and the most microbatches in flight.
    """

    module: str
    operator: str
    nbytes: int
    is_dropped: bool
    seconds: float
    in_flight: int


def rows_of(rates: Sequence[Rate], pins: Sequence[KeepPin]) -> list[dict[str, Any]]:
    """Return rates and pins as entries of a plan."""
    priced = [{"rank": rank, **rate._asdict()} for rank, rate in enumerate(rates)]
    return [*priced, *(pin._asdict() for pin in pins)]


def read_keep(rows: Sequence[Any]) -> tuple[tuple[Rate, ...], tuple[KeepPin, ...]]:
    """Return the rates and the pins in a plan; PlanError for an entry that is neither."""
    rates: list[Rate] = []
    pins: list[KeepPin] = []
    for row in rows:
        if isinstance(row, dict) and not row.keys().isdisjoint(KeepPin._fields):
            pins.append(_read_pin(row))
        else:
            rates.append(_read_rate(row, len(rates)))
    return tuple(rates), tuple(pins)


def _read_pin(row: dict[str, Any]) -> KeepPin:
    is_pin = row.keys() == {*KeepPin._fields} and isinstance(row["pattern"], str)
    if not is_pin or row["way"] not in HOW:
        remedy = '{"pattern": "*.mlp.gelu", "way": "again"}, or "whole" or "shard"'
        raise PlanError("plan: keep", f"invalid entry {row!r}", remedy)
    return KeepPin(**row)


def _read_rate(row: Any, rank: int) -> Rate:
    """Return the rate of a pipeline rank; PlanError if it is missing, or belongs to another rank."""
    numbers = row if isinstance(row, dict) else {}
    rate = [numbers.get(name) for name in Rate._fields]
    is_rate = set(numbers) == {"rank", *Rate._fields} and numbers["rank"] == rank
    if not is_rate or not all(isinstance(x, (int, float)) and x >= 0 for x in rate):
        remedy = (
            f'{{"rank": {rank}, "price": 0.0, "more": 1e-9, "share": 0.25}}, in seconds per byte; or leave '
            '"keep" out'
        )
        raise PlanError("plan: keep", f"is {row!r} for pipeline rank {rank}", remedy)
    return Rate(*map(float, rate))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Storage:
    """Memory that an operator allocates: its result number `piece`, or, with -1 and below, internal memory."""

    node: Node
    piece: int
    nbytes: int

    @property
    def is_private(self) -> bool:
        return self.piece < 0


class Value(NamedTuple):
    """A tensor of a rank: a view of a storage."""

    storage: Storage
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    requires_grad: bool


@dataclass
class SavedForBackward:
    """The tensors of every node, and the storages that its operator saves."""

    values: dict[Node, tuple[Value, ...]] = field(default_factory=dict)
    of: dict[Node, frozenset[Storage]] = field(default_factory=dict)

    def storage(self, node: Node) -> Storage:
        return self.values[node][0].storage
