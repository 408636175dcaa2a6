"""Choose the device of a rank: one rule for the compiler, the planner and the runtime, before any rank
starts.

In: the requested `device` and `backend`, and the model's tensors. Out: a torch.device. Ranks as processes use
the GPU of their LOCAL_RANK, wherever the model is; ranks as threads stay where the model is.

    device_of_ranks(model.parameters(), None, None)    # under torchrun on a node with GPUs: cuda:3, of a model on the CPU too
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import torch
import torch.distributed as dist

from autoptd.compat import bound_device
from autoptd.errors import PlanError
from autoptd.kernels.forms import has_triton


def device_of_ranks(tensors: Iterable[torch.Tensor], device: str | None, backend: str | None) -> torch.device:
    """Return the device of this process's rank (or of its ranks, as threads), for a model with these tensors."""
    if has_launcher(backend):
        return process_device(device, backend)
    if device is None:
        device = str(next((tensor.device for tensor in tensors if not tensor.is_meta), "cpu"))
    return thread_device(device)


def check_device(device: str | torch.device | None) -> None:
    """Raise PlanError for a device that this process does not have."""
    target = torch.device(device or "cpu")
    site = f"device={str(device)!r}"
    if target.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (target.index or 0) >= count:
            remedy = "device='cpu'" if not count else f"a number below {count}"
            raise PlanError(site, f"torch finds {count} CUDA devices here", f"{remedy}, or leave it out")
        return
    try:
        has_values = not torch.empty(0, device=target).is_meta
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        raise PlanError(site, str(error).splitlines()[0], "'cpu' or 'cuda', or leave it out") from error
    if not has_values:
        raise PlanError(site, "has no values to compute with", "'cpu' or 'cuda', or leave it out")


def default_fusion(tensors: Iterable[torch.Tensor], device: str | None, backend: str | None) -> str:
    """Return the fastest backend of fused operators for the device of the ranks."""
    is_cuda = device_of_ranks(tensors, device, backend).type == "cuda"
    return "triton" if is_cuda and has_triton() else "eager"


def has_launcher(backend: str | None) -> bool:
    """Tell whether ranks are processes: there is a process group or torchrun's environment, and `backend` is not local."""
    if backend == "local":
        return False
    # An initialized process group means processes, even a group of one.
    if dist.is_available() and dist.is_initialized():
        return True
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def process_device(device: str | None, backend: str | None) -> torch.device:
    """Return this process's device; "cuda" is that of the default group, else that of LOCAL_RANK, else the current one."""
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
    # A launcher may make only its own device visible to each process: then that is number 0.
    return torch.device("cuda", int(os.environ["LOCAL_RANK"]) if torch.cuda.device_count() > 1 else 0)


def thread_device(device: str) -> torch.device:
    """Return the device of all rank threads; "cuda" is the caller's current device."""
    # Made explicit here, because the current device is per thread.
    target = torch.device(device)
    if target.type == "cuda" and target.index is None and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return target
