"""Checks that many parity tests make: ranks make the calls of their program, and `verify` finds a program that is wrong."""

from __future__ import annotations

import dataclasses
import importlib
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from torch import Tensor, nn

import autoptd
from autoptd.ir.placement import AxisConversion
from autoptd.program.calls import expected_calls
from autoptd.program.program import Program
from autoptd.program.specs import ParamSpec

verify_module = importlib.import_module("autoptd.verify.verify")


def as_planned(
    model: nn.Module, call: tuple[Tensor, ...] | dict[str, Tensor], **asked: Any
) -> tuple[Program, Any]:
    """Run two steps; in the second, each rank must make exactly the calls of the program. Returns it and the record."""
    args, kwargs = (call, {}) if isinstance(call, tuple) else ((), call)
    with closing(autoptd.parallelize(model, backend="local", example_inputs=call, **asked)) as pm:
        pm.step(*args, **kwargs)
        with pm.record() as record:
            pm.step(*args, **kwargs)
        for rank in range(pm.program.mesh.size):
            assert Counter(record.of(rank)) == expected_calls(pm.program, rank), f"rank {rank}"
        return pm.program, record


def edit_programs(monkeypatch: pytest.MonkeyPatch, edit: Callable[[Program], Program]) -> None:
    """Make `verify` run what `edit` returns for a program."""
    right = verify_module.compile_program
    monkeypatch.setattr(
        verify_module, "compile_program", lambda *args, **kwargs: edit(right(*args, **kwargs))
    )


def edit_source(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> list[str]:
    """Make `verify` run a program in which the first `old` of its stage files is `new`; returns what was edited."""
    edited: list[str] = []

    def edit(program: Program) -> Program:
        for name, text in program.sources.items():
            if old in text and not edited:
                edited.append(name)
                sources = {**program.sources, name: text.replace(old, new, 1)}
                return dataclasses.replace(program, sources=sources)
        return program

    edit_programs(monkeypatch, edit)
    return edited


def check_is_found(
    monkeypatch: pytest.MonkeyPatch, edit: tuple[str, str], model: nn.Module, **asked: Any
) -> None:
    """Check that `verify` finds a program in which `edit` = (old, new) was made."""
    edited = edit_source(monkeypatch, *edit)
    found = ""
    try:
        autoptd.verify(model, **{"steps": 1, **asked})
    except autoptd.InternalError as error:
        found = str(error)
    # First: a program that is right because its text is another than was thought proves nothing.
    assert edited, f"no stage has {edit[0]!r}"
    assert "differs" in found


def sum_only_over(monkeypatch: pytest.MonkeyPatch, *axes: str) -> None:
    """From now on, no parameter's gradient is summed over other axes."""

    def sums(spec: ParamSpec) -> tuple[AxisConversion, ...]:
        return tuple(step for step in spec.conversions if step.axis in axes)

    monkeypatch.setattr(ParamSpec, "sums", property(sums))
