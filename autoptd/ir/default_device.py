"""Where tensors that the compiler makes for itself are: on the CPU, whatever the user has made torch's default device.

`torch.set_default_device("cuda")` at the top of a script is for the model. What the passes try, count and compare is small,
and read at once.

    with on_cpu():
        torch.arange(3)    # on the CPU
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_cpu() -> AbstractContextManager[object]:
    """Return a block in which tensors are made on the CPU where no device is named."""
    # Each call of torch costs time within `torch.device`: it is entered where it changes something.
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


__all__ = ["on_cpu"]
