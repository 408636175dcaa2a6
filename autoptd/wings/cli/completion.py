"""`autoptd completion SHELL`: what lets a shell complete commands, flags, known models and files.

In: the parser. Out: a script for bash or zsh, made by `shtab`, so it names what there is.
"""

from __future__ import annotations

from argparse import Action, Namespace

import shtab

from autoptd.ir.schedules import SCHEDULES
from autoptd.wings.cli.known import KNOWN
from autoptd.wings.cli.parser import make_parser

# Metavars of arguments that are paths.
FILES = ("FILE", "A", "B")
FUNCTIONS = {
    "bash": '{name}() {{ compgen -W "{words}" -- "$1"; compgen -f -- "$1"; }}\n',
    "zsh": "{name}() {{ compadd -- {words}; _files; }}\n",
}
MODELS, ORDERS = "_autoptd_models", "_autoptd_schedules"


def completion(asked: Namespace) -> int:
    """Print the script; 0."""
    print(script(asked.shell))
    return 0


def script(shell: str) -> str:
    """Return the script for "bash" or "zsh"."""
    parser, commands = make_parser()
    for command in commands.values():
        for action in command._actions:
            _set_completer(action)
    words = {MODELS: list(KNOWN), ORDERS: list(SCHEDULES)}
    functions = ""
    for name in words:
        functions += FUNCTIONS[shell].format(name=name, words=" ".join(words[name]))
    return shtab.complete(parser, shell, preamble=functions)


def _set_completer(action: Action) -> None:
    """Say what completes an argument, where that is more than its `choices`: shtab reads the attribute
    `complete`.
    """
    completers = {"model": MODELS, "schedule": ORDERS}
    if action.dest in completers:
        function = completers[action.dest]
        action.complete = dict.fromkeys(FUNCTIONS, function)  # type: ignore[attr-defined]
    elif action.metavar in FILES:
        action.complete = shtab.FILE  # type: ignore[attr-defined]
    elif action.metavar == "DIR":
        action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
