"""Search the candidates of a cost model exactly, with bounds: S3 of Subramanian et al., arXiv:2410.00273, section 3.3.

In: a `CostModel`, which lists the candidates as columns of integers, and returns bytes and seconds for many of them at
once. Out: the best few in order, and the reasons against the rest. A candidate is a *configuration* (degrees,
microbatch size and the like) with one of its *variants* (the placement of its groups on the fast network): bytes
depend on the configuration, seconds on both. Configurations that do not fit are dropped; the others are expanded in
order of their lower bounds, until the bound exceeds the worst candidate kept. The result equals that of evaluating
everything, which tests check.

    found = search(model, keep=10)
    found.columns["p"][0], found.seconds[0]

Ties go to the smaller columns, in their order: the same problem has the same answer everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Columns = Mapping[str, NDArray[np.int64]]
Array = NDArray[np.float64]
# Configurations expanded in the first round; each later round expands four times as many.
FIRST_CONFIGS = 512
# Bounds and seconds sum in another order: they may differ by this, relative.
ROUNDING = 1e-9


@dataclass(frozen=True)
class Configs:
    """All configurations of a problem.

    `reason[i]` is an index into `reasons`, or -1 where configuration i is a candidate.
    """

    columns: Columns
    reasons: tuple[str, ...]
    reason: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.reason)


class CostModel(Protocol):
    """The interface of `search`: candidates as columns, bytes and seconds as arrays of the same length."""

    @property
    def capacity_bytes(self) -> float:
        """The memory of a rank."""

    def configs(self) -> Configs:
        """Return all configurations, with reasons for those that are not candidates."""

    def memory_bytes(self, configs: Columns) -> Array:
        """Return the bytes of the fullest rank."""

    def least_seconds(self, configs: Columns) -> Array:
        """Return a lower bound of the seconds of all variants of a configuration."""

    def variants(self, configs: Columns) -> tuple[NDArray[np.int64], Columns]:
        """Return the variants of all configurations: the configuration of each, and the columns that it adds."""

    def seconds(self, candidates: Columns) -> Array:
        """Return the seconds per step of configurations with their variants."""


@dataclass(frozen=True)
class Found:
    """The best candidates, fastest first, and counts of the rest.

    `configs`: the number of configurations; `fitting`: those that fit in memory; `evaluated`: candidates whose seconds
    were computed; `bounded`: fitting configurations whose lower bound was enough. `rejected`: configurations by
    reason. `least_memory`: bytes of the candidate that needs least, whether it fits or not.
    """

    columns: Columns
    seconds: Array
    memory: Array
    configs: int
    fitting: int
    evaluated: int
    bounded: int
    rejected: Mapping[str, int]
    least_memory: float
    least_memory_config: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.seconds)


OUT_OF_MEMORY = "does not fit in memory"
NOT_ASKED = "is excluded by the request"


Filter = Callable[[Columns], NDArray[np.bool_]]


def search(
    model: CostModel, keep: int = 10, only: Filter | None = None, at_once: int = FIRST_CONFIGS
) -> Found:
    """Return the `keep` fastest candidates that fit, exactly: what evaluating every candidate would return.

    `only` returns an array that tells which configurations are wanted. `at_once`: the number of configurations
    expanded before bounds are checked again; the answer does not depend on it.
    """
    configs = model.configs()
    wanted = configs.reason < 0
    if only is not None:
        wanted &= only(configs.columns)
    allowed = np.flatnonzero(wanted)
    # Memory depends on the configuration: what does not fit is dropped with all variants.
    columns = take(configs.columns, allowed)
    memory = model.memory_bytes(columns) if len(allowed) else np.zeros(0)
    fits = np.flatnonzero(memory <= model.capacity_bytes)
    columns, held = take(columns, fits), memory[fits]
    least = (1 - ROUNDING) * model.least_seconds(columns) if len(fits) else np.zeros(0)
    # The smallest bound first: once it exceeds the worst that is kept, nothing better can follow.
    order = np.argsort(least, kind="stable")
    best: list[tuple[Columns, Array, Array]] = []
    evaluated = done = 0
    step, worst = at_once, np.inf
    while done < len(order) and least[order[done]] <= worst:
        chosen = order[done : done + step]
        # `worst` is infinite until `keep` candidates are known, and falls from round to round.
        chosen = chosen[least[chosen] <= worst]
        where, added = model.variants(take(columns, chosen))
        candidates = {**take(columns, chosen[where]), **added}
        seconds = model.seconds(candidates) if len(where) else np.zeros(0)
        best = [_fastest([*best, (candidates, seconds, held[chosen[where]])], keep)]
        worst = best[0][1][-1] if len(best[0][1]) == keep else np.inf
        evaluated, done, step = evaluated + len(where), done + len(chosen), 4 * step
    rejected = _rejected(configs, len(allowed), len(memory) - len(fits))
    smallest: dict[str, int] = {}
    if len(memory):
        # For advice if nothing fits.
        at = allowed[np.argmin(memory)]
        smallest = {name: int(values[at]) for name, values in configs.columns.items()}
    found = best[0] if best else (take(columns, fits[:0]), np.zeros(0), np.zeros(0))
    return Found(
        *found,
        configs=len(configs),
        fitting=len(fits),
        evaluated=evaluated,
        bounded=len(order) - done,
        rejected=rejected,
        least_memory=float(memory.min(initial=np.inf)),
        least_memory_config=smallest,
    )


def _rejected(configs: Configs, allowed: int, too_large: int) -> dict[str, int]:
    """Count the rejected configurations by reason, without zeros."""
    counts = {reason: int(np.sum(configs.reason == i)) for i, reason in enumerate(configs.reasons)}
    counts[NOT_ASKED] = int(np.sum(configs.reason < 0)) - allowed
    counts[OUT_OF_MEMORY] = too_large
    return {reason: count for reason, count in counts.items() if count}


def _fastest(tables: Sequence[tuple[Columns, Array, Array]], keep: int) -> tuple[Columns, Array, Array]:
    """Return the first `keep` rows of all tables by seconds, ties by the columns in their order."""
    names = list(tables[0][0])
    columns = {}
    for name in names:
        columns[name] = np.concatenate([table[0][name] for table in tables])
    seconds = np.concatenate([table[1] for table in tables])
    memory = np.concatenate([table[2] for table in tables])
    if len(seconds) > keep:
        # Keep ties with the last row: the columns decide below.
        close = np.flatnonzero(seconds <= np.partition(seconds, keep - 1)[keep - 1])
        columns, seconds, memory = take(columns, close), seconds[close], memory[close]
    order = np.lexsort([*(columns[name] for name in reversed(names)), seconds])[:keep]
    return take(columns, order), seconds[order], memory[order]


def take(columns: Columns, index: NDArray[np.int64]) -> dict[str, NDArray[np.int64]]:
    """Return the rows `index` of a table."""
    return {name: values[index] for name, values in columns.items()}


def unique_rows(
    columns: Columns, names: Sequence[str]
) -> tuple[dict[str, NDArray[np.int64]], NDArray[np.int64]]:
    """Return the different rows of some columns, and for each row of the table which of them it is.

    Absent columns are left out.
    """
    names = [name for name in names if name in columns]
    code = np.zeros(len(columns[names[0]]), dtype=np.int64)
    for name in names:
        # Rows as numbers of mixed radix: (t, p) of (8, 12) with p up to 99 is 812.
        width = int(columns[name].max(initial=0)) + 1
        # The code of a row would no longer fit in 64 bits: number the rows so far from 0.
        if int(code.max(initial=0)) >= 2**62 // width:
            code = np.unique(code, return_inverse=True)[1]
        code = code * width + columns[name]
    _, first, back = np.unique(code, return_index=True, return_inverse=True)
    return take({name: columns[name] for name in names}, first), back


def divisors(number: int) -> list[int]:
    """Return all divisors of a positive number, in order."""
    # Each divisor up to the root pairs with one above it.
    small = [i for i in range(1, int(number**0.5) + 1) if number % i == 0]
    large = [number // i for i in small]
    return sorted({*small, *large})


def placements(
    degrees: Sequence[NDArray[np.int64]], domain: int
) -> tuple[NDArray[np.int64], list[NDArray[np.int64]]]:
    """Return every way to fill a fast domain: how many ranks of each axis share one.

    `degrees`: an array per axis, a row per configuration. The numbers of an axis divide its degree, and their
    product is `domain`; where all ranks fit in a domain, all share it. Returns the configuration of each
    placement, and an array per axis.
    """
    total = np.prod(np.stack(degrees), axis=0)
    inside = np.array(list(_factorisations(domain, len(degrees))), dtype=np.int64)
    allowed = np.ones((len(total), len(inside)), dtype=bool)
    for axis, degree in enumerate(degrees):
        allowed &= degree[:, None] % inside[None, :, axis] == 0
    # [configuration, placement]; smaller configurations follow below, all their ranks in one domain.
    allowed &= (total > domain)[:, None]
    where, which = np.nonzero(allowed)
    small = np.flatnonzero(total <= domain)
    configs = np.concatenate([small, where])
    filled = [np.concatenate([degree[small], inside[which, axis]]) for axis, degree in enumerate(degrees)]
    order = np.argsort(configs, kind="stable")
    return configs[order], [values[order] for values in filled]


def rank_order(degrees: Sequence[NDArray[np.int64]], domain: int) -> list[NDArray[np.int64]]:
    """Return how many ranks of each axis share a fast domain where ranks are numbered along the first
    axis first, and so on.

    The last axis is the pipeline's.
    """
    found, faster, ranks = [], np.ones_like(degrees[0]), np.prod(np.stack(degrees), axis=0)
    for axis, degree in enumerate(degrees):
        found.append(ranks_in_a_domain(degree, faster, ranks, domain, axis == len(degrees) - 1))
        faster = faster * degree
    return found


def ranks_in_a_domain(degree: Any, stride: Any, ranks: Any, domain: int, is_last: bool = False) -> Any:
    """Return the fewest ranks that a group along an axis has in one of the domains where it has any.

    `degree` ranks of the axis, `stride` apart in the numbering of all `ranks`; domains are `domain` ranks,
    one after the other. Groups are taken to begin wherever their size lets them: of 6 ranks on nodes of 8
    some lie 2 and 4. Of the last axis, the pipeline, what counts are stages in a row that share a domain:
    each group begins at the front of one.
    """
    steps = np.maximum(domain // stride, 1)
    whole_steps = np.minimum(degree, steps) if is_last else np.gcd(degree, steps)
    is_aligned = (degree * stride % domain == 0) & (not is_last)
    apart = np.where(is_aligned, np.minimum(degree, steps), 1)
    return np.where(ranks <= domain, degree, np.where(domain % stride == 0, whole_steps, apart))


def _factorisations(number: int, count: int) -> Iterator[tuple[int, ...]]:
    """Yield all ordered ways to write a number as a product of `count` factors."""
    if count == 1:
        yield (number,)
        return
    for first in divisors(number):
        for rest in _factorisations(number // first, count - 1):
            yield (first, *rest)
