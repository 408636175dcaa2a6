"""`autoptd plan`: which (t, p, d, v, b).

Flags have the names of `autoptd.plan`'s keywords. Sizes come from MODEL's config, `--shape` and flags: the
last counts. What follows from other sizes in MODEL (ffn = 4 hidden, kv_heads = heads, head_dim = hidden /
heads) follows from the new ones too.
"""

from __future__ import annotations

import json
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autoptd.errors import PlanError, a_type
from autoptd.ir.activity import activity
from autoptd.wings.cli.help_texts import SIZES
from autoptd.wings.cli.known import KNOWN
from autoptd.wings.cli.settings import check_writable, read_pairs
from autoptd.wings.planner import plan as planning
from autoptd.wings.planner.model_shape import shape_of, shape_of_config
from autoptd.wings.planner.shape import Shape
from autoptd.wings.planner.strategies import cases_text, which_when

# Flags that are handed to `autoptd.plan` as they are; one that was not given is left open.
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
# Flags that belong to a single plan, and their defaults.
ONE_PLAN = {"explain": False, "out": None, "keep": 10}


def plan(asked: Namespace) -> int:
    """Search, print the table; 0."""
    for name in ("gpus", "batch"):
        if getattr(asked, name) is None:
            raise PlanError(f"--{name}", "is missing", "for example: autoptd plan gpt2 --gpus 64 --batch 512")
    if asked.when:
        _check_when(asked)
    if asked.out:
        check_writable("--out", asked.out)
    shape = read_shape(asked)
    constraints = {name: value for name in CONSTRAINTS if (value := getattr(asked, name)) is not None}
    constraints |= {"gpus": asked.gpus, "batch": asked.batch, "cluster": asked.cluster}
    if asked.when:
        with activity("searching"):
            cases = which_when(shape, **constraints)
        print(cases_text(cases))
        return 0
    with activity("searching"):
        found = planning.plan(shape, keep=asked.keep, **constraints)
    print(found)
    if asked.explain:
        print(f"\n{found.explain()}")
    if asked.out:
        found.save(asked.out)
        print(f"\nwrote {asked.out}")
    return 0


def _check_when(asked: Namespace) -> None:
    given = [
        f"--{name.replace('_', '-')}" for name, usual in ONE_PLAN.items() if getattr(asked, name) != usual
    ]
    if given:
        raise PlanError(
            "--when", f"plans several cases, and {', '.join(given)} is for one plan", "one or the other"
        )


def read_shape(asked: Namespace) -> dict[str, Any]:
    """Return the sizes that are asked for, by their names."""
    sizes: dict[str, Any] = {}
    if asked.model:
        sizes |= _shape_of_model(asked)
    if asked.shape:
        sizes |= _read(asked.shape)
    return sizes | {name: value for name in SIZES if (value := getattr(asked, name)) is not None}


def _shape_of_model(asked: Namespace) -> dict[str, Any]:
    """Read the sizes of a known model from its config, which takes no time.

    Of others from the model without weights.
    """
    known = KNOWN.get(asked.model)
    if known and not asked.set:
        # GPT-2's MLP has two matrices; all other known sizes are gated, with three.
        shape = shape_of_config(known.values, 2 if known.kind == "gpt2" else 3)
        return stated_sizes(shape) | {"seq": asked.seq or known.length}
    # torch and transformers, which known sizes need not.
    from autoptd.wings.cli.models import find_model, length_of, make_without_weights

    subject = find_model(asked.model, read_pairs("set", asked.set))
    with activity(f"building {asked.model} without weights"):
        model, _ = make_without_weights(subject)
    return stated_sizes(shape_of(model)) | {"seq": length_of(subject, model, asked.seq)}


def stated_sizes(shape: Shape) -> dict[str, Any]:
    """Return the sizes of a shape but for those that follow from others."""
    # Stated, they would stay as they are when `--hidden` changes.
    follow = {"ffn": 4 * shape.hidden, "kv_heads": shape.heads, "head_dim": shape.hidden // shape.heads}
    return {name: value for name, value in asdict(shape).items() if value != follow.get(name)}


def _read(path: str) -> dict[str, Any]:
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise PlanError(f"--shape {path}", f"cannot be read: {error}", "a JSON object of sizes") from error
    if not isinstance(found, dict):
        raise PlanError(f"--shape {path}", f"is {a_type(found)}", "a JSON object of sizes")
    return found


__all__ = ["plan", "read_shape", "stated_sizes"]
