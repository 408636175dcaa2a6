"""Count the executed arithmetic of a rank: matrix products in FLOPs, other operators in elements written.

In: a rank that runs emitted stages under a `Counting` mode. Out: `Work`, summed by stage, phase and emitted line;
operators outside emitted lines (sums of gradients, the loss, deferred weight gradients) have no module. A matrix product
is 2 FLOPs per multiply-add; attention counts both of its products in full (no discount for a causal mask), its fused
backward five, since it computes the scores again. The formulas are torch's (`torch.utils.flop_counter`): for the weight
gradient of a grouped convolution they count the FLOPs of one group.

    with Counting(executor.files(), lambda: world.at) as counting:
        executor.step(microbatches)
    sum_work(0, [counting])

An operator in backward counts for the line whose autograd node runs it: nodes are matched by their sequence numbers.
"""

from __future__ import annotations

import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autoptd.compat import TorchDispatchMode, autograd_node_number, last_node_number
from autoptd.errors import InternalError
from autoptd.ir.actions import phase_of
from autoptd.program.program import Program
from autoptd.program.specs import Line
from autoptd.runtime.step.stage import RECIPE


@dataclass(frozen=True)
class Work:
    """What one rank computes for one emitted line (of a repeated layer: for all of its layers) in one phase.

    `is_whole`: every tensor rank computes it in full. `times` counts the operators that ran, `flops` the FLOPs of matrix
    products, `elements` the elements that all other operators wrote.
    """

    rank: int
    stage: int
    phase: str
    module: str
    operator: str
    is_whole: bool
    times: int
    flops: int
    elements: int


# File and line number.
Place = tuple[str, int]


