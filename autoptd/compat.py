"""Differences between torch releases (2.11 to 2.13), and every private import, in one place."""

from __future__ import annotations

import logging
import pickle
import types
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import cache
from typing import Any

import torch
import torch._decomp.decompositions
import torch.distributed as dist
import torch.fx._symbolic_trace
import torch.utils.checkpoint
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload, OpOverloadPacket
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch._subclasses.schema_check_mode import SchemaCheckMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._python_dispatch import _disable_current_modes as without_modes
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

# Contexts in which operators run on metadata, past modes and Python kernels.
WithoutDispatch, WithoutDispatcher = torch._C._DisableTorchDispatch, torch._C._DisablePythonDispatcher
# What fake tensors raise where a number or a size depends on values.
DATA_DEPENDENT = (DataDependentOutputException, DynamicOutputShapeException)

__all__ = [
    "DATA_DEPENDENT",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "OpOverloadPacket",
]
__all__ += ["PreDispatchMode", "TorchDispatchMode", "autograd_node_number", "bound_device", "default_store"]
__all__ += [
    "WithoutDispatch",
    "WithoutDispatcher",
    "fake_like",
    "gather_into",
    "interpreter_fault",
    "known_as_traced",
    "last_node_number",
    "load_compiler",
    "new_fake",
    "new_group",
]
__all__ += [
    "add_mm",
    "file_view",
    "mm_as",
    "plain_checkpoints",
    "save_item",
    "scatter_into",
    "set_grad_dtype",
]
__all__ += ["storage_info"]
__all__ += ["tree_flatten", "tree_leaves", "tree_map", "tree_unflatten"]
__all__ += ["enable_python_dispatcher", "quiet_fakes", "without_modes"]


def load_compiler() -> None:
    """Import torch's compiler, as the first fake tensors do: a second.

    To be called before a trace: a module that is imported while parts of torch are replaced keeps the replacements.
    """
    import torch._dynamo  # noqa: F401


@contextmanager
def known_as_traced() -> Iterator[None]:
    """Let models that ask torch hear that they are traced and exported; what runs is not bound to cuDNN, as in an
    export.
    """
    with ExitStack() as around:
        around.enter_context(torch.backends.cudnn.flags(enabled=False))
        around.enter_context(_replaced(torch.compiler, _is_compiling_flag=True, _is_exporting_flag=True))
        around.enter_context(_replaced(torch.fx._symbolic_trace, _is_fx_tracing_flag=True))
        around.enter_context(_lstm_of_one_shape())
        yield


def new_fake(
    mode: FakeTensorMode,
    size: torch.Size,
    stride: tuple[int, ...],
    dtype: torch.dtype,
    device: torch.device,
) -> FakeTensor:
    """Make a fake tensor in new memory, without an operator that modes see."""
    with WithoutDispatch(), WithoutDispatcher():
        return FakeTensor(mode, torch.empty_strided(size, stride, dtype=dtype, device="meta"), device)


def fake_like(x: torch.Tensor, mode: FakeTensorMode) -> FakeTensor:
    """Make a fake tensor with the metadata of `x`, a leaf, and a parameter if it is one."""
    made = new_fake(mode, x.shape, x.stride(), x.dtype, x.device)
    with WithoutDispatch():
        made.requires_grad_(x.requires_grad)
    if isinstance(x, torch.nn.Parameter):
        made._is_param = True
    return made


@contextmanager
def _replaced(module: types.ModuleType, **others: Any) -> Iterator[None]:
    """Replace values of a module in a block, of the names that this release of torch has."""
    names = vars(module)
    known = {name: names[name] for name in others if name in names}
    names.update({name: others[name] for name in known})
    try:
        yield
    finally:
        names.update(known)


class PreDispatchMode(SchemaCheckMode):
    """A mode that is called with operators above autograd: composite ones whole, as torch.export records
    them.

    Inside of a trace, or of `enable_python_dispatcher`.

    torch accepts only three of its modes there; this is the simplest of them, and none of its methods is
    used.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self, torch._C.DispatchKey.PreDispatch)


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keep fake tensors from logging a page where an operator refuses its operands."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    known, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = known


@contextmanager
def _lstm_of_one_shape() -> Iterator[None]:
    """Fix the shape of an LSTM's last states in torch.export of 2.11, where they have an additional dim of 1."""
    names = vars(torch._decomp.decompositions)
    known = names.get("one_layer_lstm")
    if known is None:
        yield
        return

    def reshaped(inp: torch.Tensor, hidden: Sequence[torch.Tensor], *rest: Any, **more: Any) -> Any:
        out, states = known(inp, hidden, *rest, **more)
        return out, tuple(x.reshape(like.shape) for x, like in zip(states, hidden, strict=True))

    names["one_layer_lstm"] = reshaped
    try:
        yield
    finally:
        names["one_layer_lstm"] = known


