"""Which device a rank takes: one rule for the compiler, the planner and the runtime, before there are any ranks.

In: the `device` and `backend` that were asked for, and the model's tensors. Out: a torch.device. Ranks as processes take the
GPU of their LOCAL_RANK, wherever the model is; ranks as threads stay where the model is.

    device_of_ranks(model.parameters(), None, None)    # under torchrun on a node with GPUs: cuda:3, of a model on the CPU too
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from autoptd.compat import bound_device
from autoptd.kernels.forms import has_triton
from autoptd.options import Options


def device_of_ranks(tensors: Iterable[torch.Tensor], device: str | None, backend: str | None) -> torch.device:
    """The device that this process's rank (or ranks, as threads) will take, of a model that has these tensors."""
    if has_launcher(backend):
        return process_device(device, backend)
    return thread_device(device or str(next((one.device for one in tensors if not one.is_meta), "cpu")))


def default_fusion(tensors: Iterable[torch.Tensor], options: Options) -> str | bool:
    """The backend of fused operators: what was asked for, or the fastest for the device of the ranks."""
    if options.fuse is not None:
        return options.fuse
    device = device_of_ranks(tensors, options.device, options.backend)
    return "triton" if device.type == "cuda" and has_triton() else "eager"


def has_launcher(backend: str | None) -> bool:
    """Whether ranks will be processes: there is a process group, or what torchrun tells, and threads were not asked for."""
    if backend == "local":
        return False
    return (dist.is_available() and dist.is_initialized()) or (
        "RANK" in os.environ and "WORLD_SIZE" in os.environ
    )


def process_device(device: str | None, backend: str | None) -> torch.device:
    """This process's device; "cuda" is that of the default group, if it has one, else that of LOCAL_RANK, else the current."""
    if device is None:
        device = "cuda" if backend != "gloo" and torch.cuda.is_available() else "cpu"
    target = torch.device(device)
    if target.type != "cuda" or target.index is not None:
        return target
    bound = bound_device()
    if bound is not None and bound.type == "cuda":
        return bound
    if "LOCAL_RANK" not in os.environ:
        return torch.device("cuda", torch.cuda.current_device())
    # A launcher may show each process its own device only.
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) if torch.cuda.device_count() > 1 else 0)


def thread_device(device: str) -> torch.device:
    """The device of all rank threads; "cuda" is the caller's current one, as threads have current devices of their own."""
    target = torch.device(device)
    if target.type == "cuda" and target.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return target


__all__ = ["default_fusion", "device_of_ranks", "has_launcher", "process_device", "thread_device"]