class Counting(TorchDispatchMode):
    """A mode that counts what its thread computes.

    `files` are the programs by the names of their emitted files; `at` returns the action being executed.
    """

    def __init__(self, files: Mapping[str, Program], at: Callable[[], str]) -> None:
        super().__init__()
        self.lines: dict[Place, Line] = {}
        for file, program in files.items():
            self.lines |= {(file, line.number): line for line in program.lines if line.file in file}
        # By (phase, stage), place, and "flops", "elements" or "times".
        self.counts: Counter[tuple[tuple[str, int], Place | None, str]] = Counter()
        self._files, self._at = set(files), at
        self._line_of_node: dict[int, Place] = {}
        self._is_paused = False
        # Whether the operator that runs is one of a recipe (`runtime/ops/recompute.py`), in programs that have some.
        self._is_again = False
        self._has_recipes = any(
            f"{RECIPE}(" in text for program in files.values() for text in program.sources.values()
        )

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing in a `with` block."""
        before, self._is_paused = self._is_paused, True
        try:
            yield
        finally:
            self._is_paused = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        place = None if self._is_paused else self._place()
        out = func(*args, **(kwargs or {}))
        if not self._is_paused:
            self._count(func, args, out, place)
        return out

    def _count(self, func: Any, args: Any, out: Any, place: Place | None) -> None:
        when = phase_of(self._at())
        if place is not None and when[0] == "backward" and self._is_again:
            when = ("recompute", when[1])
        flops = count_flops(func, args, out)
        if flops is not None:
            self.counts[when, place, "flops"] += flops
            self.counts[when, place, "times"] += 1
        elif not _moves_nothing(func):
            results = out if isinstance(out, (tuple, list)) else [out]
            written = sum(result.numel() for result in results if isinstance(result, torch.Tensor))
            self.counts[when, place, "elements"] += written
            self.counts[when, place, "times"] += 1

    def _place(self) -> Place | None:
        """Return the emitted line that runs, or that made the autograd node that runs."""
        number = autograd_node_number()
        # In backward, the lines of a recipe run within the node that needs their values.
        self._is_again = number is not None and self._has_recipes
        if number is not None and not self._is_again:
            return self._line_of_node.get(number)
        # In forward: the innermost emitted line on the stack. Autograd made the node of this operator before dispatching it.
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                place = (frame.f_code.co_filename, frame.f_lineno)
                if number is None:
                    self._line_of_node.setdefault(last_node_number(), place)
                return place
            frame = frame.f_back  # type: ignore[assignment]
        self._is_again = False
        return None if number is None else self._line_of_node.get(number)


def sum_work(rank: int, runs: Iterable[Counting]) -> list[Work]:
    """Sum what a rank computed in some runs, in order of phase and stage; lines that differ in the layer only are one."""
    sums_of: dict[tuple[Any, ...], Counter[str]] = {}
    for run in runs:
        for ((phase, stage), place, what), amount in run.counts.items():
            key: tuple[Any, ...] = (phase, stage, "", "", False)
            if place in run.lines:
                line = run.lines[place]
                key = (phase, stage, line.module, line.operator, line.is_whole)
            sums_of.setdefault(key, Counter())[what] += amount
    works = [
        Work(rank, stage, phase, module, operator, is_whole, sums["times"], sums["flops"], sums["elements"])
        for (phase, stage, module, operator, is_whole), sums in sums_of.items()
    ]

    def order(work: Work) -> tuple[Any, ...]:
        return PHASES.index(work.phase), work.stage, work.module, work.operator, work.is_whole

    return sorted(works, key=order)


PHASES = ("forward", "backward", "recompute", "step")


def _moves_nothing(func: Any) -> bool:
    """Tell whether an operator is a view, or only allocates."""
    returns = func._schema.returns
    # A result that aliases an argument, and is not written, is a view of it.
    is_view = any(result.alias_info is not None and not result.alias_info.is_write for result in returns)
    return is_view or func._schema.name in SILENT or not returns


SILENT = {
    "aten::detach",
    "aten::_unsafe_view",
    "aten::empty",
    "aten::empty_like",
    "aten::new_empty",
    "aten::empty_strided",
}


def count_flops(func: Any, args: tuple[Any, ...], out: Any) -> int | None:
    """Return the FLOPs of a call of an operator made of products, by torch's own formulas; None for other operators.

    InternalError for a product that no formula counts: counting it as 0 would go unnoticed.
    """
    # Imported here: it loads Triton, a tenth of a second.
    from torch.utils.flop_counter import flop_registry

    if func.overloadpacket in VECTOR_PRODUCTS:
        return 2 * math.prod(args[VECTOR_PRODUCTS[func.overloadpacket]].shape)
    packet = SAME_PRODUCTS.get(func.overloadpacket, func.overloadpacket)
    formula, name = flop_registry.get(packet), str(packet).removeprefix("aten.")
    if formula is not None:
        if name.startswith("_scaled_dot_product"):
            # Query, key and value; in backward, the gradient of the result before them.
            args = _with_equal_heads(args, 4 if name.endswith("backward") else 3)
        return int(formula(*args, out_val=out))
    if UNKNOWN_PRODUCT.search(name):
        raise InternalError(f"record: aten.{name}", "no formula counts its products")
    return None


def _with_equal_heads(args: tuple[Any, ...], tensors: int) -> tuple[Any, ...]:
    """Give key and value as many heads as the query has: torch 2.11 requires that, and the products are the same.

    To be deleted when the oldest supported torch is 2.12, whose formulas handle grouped queries.
    """
    heads = args[0].shape[1]
    return (*(tensor[:, :1].expand(-1, heads, -1, -1) for tensor in args[:tensors]), *args[tensors:])


aten = torch.ops.aten
UNKNOWN_PRODUCT = re.compile(r"mm_?$|conv|attention|linear_?(backward)?$")
# Operators missing from the registry -> one in it with the same products of the same arguments.
SAME_PRODUCTS = {
    aten.addmm_: aten.addmm,
    aten.baddbmm_: aten.baddbmm,
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
# Products with a vector, missing too -> the argument each of whose elements is multiplied once.
VECTOR_PRODUCTS = {aten.mv: 0, aten.dot: 0, aten.vdot: 0, aten.addmv: 1, aten.addmv_: 1}
