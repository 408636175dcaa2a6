"""Collect what a rank writes into a checkpoint, copy it so that training can continue, and write it.

In: a rank's parameters and their optimizer state. Out: `Staged`, tensors with their places in full tensors;
later the rank's file in the folder of the save, and its report. No communication.

    staged = stage(rank.params, optimizer.state, copy)         # on the rank's thread
    write_rank(part, staged, objects)                          # on any thread

With the default `copy`, tensors are views: training must wait until they are written. `copied` clones them.
`Staging` copies them into buffers that are kept for the run; on CUDA a separate stream does so during the
next forward and backward, and the stream that changes a tensor waits for the copy:

    staging = Staging(device)
    staging.begin(); x = staging(parameter); staging.seal()
    staging.release()                                          # before an update
    staging.ready()                                            # before x is read, by any thread

The stagers of torch.distributed.checkpoint copy all memory that a view is part of, leave the wait to the
loop, and do not notice a parameter that is changed before the copy is complete.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch

from autoptd.errors import RuntimeFault
from autoptd.program.pieces import Shares, StateKeys, share_stage, view_of
from autoptd.runtime.checkpoint.commit import Report, entry_of, leave_report
from autoptd.runtime.checkpoint.manifest import Staged, StagedTensor, crc_file, encode
from autoptd.runtime.folders.disk import write_file
from autoptd.runtime.params.fingerprint import fingerprint_of_rectangle
from autoptd.runtime.params.guard import unguarded
from autoptd.runtime.params.parameters import RankParameters

# Turns a stored tensor into the one to be written.
Copy = Callable[[torch.Tensor], torch.Tensor]
OptimizerState = Mapping[torch.Tensor, Mapping[str, Any]]
# The parameters that are stepped as a whole: the tensor, or None where its home is another rank.
Homes = Mapping[str, torch.Tensor | None]
NO_HOMES: Homes = {}
_shares: WeakKeyDictionary[RankParameters, tuple[StateKeys, Shares]] = WeakKeyDictionary()


def shown(x: torch.Tensor) -> torch.Tensor:
    """Return the same memory: for a save that ends before anything changes."""
    return x


def copied(x: torch.Tensor) -> torch.Tensor:
    """Return a copy in the host's memory."""
    return x.to("cpu", copy=True, memory_format=torch.contiguous_format)


@unguarded()
@torch.no_grad()
def stage(
    params: RankParameters, state: OptimizerState | None, copy: Copy = shown, homes: Homes = NO_HOMES
) -> Staged:
    """Collect what this rank writes of the parameters and of the optimizer's `state`, if there is one.

    The state of a parameter with a home is written there.
    """
    world = params.world
    params.wait()
    params.absorb_edits()
    staged = Staged(world.rank)
    held = {name: (state or {}).get(x, {}) for name, x in params.stored.items()}
    shares = _shares_of(params, _keys_of(params, held))
    specs = {spec.name: spec for spec in params.specs}
    for item in shares.items[world.rank]:
        source = held[item.name][item.key] if item.key else params.stored[item.name]
        x = copy(view_of(source, item.rectangle))
        staged.tensors.append(
            StagedTensor(item.name, item.key, specs[item.name].shape, item.rectangle.offsets, x)
        )
    for name, first in shares.first.items():
        if first == world.rank:
            _stage_others(staged, name, params.stored[name], held[name], copy)
    for name, whole in homes.items():
        if whole is not None:
            _stage_others(staged, name, None, (state or {}).get(whole, {}), copy)
    return staged


def _stage_others(
    staged: Staged, name: str, stored: torch.Tensor | None, state: Mapping[str, Any], copy: Copy
) -> None:
    """Add the entries of a parameter's optimizer state that do not have the shape of `stored`: step counts, numbers."""
    for key, value in sorted(state.items()):
        if not isinstance(value, torch.Tensor):
            site = f"optimizer state {key!r} of {name}"
            staged.values.setdefault(name, {})[key] = encode(value, site)
        elif stored is None or not is_like(key, value, stored):
            # Equal on all ranks, as all steps are, or of this one alone.
            staged.tensors.append(StagedTensor.whole(name, key, copy(value.detach())))


