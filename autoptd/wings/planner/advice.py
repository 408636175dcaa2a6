"""Suggest a request that fits if none does, by changing one thing at a time until a change helps.

In: a request for which the search found nothing. Out: the fact and the remedy of a PlanError. Every remedy
is verified by a search, and named with the plan that it finds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from autoptd.wings.planner.candidate import is_missing
from autoptd.wings.planner.default import DefaultModel
from autoptd.wings.planner.request import Request
from autoptd.wings.planner.search import Found, search
from autoptd.wings.planner.setting import RECOMPUTE

# The number of times the GPUs are doubled to find a count on which something fits.
MAX_DOUBLINGS = 10
# Column of the search -> keyword of `plan`.
DEGREE_NAMES = {"b": "microbatch", **{name: name for name in "tpdcv"}}
# The number of smaller GPU counts that are tried if the count itself is the obstacle.
MAX_FEWER_GPUS = 64


def what_would_fit(request: Request, found: Found) -> tuple[str, str]:
    """Return fact and remedy: the size that is too large, and each single change that makes something fit."""
    where = f"{counted(request.gpus)} of {request.cluster.name}"
    capacity = request.memory_bytes / 1e9
    if found.least_memory_config:
        degrees = " ".join(f"{name}={found.least_memory_config[name]}" for name in ("t", "p", "d", "b"))
        needed = f"{found.least_memory / 1e9:,.1f} of {capacity:,.0f} GB"
        fact = f"nothing fits on {where}: the smallest, {degrees}, needs {needed}"
    else:
        reasons = ", ".join(f"{reason} ({count:,} times)" for reason, count in found.rejected.items())
        fact = f"there is no such plan on {where}: {reasons or 'no degrees meet the constraints'}"
    helps = []
    for text, changed in _changes(request):
        if _fits(changed):
            helps.append(f"{text}{_finds(changed)}")
    more = more_gpus(lambda count: _fits(request.but(gpus=count)), request.gpus)
    if more:
        helps.append(more)
    # No single change of the request helps, but all memory savings together may.
    if len(helps) == bool(more):
        helps += _everything(request, more)
    if not helps:
        counts = range(request.gpus - 1, max(request.gpus - MAX_FEWER_GPUS, 0), -1)
        fewer = next((count for count in counts if _fits(request.but(gpus=count))), 0)
        helps = [counted(fewer) if fewer else "a smaller model, or fewer constraints"]
    return fact, "; or ".join(helps)


def _everything(request: Request, more: str) -> list[str]:
    """Return the first of `_savings` that fits, or that fits on fewer GPUs than `more`, as a list of one.

    Return an empty list if none does.
    """
    savings = list(_savings(request))
    for text, changed in savings:
        if _fits(changed):
            return [text + _finds(changed)]
    for text, changed in savings:
        count = more_gpus(lambda gpus, changed=changed: _fits(changed.but(gpus=gpus)), request.gpus)  # type: ignore[misc]
        if count and count != more:
            return [f"{text}, on {count}"]
    return []


def _savings(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield requests with all memory savings at once: first with the requested degrees, then with sequence
    parallelism, then without fixed degrees.
    """
    names = ["recompute='full'", "zero=3"]
    changed = request.but(recompute=("full",), zero=(3,))
    if request.precision == "fp32":
        names.append("precision='bf16'")
        changed = changed.but(precision="bf16")
    mark = _mark("recompute", "full")
    yield f"{_joined(names)} together{mark}", changed
    if True not in request.sequence_parallel:
        names.append("sequence_parallel=True")
        changed = changed.but(sequence_parallel=(True,))
        yield f"{_joined(names)} together{mark}", changed
    if request.pinned:
        degrees = _joined([DEGREE_NAMES[column] for column in request.pinned])
        yield f"{_joined(names)} together{mark} and {degrees} left open", changed.but(pinned={})


def _changes(request: Request) -> Iterator[tuple[str, Request]]:
    """Yield the request with one thing changed, and the keyword for it."""
    for column, values in request.pinned.items():
        free = {key: value for key, value in request.pinned.items() if key != column}
        yield f"another {DEGREE_NAMES[column]} than {_listed(values)}", request.but(pinned=free)
    if True not in request.sequence_parallel:
        yield "sequence_parallel=True", request.but(sequence_parallel=(True,))
    # Start with the cheapest: each mode keeps less than the one before and recomputes more.
    for mode in RECOMPUTE[1:]:
        if mode not in request.recompute:
            yield f"recompute={mode!r}{_mark('recompute', mode)}", request.but(recompute=(mode,))
    for stage in (1, 2, 3):
        if stage not in request.zero:
            yield f"zero={stage}{_mark('zero', stage)}", request.but(zero=(stage,))
    if request.precision == "fp32":
        yield f"precision='bf16'{_mark('precision', 'bf16')}", request.but(precision="bf16")


def more_gpus(fits: Callable[[int], bool], gpus: int) -> str:
    """Return the first doubling at which something fits (`2048 GPUs`), "" where none of `MAX_DOUBLINGS`
    does.
    """
    for doublings in range(1, MAX_DOUBLINGS + 1):
        count = gpus * 2**doublings
        if fits(count):
            return counted(count)
    return ""


def counted(gpus: int) -> str:
    """Return `1 GPU`, `8 GPUs`."""
    return f"{gpus} GPU{'s' * (gpus != 1)}"


def _fits(request: Request) -> bool:
    return len(search(DefaultModel(request), 1, request.only)) > 0


def _finds(request: Request) -> str:
    """Return the plan that would be found: ` (t=8 p=16 d=1)`."""
    columns = search(DefaultModel(request), 1, request.only).columns
    return f" ({' '.join(f'{name}={int(columns[name][0])}' for name in ('t', 'p', 'd', 'b'))})"


def _mark(keyword: str, value: Any) -> str:
    return " (not in the runtime yet)" if is_missing(keyword, value) else ""


def _joined(words: list[str]) -> str:
    """Join words: `a, b and c`."""
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]


def _listed(values: tuple[int, ...]) -> str:
    return " or ".join(map(str, values))


__all__ = ["counted", "what_would_fit"]
