"""Measured points beside predicted ones, and how well a set of them agrees.

points = [Point("2 nodes", measured=3.1, predicted=2.9)]
summary(points)["mape"]                                       # 0.065
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

DATA = Path(__file__).parents[1] / "data"
Row = dict[str, Any]


@dataclass(frozen=True)
class Point:
    """One measurement and its prediction, in the unit of its set."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1


def load(folder: Path, name: str) -> Row:
    found: Row = json.loads((folder / name).read_text())
    return found


def spearman(points: Sequence[Point]) -> float:
    """Rank correlation of measured and predicted; ties have their mean rank."""

    def ranks(values: np.ndarray) -> np.ndarray:
        return np.array([np.sum(values < one) + (np.sum(values == one) - 1) / 2 for one in values])

    measured = ranks(np.array([one.measured for one in points]))
    return float(np.corrcoef(measured, ranks(np.array([one.predicted for one in points])))[0, 1])


def geometric_ratio(points: Sequence[Point]) -> float:
    """Geometric mean of measured over predicted."""
    return float(np.exp(np.mean([np.log(one.measured / one.predicted) for one in points])))


def summary(points: Sequence[Point]) -> Row:
    errors = np.abs([one.error for one in points])
    return {
        "points": len(points),
        "mape": float(errors.mean()),
        "worst": float(errors.max()),
        "spearman": spearman(points),
        "measured_over_predicted": geometric_ratio(points),
    }


def held_out(points: Sequence[Point], fits: Callable[[Point], bool]) -> Row:
    """The factor that the points which `fits` chooses ask for, and how well it serves the others; `points` are raw."""
    chosen, others = ([one for one in points if fits(one) is which] for which in (True, False))
    factor = geometric_ratio(chosen)
    errors = np.abs([factor * one.predicted / one.measured - 1 for one in others])
    return {
        "factor": factor,
        "others": len(others),
        "mape": float(errors.mean()),
        "worst": float(errors.max()),
    }
