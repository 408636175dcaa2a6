"""Compare the plan of `sequence_parallel="auto"` with published plans, in numbers and in words.

In: the `Weight` of every plan by its value of `sequence_parallel`. Out: a record, `weighed` in `plan.json`,
and a sentence. `show` and the report print it as a table (summary.py).

    weighed = {"auto": Weight(...), "True": Weight(...), "False": Weight(...)}
    found_text(weighed_record(weighed))      # "sequence_parallel='auto': -43% bytes sent, ... compared with ..."
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

KNOWN = {"True": "Korthikanti's (True)", "False": "without (False)"}


@dataclass(frozen=True)
class Weight:
    """The cost of a plan on one rank, for one microbatch forward and backward.

    Predicted seconds, bytes sent over tp and the number of collectives, parameters held (`least_parameters`
    if all were split), and bytes saved for backward.
    """

    seconds: float
    sent_bytes: int
    collectives: int
    parameters: int
    parameter_bytes: int
    least_parameters: int
    saved_bytes: int

    @property
    def over_least(self) -> float:
        """The ratio of the parameters that a rank holds to 1/t of all parameters."""
        return self.parameters / max(1, self.least_parameters)


def weighed_record(weights: Mapping[str, Weight], reasons: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the plans as plain data, with a comparison in words; `reasons` explain a missing known plan."""
    chosen = weights["auto"]
    # If every number is equal, "auto" has found a known plan, or an equivalent one.
    same = [name for name in KNOWN if weights.get(name) == chosen]
    differences = [_difference(chosen, weights, name) for name in KNOWN]
    text = f"the same as {KNOWN[same[0]]}" if same else "; ".join(differences)
    record: dict[str, Any] = {"found": text}
    for name, weight in weights.items():
        record[name] = {**asdict(weight), "over_least": round(weight.over_least, 4)}
    if reasons:
        record["missing"] = dict(reasons)
    return record


def _difference(chosen: Weight, weights: Mapping[str, Weight], name: str) -> str:
    """Describe the chosen plan relative to a known one: `-43% bytes sent, +2% seconds compared with ...`."""
    if name not in weights:
        return f"{KNOWN[name]} cannot be"
    known = weights[name]
    pairs = (
        ("bytes sent", chosen.sent_bytes, known.sent_bytes),
        ("seconds", chosen.seconds, known.seconds),
        ("parameters", chosen.parameters, known.parameters),
        ("kept for backward", chosen.saved_bytes, known.saved_bytes),
    )
    # A percentage of 0, as for a plan that sends nothing, is undefined.
    parts = [f"{100 * (ours / theirs - 1):+.0f}% {what}" for what, ours, theirs in pairs if theirs]
    return f"{', '.join(parts)} compared with {KNOWN[name]}"


def found_text(record: Mapping[str, Any] | None) -> str:
    """Return the comparison as a sentence; "" where nothing was compared."""
    return f"sequence_parallel='auto' found: {record['found']}" if record else ""


__all__ = ["KNOWN", "Weight", "found_text", "weighed_record"]
