"""Parameters without memory, on which a model is traced, or its state compared with that of a folder."""

from __future__ import annotations

import torch
from torch import nn

from autoptd.compat import FakeTensorMode


def fake_mode() -> FakeTensorMode:
    return FakeTensorMode(allow_non_fake_inputs=True)


def fake_parameter(
    parameter: nn.Parameter, mode: FakeTensorMode, device: str | torch.device = "cpu"
) -> nn.Parameter:
    """Make a parameter without memory that says that it is on a device."""
    with mode:
        x = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device=device)
        return nn.Parameter(x, requires_grad=parameter.requires_grad)


__all__ = ["fake_mode", "fake_parameter"]
