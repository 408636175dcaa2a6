"""Map each command to its function, which is imported when the command runs.

In: the parsed arguments. Out: the exit code.

    COMMANDS["show"](parse(["show", "gpt2"]))       # prints, returns 0
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module

from autoptd.ir.scopes import activity
from autoptd.wings.cli.request import check_request

# Command -> (module of this package, its function)
FUNCTIONS = {
    "show": ("programs", "show"),
    "compile": ("programs", "compile"),
    "verify": ("verify", "verify"),
    "train": ("train", "train"),
    "simulate": ("simulate", "simulate"),
    "diff": ("compare", "compare"),
    "plan": ("plan", "plan"),
    "measure": ("measure", "measure"),
    "doctor": ("doctor", "doctor"),
    "checkpoint": ("checkpoint", "checkpoint"),
    "completion": ("completion", "completion"),
}


# `show --list`.
LIST = ("known", "list_names")
# The modules among them that do not import torch.
WITHOUT_TORCH = ("simulate", "compare", "completion", "known")


def _runner(*where: str) -> Callable[[Namespace], int]:
    def run(args: Namespace) -> int:
        module, function = LIST if getattr(args, "list", False) else where
        # Reject invalid requests before the slow import.
        check_request(args)
        # Imported here, so that `autoptd --help` and shell completion do not wait for torch.
        is_quick = module in WITHOUT_TORCH or "torch" in sys.modules
        with nullcontext() if is_quick else activity("importing torch"):
            home = import_module(f"autoptd.wings.cli.{module}")
        done: int = getattr(home, function)(args)
        return done

    return run


COMMANDS: dict[str, Callable[[Namespace], int]] = {name: _runner(*where) for name, where in FUNCTIONS.items()}

__all__ = ["COMMANDS"]
