"""Programs in which gradients are summed over some axes only."""

from __future__ import annotations

import pytest

from autoptd.ir.placement import AxisConversion
from autoptd.program.specs import ParamSpec


def sum_only_over(monkeypatch: pytest.MonkeyPatch, *axes: str) -> None:
    """From now on, no parameter's gradient is summed over other axes."""

    def sums(spec: ParamSpec) -> tuple[AxisConversion, ...]:
        return tuple(step for step in spec.conversions if step.axis in axes)

    monkeypatch.setattr(ParamSpec, "sums", property(sums))
