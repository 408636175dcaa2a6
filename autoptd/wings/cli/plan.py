"""`autoptd plan`: search for (t, p, d, v, b).

Flags have the names of `autoptd.plan`'s keywords. Sizes come from MODEL's config, then `--shape`, then flags;
later ones override. Sizes that MODEL derives from others (ffn = 4 hidden, kv_heads = heads, head_dim = hidden
/ heads) are derived again from the new ones.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError, a_type
from autoptd.ir.scopes import activity
from autoptd.wings.cli.known import KNOWN
from autoptd.wings.cli.parser import SIZES
from autoptd.wings.cli.request import check_writable, read_pairs
from autoptd.wings.planner import plan as planning
from autoptd.wings.planner.plan import cases_text, which_when
from autoptd.wings.planner.shape import Shape, shape_of, shape_of_config

# Flags that are passed to `autoptd.plan` unchanged; the planner chooses the missing ones.
CONSTRAINTS: tuple[str, ...] = (
    "t",
    "p",
    "d",
    "c",
    "v",
    "microbatch",
    "sequence_parallel",
    "recompute",
    "zero",
)
CONSTRAINTS += ("precision", "schedule", "placement", "software", "memory")
# Flags for a single plan, and their defaults.
ONE_PLAN = {"explain": False, "out": None, "keep": 10}


def plan(args: Namespace) -> int:
    """Search and print the table; return 0."""
    for name in ("gpus", "batch"):
        if getattr(args, name) is None:
            raise PlanError(f"--{name}", "is missing", "for example: autoptd plan gpt2 --gpus 64 --batch 512")
    if args.when:
        _check_when(args)
    if args.out:
        check_writable("--out", args.out)
    shape = read_shape(args)
    constraints = {name: value for name in CONSTRAINTS if (value := getattr(args, name)) is not None}
    constraints |= {"gpus": args.gpus, "batch": args.batch, "cluster": args.cluster}
    if args.when:
        with activity("searching"):
            cases = which_when(shape, **constraints)
        print(cases_text(cases))
        return 0
    with activity("searching"):
        found = planning.plan(shape, keep=args.keep, **constraints)
    print(found)
    if args.explain:
        print(f"\n{found.explain()}")
    if args.out:
        found.save(args.out)
        print(f"\nwrote {args.out}")
    return 0


def _check_when(args: Namespace) -> None:
    given = [
        f"--{name.replace('_', '-')}" for name, usual in ONE_PLAN.items() if getattr(args, name) != usual
    ]
    if given:
        raise PlanError(
            "--when",
            f"compares several cases, but {', '.join(given)} applies to a single plan",
            "use one or the other",
        )


def read_shape(args: Namespace) -> dict[str, Any]:
    """Return the requested sizes by name."""
    sizes: dict[str, Any] = {}
    if args.model:
        sizes |= _shape_of_model(args)
    if args.shape:
        sizes |= _read(args.shape)
    return sizes | {name: value for name in SIZES if (value := getattr(args, name)) is not None}


def _shape_of_model(args: Namespace) -> dict[str, Any]:
    """Read the sizes of a known model from its config, and those of others from the model built without
    weights.
    """
    known = KNOWN.get(args.model)
    if known and not args.set:
        # GPT-2's MLP has two matrices; all other known models have gated MLPs with three.
        shape = shape_of_config(known.values, 2 if known.kind == "gpt2" else 3)
        return stated_sizes(shape) | {"seq": args.seq or known.length}
    # Known sizes do not need torch.
    with activity("importing torch"):
        from autoptd.wings.cli.models import find_model, length_of, make_without_weights

    subject = find_model(args.model, read_pairs("set", args.set))
    with activity(f"building {args.model} without weights"):
        model, _ = make_without_weights(subject)
    return stated_sizes(shape_of(model)) | {"seq": length_of(subject, model, args.seq)}


def stated_sizes(shape: Shape) -> dict[str, Any]:
    """Return the sizes of a shape, except those derived from others."""
    # Listed explicitly, they would not follow a new `--hidden`.
    follow = {"ffn": 4 * shape.hidden, "kv_heads": shape.heads, "head_dim": shape.hidden // shape.heads}
    return {name: value for name, value in asdict(shape).items() if value != follow.get(name)}


def _read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise PlanError(
            f"--shape {path}", f"cannot be read: {error}", "pass a JSON object of sizes"
        ) from error
    if not isinstance(found, dict):
        raise PlanError(f"--shape {path}", f"is {a_type(found)}", "pass a JSON object of sizes")
    return found
