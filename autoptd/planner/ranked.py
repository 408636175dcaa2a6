"""What a search found, as data: the best choices in order, and the problem they answer, for questions that are asked later.

In: the cost model, the filter and the counts of one search. Out: `RankedChoices`, which `tables` prints and `explain` puts into
words; `fastest(only)` searches the same problem again among some of its candidates.

    ranked.best.name
    ranked.fastest(lambda cells: cells["t"] > 8)      # the best with t over 8, None where none fits
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from autoptd.planner.choice import Choice
from autoptd.planner.default import DefaultModel
from autoptd.planner.search import Columns, Filter, Found, search


@dataclass(frozen=True)
class RankedChoices:
    """What the planner found: `choices`, the best first; `found`, the counts of the search.

    `model` and `only` are the problem, for the questions that `explain` asks again. `node`: GPUs on a fast network;
    `capacity_bytes` of a GPU.
    """

    choices: tuple[Choice, ...]
    found: Found
    model: DefaultModel
    only: Filter | None
    gpus: int
    node: int

    @property
    def best(self) -> Choice:
        return self.choices[0]

    @property
    def capacity_bytes(self) -> float:
        return self.model.capacity_bytes

    @property
    def rejected(self) -> Mapping[str, int]:
        """Cells (degrees, microbatch, switches) that are no candidates, by reason."""
        return self.found.rejected

    def fastest(self, only: Filter) -> Choice | None:
        """The best choice among the cells that `only` wants too, by the closed formulas; None where none fits."""
        asked = self.only

        def both(cells: Columns) -> np.ndarray:
            return only(cells) if asked is None else only(cells) & asked(cells)

        found = search(self.model, 1, both)
        return self.model.choice(rows_of(found)[0]) if len(found) else None


def rows_of(found: Found) -> list[dict[str, int]]:
    """The candidates that were found, one mapping each."""
    return [{name: int(values[at]) for name, values in found.columns.items()} for at in range(len(found))]


__all__ = ["RankedChoices", "rows_of"]
