"""Parse command-line values: the keywords for argparse, by kind of flag.

In: a word. Out: its value, or an ArgumentTypeError, which the parser reports.

    parser.add_argument("--memory", **FLAGS["bytes"])
"""

from __future__ import annotations

from argparse import ArgumentTypeError
from typing import Any

from autoptd.ir.quantities import parse_bytes


def as_bytes(text: str) -> float:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is not a size in bytes, such as 80e9, 80GB or 80GiB") from error


def as_stage(text: str) -> int | str:
    return int(text) if text.isdigit() else text


def as_switch(text: str) -> bool | str:
    return {"true": True, "false": False}.get(text.lower(), text)


def as_list(text: str) -> list[str]:
    return text.split(",")


def as_numbers(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise ArgumentTypeError(
            f"{text!r} is not a number or a comma-separated list of numbers, such as 2 or 1,2,4"
        ) from error


def as_level(text: str) -> int | str:
    # "any", or an invalid value that the planner reports.
    return int(text) if text.isdigit() else text


def as_count_or_auto(text: str) -> int | str:
    if text == "auto":
        return text
    try:
        return int(text)
    except ValueError as error:
        raise ArgumentTypeError(f"{text!r} is neither a number nor auto") from error


# The keywords for argparse, by `options.Keyword.flag`.
FLAGS: dict[str, dict[str, Any]] = {
    "text": {},
    "count": {"type": int, "metavar": "N"},
    "number": {"type": int},
    "stage": {"type": as_stage, "metavar": "N"},
    "float": {"type": float, "metavar": "X"},
    # None rather than False: an absent flag must not contradict a plan or a file.
    "on": {"action": "store_true", "default": None},
    # `--flag`, `--flag true` and `--flag false`.
    "switch": {"type": as_switch, "nargs": "?", "const": True},
    "choice": {"type": as_switch},
    "list": {"type": as_list},
    "bytes": {"type": as_bytes, "metavar": "BYTES"},
}

__all__ = ["FLAGS", "as_bytes", "as_count_or_auto", "as_level", "as_numbers", "as_switch"]
