"""Map each command to its function; define those that take no MODEL: simulate, diff, measure, doctor, completion.

In: the parsed arguments. Out: the exit code. Nothing here loads torch before its command runs, so that `--help`
is fast.

    COMMANDS["show"](parse(["show", "gpt2"]))       # prints, returns 0
"""

from __future__ import annotations

import math
import os
import sys
from argparse import Action, Namespace
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError
from autoptd.ir.actions import SCHEDULES, check_schedule, is_path
from autoptd.ir.mesh import DEGREES
from autoptd.ir.scopes import activity
from autoptd.wings.cli.known import KNOWN, list_names
from autoptd.wings.cli.parser import make_parser
from autoptd.wings.cli.request import check_request, check_writable

Command = Callable[[Namespace], int]
# Commands that need no torch, or load it themselves.
WITHOUT_TORCH = ("simulate", "diff", "plan", "completion")
# Set by torchrun.
LAUNCHED = ("RANK", "WORLD_SIZE")
# Metavars of arguments that are paths, for completion.
FILES = ("FILE", "A", "B")
COMPLETE = {
    "bash": '{name}() {{ compgen -W "{words}" -- "$1"; compgen -f -- "$1"; }}\n',
    "zsh": "{name}() {{ compadd -- {words}; _files; }}\n",
}
# Completion functions, by the argument that they complete.
COMPLETERS = {"model": "_autoptd_models", "schedule": "_autoptd_schedules"}


def simulate(args: Namespace) -> int:
    """Print the cost of a schedule, rank by rank; return 0."""
    from autoptd import schedule

    v, name = args.v, args.schedule or ("interleaved" if args.v > 1 else "1f1b")
    # A schedule file fixes its own number of microbatches.
    if is_path(name):
        orders = schedule.read_schedule(Path(name), args.p, v, args.num_microbatches)
    else:
        check_schedule(name, v)
        orders = schedule.build_orders(name, args.p, v, args.num_microbatches or 4 * args.p)
    is_finite = all(map(math.isfinite, (args.forward, args.backward, args.link)))
    if not is_finite or min(args.forward, args.backward) <= 0 or args.link < 0:
        raise PlanError(
            "--forward, --backward and --link", "must be finite; the first two positive", "leave them out"
        )
    # For schedules that split the backward: half of it computes weight gradients.
    weights = {"weight_gradient": args.backward / 2}
    result = schedule.simulate(
        orders, forward=args.forward, backward=args.backward, link=args.link, **weights
    )
    m = schedule.num_microbatches(orders)
    times = f"forward {args.forward:g}, backward {args.backward:g}, message {args.link:g}"
    print(f"{name}: p={args.p} v={v} m={m}, {times}")
    busiest = max(result.busy)
    print(f"takes {result.makespan:g}, {busiest:g} of it busy; bubble {result.bubble:.1%} of busy time")
    print("  pipeline rank  busy   idle   live microbatches (peak)")
    for rank, (busy, live) in enumerate(zip(result.busy, result.peak_live, strict=True)):
        print(f"  {rank:<13}  {busy:<5g}  {result.makespan - busy:<5g}  {live}")
    if args.out:
        # Imported only to draw, as it loads torch.
        from autoptd.wings.viz.runs import Run
        from autoptd.wings.viz.schedule_chart import schedule_svg

        run = Run("simulated", result.spans, memory=result.memory(1).curves)
        text = schedule_svg([run], orders, title=f"{name}, p={args.p} v={v} m={m}")
        try:
            Path(args.out).parent.mkdir(parents=True, exist_ok=True)
            Path(args.out).write_text(text)
        except OSError as error:
            raise PlanError(
                f"--out {args.out}", f"cannot be written: {error}", "choose another path"
            ) from error
        print(f"wrote {args.out}")
    return 0


def compare(args: Namespace) -> int:
    """Print the differences between two plans or programs; return 0 if there are none, else 1."""
    from autoptd.wings.reports.diff import diff

    text = diff(args.a, args.b)
    print(text, end="")
    return 1 if text else 0


