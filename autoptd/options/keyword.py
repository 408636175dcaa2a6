"""Descriptions of the keywords of `parallelize`, and of those that are not (fully) implemented.

In: how the command line parses a keyword, and its choices. Out: fields of `Options` and of its parts.

    t: int = keyword(1, "count", "tensor-parallel degree")
    shard: int | None = keyword(None, "count", "ranks that share one copy", name="dp_shard")     # of `Zero`
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

from autoptd.errors import PlanError, a_type
from autoptd.ir.quantities import check_degree


class Missing(NamedTuple):
    """A feature that does not exist yet, and the values of its keyword that do not request it."""

    feature: str
    neutral: tuple[Any, ...]


NOT_YET = {
    "context": Missing("attention over rotating keys", ("auto", "ulysses", "all_gather", None)),
    "summa": Missing("SUMMA", (False, None)),
    "dropout_exact": Missing("fused attention with its own random numbers", (True,)),
}


def without_missing(keywords: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Return the keywords without those of missing features; PlanError if one is requested, or if a value is
    a tensor.

    Features in `known` exist in part, and their keywords stay.
    """
    check_plain(keywords)
    for name, missing in NOT_YET.items():
        if keywords.get(name, missing.neutral[0]) not in missing.neutral:
            fact = f"{missing.feature} is not implemented"
            raise PlanError(f"{name}={keywords[name]!r}", fact, f"leave the keyword {name} out")
    return {name: value for name, value in keywords.items() if name in known or name not in NOT_YET}


def _is_number(value: Any) -> bool:
    # True is an int, but not a number.
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_device(value: Any) -> bool:
    # Imported here: the command line parses options without torch, which takes seconds to load.
    import torch

    try:
        return isinstance(value, (str, torch.device)) and bool(torch.device(value))
    except RuntimeError:
        return False


def _are_names(value: Any) -> bool:
    return isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(each, str) for each in value)


# By the kind of a keyword, or its flag: whether a value is of that kind, and a description of the kind.
KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "function": (callable, "a function of (output, targets)"),
    "number": (lambda value: _is_number(value) and isinstance(value, int), "an integer"),
    "float": (_is_number, "a number"),
    "path": (
        lambda value: isinstance(value, (str, os.PathLike)) and bool(os.fspath(value)),
        "a name or a path",
    ),
    "list": (_are_names, "a list of names"),
    "device": (_is_device, '"cpu", "cuda" or "cuda:1"'),
}


def _is_tensor(value: Any) -> bool:
    return any(f"{base.__module__}.{base.__name__}" == "torch.Tensor" for base in type(value).__mro__)


def check_plain(keywords: Mapping[str, Any]) -> None:
    """Raise PlanError for tensors and arrays, which no keyword accepts."""
    for name, value in keywords.items():
        if _is_tensor(value) or getattr(value, "ndim", False):
            fact = f"is {a_type(value)} of shape {tuple(value.shape)}"
            remedy = (
                "pass a plain Python value, such as int(x) or x.item(); batches are passed as example_inputs="
            )
            raise PlanError(f"{name}=", fact, remedy)


@dataclass(frozen=True)
class Keyword:
    """The description of a setting besides its default: metadata of a field of `Options`, or of one of its
    parts.

    `flag` is a key of `FLAGS` in wings/cli/parser.py, which tells how the command line parses it; "" for a
    keyword without a flag. `help` and `metavar` are argparse's; `is_for_training`: only `autoptd train` has
    the flag. `choices` are its values, if they can be listed. `kind`, by default the flag, is a key of
    `KINDS`. `is_planned`: plan.json has it under "options", in the order of the fields; with `only_with`,
    only if this degree is above 1. `name`: on the command line, in plan.json and in errors, if it differs
    from the field's.
    """

    flag: str = ""
    help: str | None = None
    metavar: str | None = None
    choices: tuple[Any, ...] = ()
    is_planned: bool = False
    only_with: str = ""
    is_for_training: bool = False
    kind: str = ""
    name: str = ""

    def check(self, name: str, value: Any, default: Any) -> None:
        """Raise PlanError for a value of the wrong kind, or that is not one of the choices."""
        is_one, what = KINDS.get(self.kind or self.flag, (None, ""))
        if is_one is not None and not is_one(value):
            raise PlanError(f"{name}={reprlib.repr(value)}", f"is not {what}", f"{what}, or leave it out")
        if self.flag == "count":
            check_degree(name, value)
        if not self.allows(value):
            remedy = ", ".join(map(repr, self.choices)) + " or None" * (default is None)
            raise PlanError(f"{name}={value!r}", "no such choice", remedy)

    def allows(self, value: Any) -> bool:
        """Tell whether a value is one of the choices, if there are any; 1 is not True."""
        same = (value == choice and type(value) is type(choice) for choice in self.choices)
        return not self.choices or any(same)


class Setting(NamedTuple):
    """A field that holds a keyword's value: the keyword's name, and the field's own in its class."""

    name: str
    field: str
    default: Any
    keyword: Keyword


def keyword(default: Any, flag: str = "", help: str | None = None, **more: Any) -> Any:
    """Declare a field of `Options` or of one of its parts; the other arguments are those of `Keyword`."""
    return field(default=default, metadata={"keyword": Keyword(flag, help, **more)})


FOR_TRAINING: dict[str, Any] = {"is_for_training": True}
IN_PLAN: dict[str, Any] = {"is_planned": True}


def settings_of(owner: Any) -> Iterator[Setting]:
    """Yield what `Options`, or one of its parts, declares itself."""
    for item in fields(owner):
        if (known := item.metadata.get("keyword")) is not None:
            yield Setting(known.name or item.name, item.name, item.default, known)


def check_kinds(owner: Any) -> None:
    """Raise PlanError for a value of the wrong kind, or that is not one of the choices."""
    for setting in settings_of(owner):
        value = getattr(owner, setting.field)
        # Defaults need no check, and None stands for one in several fields.
        if value is not setting.default:
            setting.keyword.check(setting.name, value, setting.default)


__all__ = [
    "FOR_TRAINING",
    "IN_PLAN",
    "NOT_YET",
    "Keyword",
    "Setting",
    "check_kinds",
    "check_plain",
    "keyword",
    "settings_of",
    "without_missing",
]