@contextmanager
def plain_checkpoints() -> Iterator[list[Any]]:
    """Let non-reentrant activation checkpoints call the wrapped functions, without recomputation.

    Yields a list, to which wrapped functions are added.
    """
    met: list[Any] = []
    names = vars(torch.utils.checkpoint)
    known = names["_checkpoint_without_reentrant_generator"]

    def plain(function: Any, *_: Any, **__: Any) -> Iterator[None]:
        met.append(function)
        yield

    names["_checkpoint_without_reentrant_generator"] = plain
    try:
        yield met
    finally:
        names["_checkpoint_without_reentrant_generator"] = known


def autograd_node_number() -> int | None:
    """Return the sequence number of the autograd node that runs on this thread, None outside of backward."""
    node = torch._C._current_autograd_node()
    return None if node is None else node._sequence_nr()


def last_node_number() -> int:
    """Return the sequence number of the last autograd node that this thread has made.

    Below autograd, an operator's own.
    """
    return torch.autograd._get_sequence_nr() - 1  # type: ignore[attr-defined]


def default_store() -> dist.Store:
    """Return the store of the default process group (torch has no public accessor)."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def set_grad_dtype(leaf: torch.Tensor, dtype: torch.dtype) -> None:
    """Let autograd add up `leaf.grad` in `dtype`; before the leaf is used, and without a gradient."""
    if leaf.grad_dtype != dtype:
        leaf.grad_dtype = dtype


def uses_of(x: torch.Tensor) -> int:
    """Return how many tensors and other owners refer to the memory of a tensor, this tensor included."""
    return torch._C._storage_Use_Count(x.untyped_storage()._cdata)


def mm_as(a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return a @ b in `dtype`, rounded once: the GEMM itself adds up in at least that."""
    if a.dtype == dtype:
        return a @ b
    # On the meta device nothing runs; it should show the memory of a GPU.
    if a.is_cuda or a.is_meta:
        return torch.mm(a, b, out_dtype=dtype)
    # The CPU has no GEMM with another dtype for its result.
    return a.to(dtype) @ b.to(dtype)


