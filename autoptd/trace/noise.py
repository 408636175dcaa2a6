"""Normalise random numbers other than dropout: every draw becomes one of three operators (`ir/noise.py`).

In: a graph without in-place operators. Out: the same with `uniform`, `normal` and `exponential` of a tensor
that gives the shape, scaled and shifted as in the call. Draws from the model's own generator are refused.

    empty_like(x).uniform_(0.9, 1.1)        ->  uniform(x) * 0.2 + 0.9
    randn(4, 8)                             ->  normal(zeros(4, 8))
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Graph, Node

from autoptd.compat import OpOverload
from autoptd.errors import PlanError
from autoptd.ir.noise import NAMES, OPERATORS, is_draw
from autoptd.ir.notes import note, op_name, ops, shape, site, value
from autoptd.trace.new_nodes import Maker, put

aten = torch.ops.aten
# Operators by the kind of numbers; each name also has an in-place form.
LIKE = {"aten.rand_like": "uniform", "aten.randn_like": "normal"}
SIZED = {"aten.rand": "uniform", "aten.randn": "normal"}
FILLED = {
    "aten.uniform": "uniform",
    "aten.exponential": "exponential",
    "aten.normal_functional": "normal",
}
# Arguments that scale and shift the numbers.
STEPS = {"uniform": {"from", "to"}, "normal": {"mean", "std"}, "exponential": {"lambd"}}
# Only the shape of these is read.
SHAPES = ("aten.empty_like", "aten.zeros_like", "aten.ones_like", "aten.full_like")


def draws(graph: Graph) -> Iterator[Node]:
    """Yield all draws of a normalised graph, including dropouts, in order."""
    return (node for node in ops(graph) if is_draw(node))


def check_generators(graph: Graph) -> None:
    """Raise PlanError where numbers are drawn from the model's own generator."""
    for node in ops(graph):
        if node.kwargs.get("generator") is not None:
            fact = (
                f"{op_name(node)} draws from a generator of the model's own, whose state ranks do not share"
            )
            raise PlanError(site(node), fact, "leave generator= out: what is drawn follows from seed=")


def rewrite_noise(graph: Graph) -> None:
    """Rewrite the draws of a graph, and number all of them."""
    for node in list(ops(graph)):
        name = op_name(node)
        if name in (*LIKE, *SIZED, *FILLED):
            _rewrite(graph, node)
    for number, node in enumerate(draws(graph)):
        note(node).draw = replace(note(node).draw, site=number)


def kind_of(func: Any) -> str | None:
    """Return the kind of numbers that an overload draws, in place or not; None if it draws no known kind."""
    if not isinstance(func, OpOverload) or func._overloadname not in ("default", "names"):
        return None
    name = func._schema.name.replace("::", ".")
    name = "aten.normal_functional" if name == "aten.normal_" else name
    return {**LIKE, **SIZED, **FILLED, **NAMES}.get(name.removesuffix("_"))


def steps_of(func: Any, kind: str, args: Any, kwargs: Any) -> list[tuple[Any, float]]:
    """Return the steps from standard numbers to those that a call requests."""
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}
    names = [argument.name for argument in func._schema.arguments]
    given = {**defaults, **dict(zip(names, args, strict=False)), **kwargs}
    return scaled(kind, given) if STEPS[kind] & given.keys() else []


def scaled(kind: str, given: Mapping[str, Any]) -> list[tuple[Any, float]]:
    """Return the steps, (operator, number), from standard numbers to those that a call requests."""
    if kind == "uniform":
        low, high = given["from"], given["to"]
        steps = [(aten.mul.Tensor, high - low), (aten.add.Tensor, low)]
    elif kind == "normal":
        steps = [(aten.mul.Tensor, given["std"]), (aten.add.Tensor, given["mean"])]
    else:
        steps = [(aten.mul.Tensor, 1 / given["lambd"])]
    return [(op, float(number)) for op, number in steps if number != (1 if op is aten.mul.Tensor else 0)]


def _rewrite(graph: Graph, node: Node) -> None:
    name, dtype = op_name(node), value(node).dtype
    kind = {**LIKE, **SIZED, **FILLED}[name]
    make = Maker(node, about=note(node))
    if name in SIZED:
        x = make(aten.zeros.default, list(shape(node)), dtype=dtype)
        # On the device of the node that it replaces.
        x.meta["val"] = value(node).new_zeros(shape(node))
    else:
        x = node.args[0]  # type: ignore[assignment]
        while op_name(x) in SHAPES and value(x).dtype == value(x.args[0]).dtype:  # type: ignore[arg-type]
            x = x.args[0]  # type: ignore[assignment]
        x = make.cast(x, dtype)
    made = make(OPERATORS[kind]._opoverload, x)
    for target, number in steps_of(node.target, kind, node.args, node.kwargs):
        made = make(target, made, number)
    put(node, made)


__all__ = ["NAMES", "check_generators", "draws", "kind_of", "rewrite_noise", "steps_of"]
