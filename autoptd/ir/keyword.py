"""Descriptions of the keywords of `parallelize`, and of those that are not (fully) implemented.

In: how the command line parses a keyword, and its choices. Out: metadata of the fields of `Options`.

    t: int = field(default=1, metadata=about("count", "tensor-parallel degree"))
"""

from __future__ import annotations

import os
import reprlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from autoptd.errors import PlanError, a_type

# A million: more can only be a typo.
MAX_RANKS = 2**20


class Missing(NamedTuple):
    """A feature that does not exist yet, and the values of its keyword that do not request it."""

    feature: str
    neutral: tuple[Any, ...]


NOT_YET = {
    "context": Missing("attention over rotating keys", ("auto", "ulysses", "all_gather", None)),
    "summa": Missing("SUMMA", (False, None)),
    "zero": Missing("ZeRO beyond its first stage", (0, 1, "auto", None)),
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
    """The description of a keyword of `parallelize` besides its default: metadata of its field in `Options`.

    `flag` is a key of `FLAGS` in wings/cli/flags.py, which tells how the command line parses it; "" for a
    keyword without a flag. `help` and `metavar` are argparse's; `is_for_training`: only `autoptd train` has
    the flag. `choices` are its values, if they can be listed. `kind`, by default the flag, is a key of
    `KINDS`. `is_planned`: plan.json has it under "options", in the order of the fields; with `only_with`,
    only if this degree is above 1.
    """

    flag: str = ""
    help: str | None = None
    metavar: str | None = None
    choices: tuple[Any, ...] = ()
    is_planned: bool = False
    only_with: str = ""
    is_for_training: bool = False
    kind: str = ""

    def check_kind(self, name: str, value: Any) -> None:
        """Raise PlanError for a value of the wrong kind."""
        is_one, what = KINDS.get(self.kind or self.flag, (None, ""))
        if is_one is not None and not is_one(value):
            raise PlanError(f"{name}={reprlib.repr(value)}", f"is not {what}", f"{what}, or leave it out")

    def allows(self, value: Any) -> bool:
        """Tell whether a value is one of the choices, if there are any; 1 is not True."""
        same = (value == choice and type(value) is type(choice) for choice in self.choices)
        return not self.choices or any(same)


def check_degrees(options: Any) -> None:
    """Raise PlanError for too many ranks, and for keywords that need several ranks along an axis
    (`only_with`) that has one.
    """
    if (count := max(options.mesh.size, options.num_stages)) > MAX_RANKS:
        raise PlanError("mesh", f"would have {count:,} ranks or stages", f"at most {MAX_RANKS:,}")
    for item in fields(options):
        degree, value = item.metadata["keyword"].only_with, getattr(options, item.name)
        if degree and value != item.default and getattr(options, degree) == 1:
            fact = f"with {degree}=1 every rank has all tokens"
            raise PlanError(f"{item.name}={value!r}", fact, f"{degree} > 1, or leave it out")


def about(flag: str = "", help: str | None = None, **more: Any) -> dict[str, Keyword]:
    return {"keyword": Keyword(flag, help, **more)}


def hook(help: str) -> dict[str, Keyword]:
    """Describe a switch for the backward of linear layers."""
    return about("on", help, choices=(False, True), is_planned=True)


# How attention sees all tokens if each rank has a part of them.
CONTEXT = about(
    "choice",
    "how attention gathers the sequence, with --c > 1",
    choices=("auto", "ulysses", "all_gather"),
    is_planned=True,
    only_with="c",
)
TOKEN_ORDER = about(
    "choice",
    "token layout over ranks, with --c > 1",
    choices=("auto", "zigzag", "contiguous"),
    is_planned=True,
    only_with="c",
)
SPLIT_TOKENS = about(
    "switch",
    "shard activations by tokens between matrix products (Korthikanti et al.)",
    metavar="auto",
    choices=(True, False, "auto"),
    is_planned=True,
)
FUSED_BY = about(
    "choice",
    "operator fusion: eager, triton, inductor, or false",
    metavar="BACKEND",
    choices=("eager", "triton", "inductor", False),
    is_planned=True,
)
ON_DEVICE = about("text", "device of the ranks with --backend local", is_for_training=True, kind="device")
FOR_TRAINING: dict[str, Any] = {"is_for_training": True}
IN_PLAN: dict[str, Any] = {"is_planned": True}