def add_mm(total: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return total + a @ b in `dtype`, written to `total`; the GEMM itself adds if torch has such a GEMM."""
    if total is None:
        return mm_as(a, b, dtype)
    if total.dtype == a.dtype or a.is_meta:
        return total.addmm_(a, b)
    if not a.is_cuda:
        # The CPU has no GEMM with another dtype for its result.
        return total.addmm_(a.to(total.dtype), b.to(total.dtype))
    if _gemm_adds_to(total.dtype, a.dtype, a.device):
        return torch.ops.aten.addmm.dtype_out(total, a, b, total.dtype, out=total)  # type: ignore[no-any-return]
    return total.add_(mm_as(a, b, total.dtype))


@cache
def _gemm_adds_to(wide: torch.dtype, narrow: torch.dtype, device: torch.device) -> bool:
    """Tell whether the GEMM of `narrow` operands can add to a sum in `wide`; releases differ, so it is tried."""
    total, ones = (
        torch.ones(16, 16, dtype=wide, device=device),
        torch.ones(16, 16, dtype=narrow, device=device),
    )
    try:
        torch.ops.aten.addmm.dtype_out(total, ones, ones, wide, out=total)
    except (AttributeError, RuntimeError):
        return False
    return bool((total == 17.0).all())


def new_group(
    name: str, ranks: Sequence[int], backend: str, timeout: timedelta, max_ctas: int | None, desc: str
) -> dist.ProcessGroup | None:
    """Call `dist.new_group` under a name of ours, on all ranks; None for those that are not in `ranks`.

    torch names a group by the number of groups that the process has made (or a hash of that and the ranks):
    if one process has made another number of groups, the names differ, and all wait for it. `max_ctas` bounds
    the SMs that NCCL uses for the group; the flight recorder shows `desc`.
    """
    from torch.distributed import distributed_c10d as c10d

    own = c10d._process_group_name
    c10d._process_group_name = lambda ranks, use_hashed_name: c10d.GroupName(name)  # type: ignore[assignment]
    try:
        made = dist.new_group(
            list(ranks),
            timeout=timeout,
            backend=backend,
            pg_options=_nccl_options(backend, timeout, max_ctas),
            group_desc=desc,
        )
    finally:
        c10d._process_group_name = own
    return made if dist.get_rank() in ranks else None


def _nccl_options(backend: str, timeout: timedelta, max_ctas: int | None) -> Any:
    """Return the options of an NCCL group, with a bound on its CTAs if requested; None for other backends.

    Collectives that overlap computation run on a separate stream of NCCL. It has high priority: otherwise a
    GEMM that was queued later would occupy all SMs, and the sum would start at its end.
    """
    if backend != "nccl" or not hasattr(dist, "ProcessGroupNCCL"):
        return None
    options = dist.ProcessGroupNCCL.Options()
    options.is_high_priority_stream = True
    # Otherwise torch warns that its own timeout is overridden.
    options._timeout = timeout
    if max_ctas is None:
        return options
    # A build against an older NCCL has neither.
    if hasattr(options, "config") and hasattr(options.config, "max_ctas"):
        options.config.max_ctas = max_ctas
    return options


def gather_into(handle: dist.ProcessGroup, whole: torch.Tensor, x: torch.Tensor, is_async: bool) -> Any:
    """Gather `x` of all ranks into `whole`: [t, *x.shape], contiguous.

    Returns the Work, None if there is nothing to wait for.
    """
    options = dist.distributed_c10d.AllgatherOptions()
    options.asyncOp = is_async
    return getattr(handle, _GATHER)(_flat(whole), _flat(x), options)


def scatter_into(handle: dist.ProcessGroup, mine: torch.Tensor, x: torch.Tensor, is_async: bool) -> Any:
    """Sum and scatter `x`, [t, *mine.shape], into `mine`; both contiguous.

    Returns what `gather_into` does.
    """
    options = dist.distributed_c10d.ReduceScatterOptions()
    options.asyncOp = is_async
    return getattr(handle, _SCATTER)(_flat(mine), _flat(x), options)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """Return the numbers in one dim, complex ones as pairs: gloo wants equal element counts on both sides."""
    return (torch.view_as_real(x) if x.is_complex() else x).view(-1)


# Methods of the group itself, a third of the time of those of torch.distributed; 2.13 has new names for them.
_GATHER = "all_gather_single" if hasattr(dist.ProcessGroup, "all_gather_single") else "_allgather_base"
_SCATTER = (
    "reduce_scatter_single" if hasattr(dist.ProcessGroup, "reduce_scatter_single") else "_reduce_scatter_base"
)


def bound_device() -> torch.device | None:
    """Return the device that the default process group was made for with `device_id=`, if there is such a
    group.
    """
    return (
        dist.group.WORLD.bound_device_id if dist.is_initialized() and dist.group.WORLD is not None else None
    )


@cache
def interpreter_fault() -> str:
    """Return the reason why Triton's interpreter cannot run kernels with a loop up to an argument, "" if it
    can.

    The one of Triton 3.6 converts an array of one dim to a number, which numpy 2.4 refuses; the one of 3.9
    does not, so it is tried. Compiled kernels are not affected. To be deleted when Triton 3.6 is no longer
    supported.
    """
    import numpy
    import triton
    from triton.runtime.interpreter import InterpretedFunction

    try:
        InterpretedFunction(_loop)[(1,)](1)
    except Exception as exc:
        return f"the interpreter of Triton {triton.__version__} fails with numpy {numpy.__version__}: {exc}"
    return ""


def _loop(n):  # type: ignore[no-untyped-def]  # Triton interprets annotations
    for _ in range(n):
        pass


def file_view(file: Any, offset: int, nbytes: int) -> Any:
    """Return a range of bytes of a file as a separate file, as torch.distributed.checkpoint reads its items."""
    # Its import takes half a second, and only checkpoints need it.
    from torch.distributed.checkpoint.utils import _create_file_view

    return _create_file_view(file, offset, nbytes)


def save_item(value: Any, file: Any) -> None:
    """Write what `torch.save(value, file)` writes, without its CRC32s: those of whole blocks are checked
    instead.

    torch turns them off for a whole process only (`set_crc32_options`).
    """
    from torch.serialization import DEFAULT_PROTOCOL, _get_storage_alignment, _save  # type: ignore[attr-defined]

    archive = torch._C.PyTorchFileWriter(file, False, _get_storage_alignment())  # type: ignore[call-overload]
    _save(value, archive, pickle, DEFAULT_PROTOCOL, False)
    archive.write_end_of_file()


def storage_info(file: str, offset: int, nbytes: int) -> Any:
    """Return the place of an item as the metadata of torch.distributed.checkpoint has it."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, nbytes)
