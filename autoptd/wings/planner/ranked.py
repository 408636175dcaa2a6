"""Hold the results of a search: the best candidates in order, and the problem, for later queries.

In: the cost model, the filter and the counts of one search. Out: `RankedCandidates`, which `tables` prints
and `explain` puts into words; `fastest(only)` searches the same problem again among some of its candidates.

    ranked.best.name
    ranked.fastest(lambda configs: configs["t"] > 8)      # the best with t over 8, None where none fits
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoptd.wings.planner.candidate import Candidate
from autoptd.wings.planner.default import DefaultModel
from autoptd.wings.planner.search import Columns, Filter, Found, search


@dataclass(frozen=True)
class RankedCandidates:
    """What the planner found: `candidates`, the best first; `found`, the counts of the search.

    `model` and `only` are the problem, for the further searches of `explain`. `node`: GPUs on a fast
    network; `capacity_bytes` of a GPU.
    """

    candidates: tuple[Candidate, ...]
    found: Found
    model: DefaultModel
    only: Filter | None
    gpus: int
    node: int

    @property
    def best(self) -> Candidate:
        return self.candidates[0]

    @property
    def capacity_bytes(self) -> float:
        return self.model.capacity_bytes

    @property
    def rejected(self) -> Mapping[str, int]:
        """The number of rejected configs (degrees, microbatch, switches) by reason."""
        return self.found.rejected

    def fastest(self, only: Filter) -> Candidate | None:
        """Find the best candidate among the configurations that `only` wants too, by the closed formulas.

        None where none fits.
        """
        constraint = self.only

        def both(configs: Columns) -> np.ndarray:
            return only(configs) if constraint is None else only(configs) & constraint(configs)

        # Search again, as the table has only the best few, and those of another kind may be much slower.
        found = search(self.model, 1, both)
        return self.model.candidate(rows_of(found)[0]) if len(found) else None


def rows_of(found: Found) -> list[dict[str, int]]:
    """Return the candidates that were found, one mapping each."""
    names = list(found.columns)
    # Columns of arrays to rows of plain ints: {"t": array([8, 4]), ...} to [{"t": 8, ...}, {"t": 4, ...}].
    rows = np.stack([found.columns[name] for name in names], axis=1).tolist() if names else []
    return [dict(zip(names, row, strict=True)) for row in rows]


__all__ = ["RankedCandidates", "rows_of"]
