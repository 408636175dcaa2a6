"""What is known of a keyword of `parallelize`, and of those that exist in part or not at all.

In: how the command line reads it, its choices, where it is asked for. Out: metadata of the fields of `Options`.

    t: int = field(default=1, metadata=about("count", "tensor-parallel degree"))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple


class Missing(NamedTuple):
    """A feature that does not exist yet, and the values of its keyword that do not ask for it."""

    feature: str
    neutral: tuple[Any, ...]


NOT_YET = {
    "c": Missing("context parallelism", (1,)),
    "zero": Missing("ZeRO beyond its first stage", (0, 1, "auto", None)),
    "dropout_exact": Missing("fused attention with random numbers of its own", (True,)),
}


@dataclass(frozen=True)
class Keyword:
    """What is known of a keyword of `parallelize` beside its default: metadata of its field of `Options`.

    `flag` says how the command line reads it, a key of `FLAGS` in cli/parser.py; "" for a keyword without a
    flag. `help` and `metavar` are argparse's; `is_for_training`: only `autoptd train` has the flag.
    `choices` are the values that it may have, where they can be listed. `is_planned`: plan.json has it
    under "options", in the order of the fields.
    """

    flag: str = ""
    help: str | None = None
    metavar: str | None = None
    choices: tuple[Any, ...] = ()
    is_planned: bool = False
    is_for_training: bool = False

    def allows(self, value: Any) -> bool:
        """Tell whether a value is one of the choices, if they are listed; 1 is not True."""
        same = (value == choice and type(value) is type(choice) for choice in self.choices)
        return not self.choices or any(same)


def about(flag: str = "", help: str | None = None, **more: Any) -> dict[str, Keyword]:
    return {"keyword": Keyword(flag, help, **more)}


HOOK = about("on", choices=(False, True), is_planned=True)
FOR_TRAINING: dict[str, Any] = {"is_for_training": True}
IN_PLAN: dict[str, Any] = {"is_planned": True}
