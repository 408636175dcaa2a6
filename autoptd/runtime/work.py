"""Count the arithmetic of a rank as it is executed: matrix products in FLOPs, all other operators in elements written.

In: a rank that runs emitted stages under a `Counting` mode. Out: `Work`, summed by stage, phase and emitted line; what belongs
to no line (sums of gradients, the loss, weight gradients that waited for their W) has no module. A matrix product is 2 FLOPs
per multiply-add; attention counts both of its products in full (no discount for a causal mask), its fused backward five,
since it computes the scores again.

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

from autoptd.compat import TorchDispatchMode, autograd_node_number, last_node_number
from autoptd.errors import InternalError
from autoptd.ir.actions import phase_of
from autoptd.program.program import Program

Shape = tuple[int, ...]


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
            (file, line.number): line for file, program in files.items() for line in program.lines if line.file in file
        }
        self.counts: Counter[tuple[tuple[str, int], Place | None, str]] = Counter()  # (phase, stage), line, what
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
        name = str(func._schema.name).removeprefix("aten::")
        when = phase_of(self._at())
        if name in GEMM_FLOPS:
            self.counts[when, place, "flops"] += GEMM_FLOPS[name](*map(_shape, args))
            self.counts[when, place, "times"] += 1
        elif UNKNOWN_PRODUCT.search(name):
            raise InternalError(f"record: aten.{name}", "no formula counts its products")
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


def _shape(value: Any) -> Any:
    return tuple(value.shape) if isinstance(value, torch.Tensor) else value


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


def _mm(a: Shape, b: Shape, *rest: Any) -> int:
    return 2 * math.prod(a) * b[-1]


def _attention(query: Shape, key: Shape, value: Shape, *rest: Any) -> int:
    """Scores, and their product with the values."""
    return 2 * math.prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(grad: Any, query: Shape, key: Shape, value: Shape, *rest: Any) -> int:
    """Scores again; gradients of values, of scores, of queries and of keys."""
    return 2 * math.prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


UNKNOWN_PRODUCT = re.compile(r"mm_?$|conv|attention|linear_?(backward)?$")
FUSED = [f"_scaled_dot_product_{kind}attention" for kind in ("flash_", "efficient_", "cudnn_")]
GEMM_FLOPS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("mm", "bmm"), _mm),
    **dict.fromkeys(("addmm", "addmm_", "baddbmm", "baddbmm_"), lambda bias, a, b, *rest: _mm(a, b)),
    **dict.fromkeys(("mv", "dot", "vdot"), lambda a, b, *rest: 2 * math.prod(a)),
    **dict.fromkeys(("addmv", "addmv_"), lambda bias, a, b, *rest: 2 * math.prod(a)),
    "_scaled_dot_product_flash_attention_for_cpu": _attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    **dict.fromkeys(FUSED, _attention),
    **{f"{name}_backward": _attention_backward for name in FUSED},
}
