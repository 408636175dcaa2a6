"""Keep the compiler's own tensors on the CPU, whatever the user's default device is.

`torch.set_default_device("cuda")` at the top of a script is meant for the model. The tensors on which passes
test and count are small, and read at once.

    with on_cpu():
        torch.arange(3)    # on the CPU
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch


def on_cpu() -> AbstractContextManager[object]:
    """Return a context in which tensors are created on the CPU unless a device is named."""
    # `torch.device` slows down every call of torch: enter it only if it changes something.
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


__all__ = ["on_cpu"]
