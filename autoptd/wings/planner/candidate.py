"""Describe one way to run a model for the reader: a search result, with its seconds and bytes by term.

In: the numbers that `DefaultModel` computed for one row of a search. Out: a `Candidate`, whose `plan_record`
is plan.json.

    candidate.name                 # "t=8 p=64 d=6 b=1 m=512, sequence parallel"
    candidate.seconds_by["bubble"]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from autoptd.options import NOT_YET

DEGREES = ("t", "p", "d", "c", "v", "b", "m")
# The name of an option when it is on.
WORDS = {
    "recompute": "{} recomputation",
    "zero": "ZeRO-{}",
    "precision": "{}",
    "placement": "placed {}",
}


@dataclass(frozen=True)
class Candidate:
    """A candidate.

    `degrees`: t, p, d, c, v, b (sequences of a microbatch), m (microbatches of a replica and step).
    `options`: the other choices, by the names of `parallelize`'s keywords, and "placement" (the number of
    ranks of each axis that share a node). `seconds` of a step and `bytes` of the fullest rank, each the sum
    of its parts. `flops_per_gpu`: model FLOP/s. `is_simulated`: its schedule was simulated, else its seconds
    are from the formula. `formula_seconds` are always from the formula, to compare candidates if not all are
    simulated.
    """

    degrees: Mapping[str, int]
    options: Mapping[str, Any]
    seconds: float
    seconds_by: Mapping[str, float]
    bytes: float
    bytes_by: Mapping[str, float]
    flops_per_gpu: float
    is_simulated: bool = False
    formula_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.formula_seconds:
            # Without a simulation both numbers are the same.
            object.__setattr__(self, "formula_seconds", self.seconds)

    @property
    def name(self) -> str:
        """The degrees and the unusual options, on one line."""
        # c and v only where they are in use; the others always.
        shown = [f"{key}={self.degrees[key]}" for key in DEGREES if key not in "cv" or self.degrees[key] > 1]
        return ", ".join([" ".join(shown), *self._words()])

    def _words(self) -> list[str]:
        words = ["sequence parallel"] if self.options.get("sequence_parallel") else []
        default = "interleaved" if self.degrees["v"] > 1 else "1f1b"
        if self.options.get("schedule") not in (None, default):
            words.insert(0, self.options["schedule"])
        usual = {"recompute": "none", "zero": 0, "placement": None, "precision": None}
        for key, phrase in WORDS.items():
            value = self.options.get(key, usual[key])
            if value != usual[key]:
                words.append(phrase.format(placement_text(value) if key == "placement" else value))
        return words

    @property
    def not_yet(self) -> dict[str, Any]:
        """Options of this candidate that the runtime does not have: name and value."""
        found = {}
        for key in NOT_YET:
            if key in self.options and is_missing(key, self.options[key]):
                found[key] = self.options[key]
        # A choice that only the planner has.
        if self.options.get("placement") is not None:
            found["placement"] = dict(self.options["placement"])
        return found

    def _runtime_options(self) -> dict[str, Any]:
        """Return the keywords of `parallelize` other than degrees that the runtime supports."""
        found: dict[str, Any] = {"sequence_parallel": bool(self.options["sequence_parallel"])}
        usual = {"zero": 0, "precision": "fp32", "recompute": "none"}
        for key, value in usual.items():
            asked = self.options.get(key)
            if asked not in (None, value) and not is_missing(key, asked):
                found[key] = asked
        return found

    def plan_record(self) -> dict[str, Any]:
        """Return the record for `parallelize(model, plan=...)`, as in plan.json.

        Options that the runtime lacks are only listed.
        """
        c = self.degrees["c"]
        return {
            "version": 1,
            "mesh": {key: self.degrees[key] for key in "tpdv"} | ({"c": c} if c > 1 else {}),
            "num_microbatches": self.degrees["m"],
            "schedule": self.options["schedule"],
            "options": self._runtime_options(),
            # Read by people only: `parallelize` ignores it.
            "planner": {
                "choice": self.name,
                "seconds": self.seconds,
                "seconds_by": dict(self.seconds_by),
                "bytes": self.bytes,
                "bytes_by": dict(self.bytes_by),
                "flops_per_gpu": self.flops_per_gpu,
                "not_yet": self.not_yet,
            },
        }


def is_missing(keyword: str, value: Any) -> bool:
    """Tell whether the runtime does not have this value of a keyword of `parallelize`."""
    # The planner has names for what `Options` calls None.
    usual = {"precision": "fp32"}
    return keyword in NOT_YET and value not in NOT_YET[keyword].neutral and value != usual.get(keyword)


def placement_text(inside: Mapping[str, int]) -> str:
    """Describe a placement: `tp 8, dp 2 to a node`."""
    return ", ".join(f"{axis} {count}" for axis, count in inside.items() if count > 1) + " to a node"


__all__ = ["DEGREES", "Candidate", "is_missing", "placement_text"]
