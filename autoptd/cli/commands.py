"""Which function answers which command; what it needs is loaded when it is called.

COMMANDS["show"](parse(["show", "gpt2"]))       # prints, returns how the process is to end
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from importlib import import_module

from autoptd.errors import PlanError

FUNCTIONS = {  # command -> module of this package, function of it
    "show": ("programs", "show"),
    "compile": ("programs", "compile"),
    "verify": ("verify", "verify"),
    "train": ("train", "train"),
    "simulate": ("simulate", "simulate"),
    "diff": ("compare", "compare"),
    "completion": ("completion", "completion"),
}


def _runner(module: str, function: str) -> Callable[[Namespace], int]:
    def run(asked: Namespace) -> int:
        done: int = getattr(import_module(f"autoptd.cli.{module}"), function)(asked)
        return done

    return run


def _plan(asked: Namespace) -> int:
    """The planner has a command line of its own, with flags for sizes instead of a model."""
    try:
        planner = import_module("autoptd.planner.cli")
    except ModuleNotFoundError as error:
        remedy = "choose t, p and d yourself: autoptd show MODEL --t ... says what each choice costs"
        raise PlanError("autoptd plan", f"the planner is not part of this installation ({error})", remedy) from error
    done: int = planner.main(asked.rest)
    return done


COMMANDS: dict[str, Callable[[Namespace], int]] = {name: _runner(*where) for name, where in FUNCTIONS.items()}
COMMANDS["plan"] = _plan

__all__ = ["COMMANDS"]