def measure(args: Namespace) -> int:
    """Benchmark this machine; print and write a cluster file for the planner; return 0."""
    from autoptd.wings.planner.measure import REMARK, measure_cluster, to_toml

    # Check first: the benchmark takes half a minute.
    check_writable("FILE", args.file)
    with activity("measuring GEMMs, memory and collectives"):
        text = to_toml(measure_cluster(args.ranks), REMARK)
    Path(args.file).write_text(text)
    print(text, end="")
    return 0


def doctor(args: Namespace) -> int:
    """Test communication on these ranks; print the report; return 0 if all results are right, else 1.

    Under torchrun all ranks take part, and rank 0 prints; without it, ranks are threads of this process.
    """
    from autoptd.wings.doctor.run import Request, run_alone, run_launched
    from autoptd.wings.planner.cluster import find_cluster

    if not (math.isfinite(args.timeout) and args.timeout > 0):
        raise PlanError(
            f"--timeout {args.timeout:g}", "is not a valid timeout", "a positive number of seconds"
        )
    # Only rank 0 compares and writes; the other ranks may lack these files.
    if os.environ.get("RANK", "0") == "0":
        if args.json:
            check_writable("--json", args.json)
        if args.cluster is not None:
            find_cluster(args.cluster)
    names = ("device", "backend", "timeout", "cluster", "json")
    degrees = {name: degree for name in DEGREES if (degree := getattr(args, name)) is not None}
    request = Request(degrees, **{name: getattr(args, name) for name in names})
    is_launched = all(name in os.environ for name in LAUNCHED)
    return run_launched(request) if is_launched else run_alone(request)


def completion(args: Namespace) -> int:
    """Print a completion script for commands, flags, known models and files; return 0."""
    print(script(args.shell))
    return 0


def script(shell: str) -> str:
    """Return the completion script for "bash" or "zsh", generated by `shtab`."""
    import shtab

    parser, commands = make_parser()
    for command in commands.values():
        for action in command._actions:
            completer = _completer(action, shtab.FILE, shtab.DIRECTORY)
            if completer is not None:
                # The attribute that shtab reads.
                action.complete = completer  # type: ignore[attr-defined]
    words = {"model": " ".join(KNOWN), "schedule": " ".join(SCHEDULES)}
    functions = [COMPLETE[shell].format(name=COMPLETERS[key], words=words[key]) for key in words]
    return shtab.complete(parser, shell, preamble="".join(functions))


def _completer(action: Action, file: Any, directory: Any) -> Any:
    """Return the completion of an argument, by shell; None if its `choices` are enough."""
    if action.dest in COMPLETERS:
        return dict.fromkeys(COMPLETE, COMPLETERS[action.dest])
    if action.metavar in FILES:
        return file
    return directory if action.metavar == "DIR" else None


def _imported(module: str, function: str) -> Command:
    """Return a function of a module of this package that loads torch, which is imported when the command runs."""

    def run(args: Namespace) -> int:
        done: int = getattr(import_module(f"autoptd.wings.cli.{module}"), function)(args)
        return done

    return run


FUNCTIONS: dict[str, Command] = {
    "show": _imported("programs", "show"),
    "compile": _imported("programs", "compile"),
    "verify": _imported("programs", "verify"),
    "train": _imported("train", "train"),
    "simulate": simulate,
    "diff": compare,
    "plan": _imported("plan", "plan"),
    "measure": measure,
    "doctor": doctor,
    "checkpoint": _imported("checkpoint", "checkpoint"),
    "completion": completion,
}


def _runner(name: str) -> Command:
    def run(args: Namespace) -> int:
        if getattr(args, "list", False):
            return list_names(args)
        # Reject invalid requests before the slow import.
        check_request(args)
        if name not in WITHOUT_TORCH and "torch" not in sys.modules:
            with activity("importing torch"):
                import_module("torch")
        return FUNCTIONS[name](args)

    return run


COMMANDS: dict[str, Command] = {name: _runner(name) for name in FUNCTIONS}
