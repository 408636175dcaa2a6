"""The part of the report that goes module by module: parameters, matrix products, collectives over the value axes (tp).

In: a `Program`. Out: HTML, a section that opens for each module; layers that are alike share one.

    "\\n".join(module_sections(program))
"""

from __future__ import annotations

from collections import Counter

from autoptd.ir.mesh import base
from autoptd.ir.names import star
from autoptd.ir.types import LOCAL_KINDS
from autoptd.program.calls import call_site
from autoptd.program.program import Program
from autoptd.program.specs import ParamSpec
from autoptd.wings.viz.page import folded, paragraph, table
from autoptd.wings.words import bytes_text, count_text


def module_sections(program: Program) -> list[str]:
    """Return a section for each module with parameters or matrix products."""
    return [_module(program, name) for name in _modules(program)]


def _modules(program: Program) -> list[str]:
    """Modules with parameters or matrix products, layers alike as one, in the order of the model."""
    # "h.3.mlp.c_fc.weight" belongs to "h.*.mlp.c_fc".
    named = [star(spec.name.rpartition(".")[0]) for spec in program.params]
    return list(dict.fromkeys([*named, *(row.module for row in program.costs.gemms)]))


def _module(program: Program, name: str) -> str:
    params = [spec for spec in program.params if star(spec.name.rpartition(".")[0]) == name]
    times = Counter(star(spec.name) for spec in params)
    # One row for the same parameter of all layers, unless they differ in type.
    alike: dict[tuple[str, str], ParamSpec] = {}
    for spec in params:
        alike.setdefault((star(spec.name), spec.type_text()), spec)
    rows = []
    for spec in alike.values():
        shapes = _shape(spec.shape), _shape(spec.local_shape(program.mesh))
        own = spec.name.rpartition(".")[2]
        rows.append((own, *shapes, spec.type_text(), ", ".join(spec.aliases[1:]), spec.why))
    body = []
    if rows:
        heads = (
            "parameter",
            "shape",
            "local shape",
            f"type over {program.mesh.value_text}",
            "tied to",
            "why",
        )
        body.append(table(heads, rows))
    gemms = [row for row in program.costs.gemms if row.module == name]
    if gemms:
        work = Counter[str]()
        for row in gemms:
            work[row.operator.removeprefix("aten.")] += row.forward + row.backward
        products = ", ".join(f"`{operator}` {count_text(flops, 'FLOP')}" for operator, flops in work.items())
        fact = "Matrix products of a rank and a microbatch, forward and backward, all layers"
        body.append(paragraph(f"{fact}: {products}."))
    calls = _calls_of(program, name)
    if calls:
        over = ", ".join((*program.mesh.value_axes, *program.busy_axes))
        names = ("x", f"collective over {over}", "in", "payload", "why")
        body.append(table(names, [(str(count), *key) for key, count in calls.items()], (0, 3)))
    # Layers that the section stands for: as many as share a parameter's name.
    count = max(times.values(), default=1)
    return folded(name or "the model itself", f"x {count}" if count > 1 else "", "\n".join(body))


def _calls_of(program: Program, name: str) -> Counter[tuple[str, str, str, str]]:
    """Count the collectives over tp of a module, by kind, phase, payload and reason."""
    calls = Counter[tuple[str, str, str, str]]()
    for call in program.collectives:
        # Sums of gradients and messages between stages are not made by modules.
        if (
            base(call.axis) not in (*program.mesh.value_axes, *program.busy_axes)
            or call.scope != "microbatch"
            or call_site(call) != name
        ):
            continue
        for phase, kind in (("forward", call.forward), ("backward", call.backward)):
            if kind not in LOCAL_KINDS:
                calls[kind, phase, bytes_text(call.payload_bytes), star(call.why)] += 1
    return calls


def _shape(size: tuple[int, ...]) -> str:
    return "x".join(map(str, size)) or "one number"


__all__ = ["module_sections"]
