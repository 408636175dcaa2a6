"""A plan over tp beside those that people know: what `sequence_parallel="auto"` found, in numbers and in words.

In: the `Weight` of every plan by the value of `sequence_parallel` that asks for it. Out: a record, which `plan.json` has as
`weighed`, and a sentence. `show` and the report have it as a table (summary.py).

    weighed = {"auto": Weight(...), "True": Weight(...), "False": Weight(...)}
    found_text(weighed_record(weighed))      # "sequence_parallel='auto': -43% bytes sent, ... beside Korthikanti's (True)"
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

KNOWN = {"True": "Korthikanti's (True)", "False": "without (False)"}


@dataclass(frozen=True)
class Weight:
    """Of a rank and a microbatch, forward and backward: seconds by the machine's description, bytes sent over tp and in how
    many collectives, parameters held (`least_parameters` if all were split), and bytes kept for backward.
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
        """How often the t-th part of all parameters a rank holds."""
        return self.parameters / max(1, self.least_parameters)


def weighed_record(weights: Mapping[str, Weight], reasons: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The plans as plain data, with what was found in words; `reasons` say why a known plan is missing."""
    found = weights["auto"]
    same = next((name for name in KNOWN if name in weights and weights[name] == found), None)
    why = (
        f"the same as {KNOWN[same]}"
        if same
        else "; ".join(_difference(found, weights, name) for name in KNOWN)
    )
    rows = {name: {**asdict(one), "over_least": round(one.over_least, 4)} for name, one in weights.items()}
    return {"found": why, **rows, **({"missing": dict(reasons)} if reasons else {})}


def _difference(found: Weight, weights: Mapping[str, Weight], name: str) -> str:
    if name not in weights:
        return f"{KNOWN[name]} cannot be"
    known = weights[name]
    parts = [
        f"{100 * (ours / theirs - 1):+.0f}% {what}"
        for what, ours, theirs in (
            ("bytes sent", found.sent_bytes, known.sent_bytes),
            ("seconds", found.seconds, known.seconds),
            ("parameters", found.parameters, known.parameters),
            ("kept for backward", found.saved_bytes, known.saved_bytes),
        )
        if theirs
    ]
    return f"{', '.join(parts)} beside {KNOWN[name]}"


def found_text(record: Mapping[str, Any] | None) -> str:
    """What was found, in a sentence; "" where nothing was weighed."""
    return f"sequence_parallel='auto' found: {record['found']}" if record else ""


__all__ = ["KNOWN", "Weight", "found_text", "weighed_record"]
