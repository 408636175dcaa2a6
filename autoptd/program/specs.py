"""The records of a program, plain data: parameters, inputs, what crosses between stages, and what is communicated.

In: what the compiler decided (`records/`). Out: what the runtime, the reports and the pictures read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from autoptd.errors import InternalError
from autoptd.ir.layout import Layout, copy_axes
from autoptd.ir.mesh import WITHIN_A_LAYER, Mesh, role_of
from autoptd.ir.placement import AxisConversion, Placement, Scope, conversions, itemsize
from autoptd.ir.sub_axes import base
from autoptd.ir.types import Dims, Outer, ValueType, outer_size

# The conversion of a `Collective` that gathers a scattered transfer buffer.
GATHER = "gather"


@dataclass(frozen=True)
class InputSpec:
    """One tensor of the batch: leaf number `leaf` of the flattened `(args, kwargs)` of `step`.

    `shape` is that of one microbatch; `batched`: dim 0 is the batch. A microbatch has an equal part of each of its
    `blocks`: of 2, the rows i and those of the other half, i + B/2.
    """

    name: str
    leaf: int
    batched: bool
    shape: tuple[int, ...]
    dtype: str
    blocks: int = 1


@dataclass(frozen=True)
class UpdatePart:
    """What microbatches leave for the updates of buffers: `is_sum`: a part of a sum over the batch, else the same of all."""

    shape: tuple[int, ...]
    is_sum: bool


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model, under all of its names (`aliases`, `name` first).

    `storage` is what the optimizer steps, `use` what stages compute with, and `scope` how often storage is converted to
    use (see `ir/placement.py`). `shape` and `dims` are global, `stages` are the stages that use it. `adds` has, for each
    of them, how often the backward (and W) of one microbatch adds to the gradient; empty for once each. `dtype` is the
    parameter's in the model as it was handed in. `has_master`: storage is a tensor of its own beside what stages use, of
    more bits as a rule ("master weights": Micikevicius et al. 2018, section 3.1). `wire_dtype` is that in which its gradient
    travels where it is scattered over replicas; "" for the dtype in which it adds up.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dims: Dims
    requires_grad: bool
    stages: tuple[int, ...]
    storage: Placement
    use: Placement
    scope: Scope = "step"
    why: str = ""
    adds: tuple[int, ...] = ()
    dtype: str = ""
    has_master: bool = False
    wire_dtype: str = ""
    # What a checkpoint says of its atoms where a pass has divided heads otherwise; else `dims`.
    model_dims: Dims = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.dtype or self.storage.dtype)
        # Ranks that store the same elements must step them alike: with R, each would step by a part of the
        # gradient.
        for axis, kind in self.storage.layout.over_mesh:
            if kind.kind != "S":
                raise InternalError(
                    self.name, f"is stored as {kind} over {axis}, where only I and S can be stored"
                )

    @cached_property
    def conversions(self) -> tuple[AxisConversion, ...]:
        """The conversions from storage to use, by axis."""
        return conversions(self.storage.layout, self.use.layout)

    @property
    def sums(self) -> tuple[AxisConversion, ...]:
        """The conversions whose backward sums the gradient, in the order of summing."""
        return tuple(step for step in self.conversions if step.is_sum)

    def grad_bytes(self, mesh: Mesh) -> int:
        """Return the bytes of a rank's part of the gradient, in the dtype in which it is summed."""
        return math.prod(self.local_shape(mesh)) * itemsize(self.storage.sum_dtype)

    def adds_in(self, stage: int) -> int:
        return self.adds[self.stages.index(stage)] if self.adds else 1

    @property
    def shard(self) -> ValueType | None:
        """The S type over the axis that cuts it (over the slowest of several sub-axes); None if every rank uses all of it."""
        return self.use.layout.shards[0][1] if self.use.layout.shards else None

    def shard_axis(self, mesh: Mesh) -> str | None:
        """Return the axis or sub-axis along which ranks own consecutive chunks; None if every rank owns all of it."""
        return self.use.layout.chunk_axis(self.dims, mesh)

    @property
    def kind(self) -> str:
        """The letter of its type: S if an axis cuts it, R if its gradient is a partial sum over one, else I."""
        return self._within_layer.letter

    @property
    def outer(self) -> Outer:
        """A rank owns one contiguous chunk of each of `outer` blocks of the dim that is cut (S only)."""
        return outer_size(self.dims, self._cut)

    @property
    def cut_dim(self) -> int:
        """The dim that is cut (S only)."""
        return self._cut.dim

    @property
    def _cut(self) -> ValueType:
        assert self.shard is not None, f"{self.name} is whole"
        return self.shard

    def owners(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return the pipeline ranks that hold a copy, ascending; `ranks` is the pipeline rank of every stage."""
        return tuple(sorted({ranks[stage] for stage in self.stages}))

    @cached_property
    def sharing_axes(self) -> tuple[str, ...]:
        """The axes and sub-axes of replicas, and of other tokens, whose ranks divide its storage; () where each stores it."""
        return tuple(axis for axis, kind in self.storage.layout.shards if kind.is_flat)

    def copy_axes(self, mesh: Mesh) -> list[str]:
        """Return the axes and sub-axes along which ranks store the same of it, in one order on all ranks."""
        axes = copy_axes(self.use.layout, mesh)
        for axis in mesh.batch_axes:
            axes += mesh.parts(axis, [part for part in self.sharing_axes if base(part) == axis])
        return [axis for axis in axes if axis not in self.sharing_axes]

    @property
    def has_main_grad(self) -> bool:
        """Whether its gradient is there twice: as it adds up, and in the dtype of the parameter."""
        is_wider = itemsize(self.storage.sum_dtype) > itemsize(self.use.dtype)
        return bool(self.storage.grad_dtype) and not self.has_master and is_wider

    def local_bytes(self, mesh: Mesh) -> int:
        """Return the bytes of what one rank computes with."""
        return math.prod(self.local_shape(mesh)) * itemsize(self.use.dtype)

    def padded_size(self, mesh: Mesh) -> int:
        """Return the size of the cut dim if the ranks do not divide it, so that the last ones have padding; else 0."""
        return self.use.layout.padded_size(self.dims, mesh)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of what one rank computes with, and of its part of the gradient."""
        return self.use.layout.local_shape(self.dims, mesh) if self.shard else self.shape

    def element_layout(self, mesh: Mesh) -> tuple[object, ...]:
        """Return which of its elements each rank uses, comparable between programs; () where every rank uses all."""
        return self.use.layout.element_layout(self.dims, mesh)

    @property
    def _within_layer(self) -> Layout:
        """Its use over the axes along which ranks divide a layer's values."""
        types = {axis: kind for axis, kind in self.use.layout.over_mesh if role_of(axis) in WITHIN_A_LAYER}
        return Layout(types)

    def type_text(self) -> str:
        """Describe the type in which a layer uses it, for people."""
        return self._within_layer.text(self.dims)


@dataclass(frozen=True)
class CrossingSpec:
    """A value that stage `source` computes and the stages `targets` read; `shape` is local, of one microbatch.

    `type` is the letter of its type over tp; `why` says what it is, and why it is sent rather than recomputed.
    """

    name: str
    source: int
    targets: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    has_grad: bool
    type: str = "I"
    why: str = ""


@dataclass(frozen=True)
class TransferBuffer:
    """One tensor of the message from stage `source` to `target`: the crossings `names` end to end, or their gradients.

    Of its `numel` elements a tensor rank sends all (`parts` 1) or its `piece`, the last one filled up with zeros; then
    the receivers gather the pieces over tp. Which of the two: `program/transfers.py`.
    """

    source: int
    target: int
    is_gradient: bool
    names: tuple[str, ...]
    dtype: str
    numel: int
    parts: int = 1
    why: str = ""

    @property
    def piece(self) -> int:
        """Elements that one tensor rank sends."""
        return -(-self.numel // self.parts)

    @property
    def sent_bytes(self) -> int:
        """Bytes that one tensor rank sends."""
        return self.piece * itemsize(self.dtype)

    @property
    def site(self) -> str:
        """The site of its calls, in errors and records."""
        return f"stage {self.source} to {self.target}"


@dataclass(frozen=True)
class StageSpec:
    """What stage `index` reads and writes; `crossings` and `inputs` are keywords of its forward."""

    index: int
    crossings: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class DropoutSpec:
    """One draw of the model, number `site` in the order of calls: a dropout, of which a share `rate` is dropped, or noise.

    `batch` is where the value has the rows of the batch: (dim, elements of that dim before them); None: nowhere.
    """

    site: int
    module: str
    rate: float
    batch: tuple[int, int] | None
    why: str = ""
    # "uniform", "normal" or "exponential" (`ir/noise.py`); "": a dropout.
    noise: str = ""


@dataclass(frozen=True)
class Collective:
    """One collective or send of one microbatch (`scope`; or of one "step", or one "update" of the parameters behind it).

    `forward` and `backward` are its kinds in the two directions; every tensor and data rank of the pipeline ranks
    `pp_ranks` takes part. `payload_bytes` and `axis` are those of `program.calls.Call`.
    """

    site: str
    stage: int
    conversion: str
    axis: str
    forward: str
    backward: str
    payload_bytes: int
    group_size: int
    why: str
    scope: str = "microbatch"
    pp_ranks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Line:
    """One operator of an emitted file: line `number` of `file`; `module` names a repeated layer by a star.

    `is_whole`: neither its operands nor its result are sharded, so that every tensor rank does all of its work.
    """

    file: str
    number: int
    module: str
    operator: str
    is_whole: bool