def _shares_of(params: RankParameters, keys: StateKeys) -> Shares:
    """Return what each rank of this pipeline rank writes, which is the same at every save."""
    known = _shares.get(params)
    if known is None or known[0] != keys:
        known = _shares[params] = (keys, share_stage(params.program, params.world.pipeline_rank, keys))
    return known[1]


def _keys_of(params: RankParameters, held: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, int]]:
    """Return, by parameter, the keys of state tensors of its shape, with the bytes of an element."""
    keys: dict[str, dict[str, int]] = {}
    for name, state in held.items():
        stored = params.stored[name]
        keys[name] = {
            key: value.element_size()
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and is_like(key, value, stored)
        }
    return keys


def is_like(key: str, value: torch.Tensor, stored: torch.Tensor) -> bool:
    """Tell whether a tensor of an optimizer's state has an element for each of its parameter.

    A step count is 0-d, but so are the moments of a 0-d parameter.
    """
    return value.shape == stored.shape and not (key == "step" and value.dim() == 0)


@unguarded()
def write_rank(part: Path, staged: Staged, objects: Mapping[str, Any]) -> None:
    """Write a rank's `__<rank>_0.distcp`, with its tensors and `objects` by name, the CRC32s of its blocks,
    and its report.

    Nothing is communicated, so any thread may do it.
    """
    from autoptd.runtime.checkpoint.storage import write_items

    prints: dict[str, int] = {}
    for item in staged.tensors:
        if not item.key:
            own = fingerprint_of_rectangle(item.x, item.name, item.shape, item.offsets)
            prints[item.name] = prints.get(item.name, 0) + own
    plan, results, written = write_items(part, staged, objects)
    report = Report(staged.rank, plan, results, staged.values, prints)
    if written is not None:
        name, file = written
        crcs = struct.pack(f"<{len(file.crcs)}I", *file.crcs)
        write_file(part / crc_file(name), crcs)
        report.files = {name: {"bytes": file.nbytes}, crc_file(name): entry_of(crcs)}
    leave_report(part, report)


class Staging:
    """Copies tensors into buffers of the host: see the module's docstring. On the CPU, a copy is complete at
    once.
    """

    def __init__(self, device: torch.device) -> None:
        # In the order of the copies: each save makes the same ones.
        self._buffers: list[torch.Tensor] = []
        self._count = 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._is_torn = False

    def begin(self) -> None:
        """Begin a save, which overwrites the copies of the save before."""
        self._count, self._versions, self._is_torn = 0, [], False
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """Return a contiguous tensor that will have the values of `x`."""
        x = x.detach()
        buffer = self._buffer_for(x)
        if x.is_cuda:
            self._versions.append((x, x._version))
        with torch.cuda.stream(self._stream) if x.is_cuda else nullcontext():
            buffer.copy_(x, non_blocking=x.is_cuda)
        return buffer

    def seal(self) -> None:
        """Note that all copies were started."""
        if self._stream is not None:
            self._copied = torch.cuda.Event()
            self._copied.record(self._stream)

    def release(self) -> None:
        """Let the current stream wait for the copies, so that it may change the tensors."""
        if self._stream is None or self._copied is None or not self._versions:
            return
        torch.cuda.current_stream(self._stream.device).wait_event(self._copied)
        # Torch counts the writes to a tensor: a write before this call may have come during the copy.
        self._is_torn |= any(x._version != version for x, version in self._versions)
        self._versions = []

    def ready(self) -> None:
        """Wait until the copies are complete; RuntimeFault if a tensor was changed meanwhile."""
        if self._copied is not None:
            self._copied.synchronize()
        if self._is_torn:
            fact = "a parameter was changed in place while it was being copied"
            remedy = "change parameters before the call of ckpt.step, or by the optimizer"
            raise RuntimeFault("pm.checkpointer", fact, remedy)

    def _buffer_for(self, x: torch.Tensor) -> torch.Tensor:
        number, self._count = self._count, self._count + 1
        known = self._buffers[number] if number < len(self._buffers) else None
        if known is None or known.shape != x.shape or known.dtype != x.dtype:
            # Optimizers get their state in the first step: the second save copies more tensors.
            known = torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=x.is_cuda)
            self._buffers[number : number + 1] = [known]
        return known
