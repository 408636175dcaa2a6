"""Count the arithmetic of a rank as it is executed: matrix products in FLOPs, all other operators in elements written.

In: a rank that runs emitted stages under a `Counting` mode. Out: `Work`, summed by stage, phase and emitted line; what belongs
to no line (sums of gradients, the loss, weight gradients that waited for their W) has no module. A matrix product is 2 FLOPs
per multiply-add; attention counts both of its products in full (no discount for a causal mask), its fused backward five,
since it computes the scores again. The formulas are torch's (`torch.utils.flop_counter`): for the weight's gradient of a
convolution of several groups they count what one group would take.

    with Counting(executor.files(), lambda: world.at) as counting:
        executor.step(microbatches)
    sum_work(0, [counting])

An operator in backward is charged to the line whose autograd node runs it: nodes and forward operators meet by sequence number.
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
from torch.utils.flop_counter import flop_registry

from autoptd.compat import TorchDispatchMode, autograd_node_number, last_node_number
from autoptd.errors import InternalError
from autoptd.ir.actions import phase_of
from autoptd.program.program import Program


@dataclass(frozen=True)
class Work:
    """What one rank computes for one emitted line (a repeated layer: for all of its layers) in one phase.

    `is_whole`: every tensor rank computes the same in full. `times` operators ran; `flops` are those of matrix products,
    `elements` those that all others wrote.
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


Place = tuple[str, int]  # file, line


class Counting(TorchDispatchMode):
    """A mode that counts what the thread it is entered in computes.

    `files` are the programs by the names of their emitted files; `at` gives the action being executed.
    """

    def __init__(self, files: Mapping[str, Program], at: Callable[[], str]) -> None:
        super().__init__()
        self.lines = {
            (file, line.number): line
            for file, program in files.items()
            for line in program.lines
            if line.file in file
        }
        self.counts: Counter[tuple[tuple[str, int], Place | None, str]] = (
            Counter()
        )  # (phase, stage), line, what
        self._files, self._at = set(files), at
        self._line_of_node: dict[int, Place] = {}
        self._is_paused = False

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Count nothing meanwhile."""
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
        flops = count_flops(func, args, out)
        if flops is not None:
            self.counts[when, place, "flops"] += flops
            self.counts[when, place, "times"] += 1
        elif not _moves_nothing(func):
            results = out if isinstance(out, (tuple, list)) else [out]
            written = sum(one.numel() for one in results if isinstance(one, torch.Tensor))
            self.counts[when, place, "elements"] += written
            self.counts[when, place, "times"] += 1

    def _place(self) -> Place | None:
        """The emitted line that runs, or that made the autograd node that runs."""
        number = autograd_node_number()
        if number is not None:
            return self._line_of_node.get(number)
        frame = sys._getframe(2)
        while frame is not None:
            if frame.f_code.co_filename in self._files:
                place = (frame.f_code.co_filename, frame.f_lineno)
                self._line_of_node.setdefault(last_node_number(), place)
                return place
            frame = frame.f_back  # type: ignore[assignment]
        return None


def sum_work(rank: int, runs: Iterable[Counting]) -> list[Work]:
    """What a rank computed in some runs, in order of phase and stage; lines that are equal but for the layer are one."""
    found: dict[tuple[Any, ...], Counter[str]] = {}
    for run in runs:
        for ((phase, stage), place, what), amount in run.counts.items():
            key: tuple[Any, ...] = (phase, stage, "", "", False)
            if place in run.lines:
                line = run.lines[place]
                key = (phase, stage, line.module, line.operator, line.is_whole)
            found.setdefault(key, Counter())[what] += amount
    ordered = sorted(found.items(), key=lambda one: (PHASES.index(one[0][0]), one[0][1:]))
    return [
        Work(rank, stage, phase, module, operator, is_whole, sums["times"], sums["flops"], sums["elements"])
        for (phase, stage, module, operator, is_whole), sums in ordered
    ]


PHASES = ("forward", "backward", "step")


def _moves_nothing(func: Any) -> bool:
    """Views, and operators that only allocate."""
    returns = func._schema.returns
    is_view = any(one.alias_info is not None and not one.alias_info.is_write for one in returns)
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
    """FLOPs of a call of an operator that is made of products, by torch's own formulas; None for any other operator."""
    if func.overloadpacket in VECTOR_PRODUCTS:
        return 2 * math.prod(args[VECTOR_PRODUCTS[func.overloadpacket]].shape)
    packet = SAME_PRODUCTS.get(func.overloadpacket, func.overloadpacket)
    formula, name = flop_registry.get(packet), str(packet).removeprefix("aten.")
    if formula is not None:
        tensors = 4 if name.endswith("backward") else 3  # the result's gradient, query, key, value
        is_attention = name.startswith("_scaled_dot_product")
        return int(formula(*(_with_equal_heads(args, tensors) if is_attention else args), out_val=out))
    if UNKNOWN_PRODUCT.search(name):
        raise InternalError(f"record: aten.{name}", "no formula counts its products")
    return None


def _with_equal_heads(args: tuple[Any, ...], tensors: int) -> tuple[Any, ...]:
    """Give key and value as many heads as the query has: torch 2.11 asks for that, and the products are the same.

    To be deleted when the oldest torch is 2.12, whose formulas know of heads that queries share.
    """
    heads = args[0].shape[1]
    return (*(tensor[:, :1].expand(-1, heads, -1, -1) for tensor in args[:tensors]), *args[tensors:])


aten = torch.ops.aten
UNKNOWN_PRODUCT = re.compile(r"mm_?$|conv|attention|linear_?(backward)?$")
# Operators that the registry does not have, by the one in it that makes the same products of the same arguments.
SAME_PRODUCTS = {
    aten.addmm_: aten.addmm,
    aten.baddbmm_: aten.baddbmm,
    aten._scaled_dot_product_flash_attention_for_cpu: aten._scaled_dot_product_flash_attention,
    aten._scaled_dot_product_flash_attention_for_cpu_backward: aten._scaled_dot_product_flash_attention_backward,
}
# Products with a vector, which it has not either, by the argument each of whose elements is multiplied once.
VECTOR_PRODUCTS = {aten.mv: 0, aten.dot: 0, aten.vdot: 0, aten.addmv: 1, aten.addmv_: 1}
