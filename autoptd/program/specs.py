"""Define the records of a program as plain data: parameters, inputs, crossings between stages, and
collectives.

In: the decisions of the compiler (`records/`). Out: records that the runtime, the reports and the plots read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from autoptd.errors import InternalError
from autoptd.ir.layout import Layout, copy_axes
from autoptd.ir.mesh import WITHIN_A_LAYER, Mesh, base, role_of
from autoptd.ir.placement import AxisConversion, Placement, Scope, conversions, itemsize
from autoptd.ir.types import Dims, Outer, ValueType, outer_size

# The conversion of a `Collective` that gathers a scattered transfer buffer.
GATHER = "gather"


@dataclass(frozen=True)
class InputSpec:
    """One tensor of the batch: leaf number `leaf` of the flattened `(args, kwargs)` of `step`.

    `shape` is that of one microbatch; `batched`: dim 0 is the batch. A microbatch has an equal part of each
    of the `blocks`: for 2 blocks, rows i and i + B/2.
    """

    name: str
    leaf: int
    batched: bool
    shape: tuple[int, ...]
    dtype: str
    blocks: int = 1


@dataclass(frozen=True)
class UpdatePart:
    """A value that microbatches keep for buffer updates: a part of a batch sum if `is_sum`, else equal in
    all.
    """

    shape: tuple[int, ...]
    is_sum: bool


@dataclass(frozen=True)
class OutputSpec:
    """A value that an evaluation returns, as a microbatch has it; it is one of the rows of the batch, of a sum
    over it, or ("same") equal in all microbatches.
    """

    name: str
    how: Literal["rows", "sum", "same"]
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model, under all of its names (`aliases`, `name` first).

    `storage` is the type that the optimizer steps, `use` the type that stages compute with, and `scope` how
    often storage is converted to use (see `ir/placement.py`), `sum_scope` how often its gradient is reduced.
    `shape` and `dims` are global, `stages` are the
    stages that use it. `adds` has, for each of them, how often the backward (and W) of one microbatch adds to
    the gradient; empty for once each. `dtype` is the dtype of the parameter in the user's model.
    `has_master`: storage is a separate tensor from the one that stages use, usually with more bits ("master
    weights": Micikevicius et al. 2018, section 3.1). `wire_dtype` is the dtype of its gradient reduce-scatter
    over replicas; "" for the dtype in which it accumulates.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dims: Dims
    requires_grad: bool
    stages: tuple[int, ...]
    storage: Placement
    use: Placement
    scope: Scope = "update"
    sum_scope: Scope = "step"
    # With the scope "use": the layer that it is gathered with; "" for none.
    unit: str = ""
    why: str = ""
    adds: tuple[int, ...] = ()
    dtype: str = ""
    has_master: bool = False
    wire_dtype: str = ""
    # Its atoms in a checkpoint if a pass has divided heads differently; else `dims`.
    model_dims: Dims = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", self.dtype or self.storage.dtype)
        # Ranks that store the same elements must step them alike, but with R each would step by a part of the
        # gradient.
        for axis, kind in self.storage.layout.over_mesh:
            if kind.kind != "S":
                raise InternalError(
                    self.name, f"is stored as {kind} over {axis}, where only I and S can be stored"
                )

    @property
    def is_apart(self) -> bool:
        """Whether stages use it in separate memory, which exists only while they do (ZeRO's stage 3)."""
        return self.scope != "update"

    @property
    def is_whole(self) -> bool:
        """Whether replicas have it and its gradient whole during all of a step: not with ZeRO's stages 2 and 3."""
        return (self.scope, self.sum_scope) == ("update", "step")

    @cached_property
    def conversions(self) -> tuple[AxisConversion, ...]:
        """The conversions from storage to use, by axis."""
        return conversions(self.storage.layout, self.use.layout)

    @property
    def sums(self) -> tuple[AxisConversion, ...]:
        """The conversions whose backward sums the gradient, in execution order."""
        return tuple(step for step in self.conversions if step.is_sum)

    def grad_bytes(self, mesh: Mesh) -> int:
        """Return the bytes of a rank's part of the gradient, in the dtype in which it is summed."""
        return math.prod(self.local_shape(mesh)) * itemsize(self.storage.sum_dtype)

    def adds_in(self, stage: int) -> int:
        return self.adds[self.stages.index(stage)] if self.adds else 1

    @property
    def shard(self) -> ValueType | None:
        """The S type over the axis that shards it (the slowest of several sub-axes); None if none does."""
        return self.use.layout.shards[0][1] if self.use.layout.shards else None

    def shard_axis(self, mesh: Mesh) -> str | None:
        """Return the axis or sub-axis along which ranks own consecutive chunks; None if each owns all of it."""
        return self.use.layout.chunk_axis(self.dims, mesh)

    @property
    def kind(self) -> str:
        """The letter of its type: S if an axis shards it, R if its gradient is partial over one, else I."""
        return self._within_layer.letter

    @property
    def outer(self) -> Outer:
        """The blocks of the sharded dim: a rank owns one contiguous chunk of each (S only)."""
        return outer_size(self.dims, self._cut)

    @property
    def cut_dim(self) -> int:
        """The sharded dim (S only)."""
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
        """The axes and sub-axes of replicas and context ranks that divide its storage; () if none do."""
        return tuple(axis for axis, kind in self.storage.layout.shards if kind.is_flat)

    def copy_axes(self, mesh: Mesh) -> list[str]:
        """Return the axes and sub-axes along which ranks store copies of it, in the same order on all ranks."""
        axes = copy_axes(self.use.layout, mesh)
        for axis in mesh.batch_axes:
            axes += mesh.parts(axis, [part for part in self.sharing_axes if base(part) == axis])
        return [axis for axis in axes if axis not in self.sharing_axes]

    @property
    def has_main_grad(self) -> bool:
        """Whether its gradient exists twice: in the accumulation dtype, and in the dtype of the parameter."""
        is_wider = itemsize(self.storage.sum_dtype) > itemsize(self.use.dtype)
        return bool(self.storage.grad_dtype) and not self.has_master and is_wider

    def local_bytes(self, mesh: Mesh) -> int:
        """Return the bytes that one rank computes with."""
        return math.prod(self.local_shape(mesh)) * itemsize(self.use.dtype)

    def padded_size(self, mesh: Mesh) -> int:
        """Return the size of the sharded dim if ranks do not divide it, so the last are padded; else 0."""
        return self.use.layout.padded_size(self.dims, mesh)

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        """Return the shape of the part that one rank computes with, and of its gradient."""
        return self.use.layout.local_shape(self.dims, mesh) if self.shard else self.shape

    def element_layout(self, mesh: Mesh) -> tuple[object, ...]:
        """Return the elements that each rank uses, comparable between programs; () if every rank uses all."""
        return self.use.layout.element_layout(self.dims, mesh)

    @property
    def _within_layer(self) -> Layout:
        """Its use over the axes that split a layer's values."""
        types = {axis: kind for axis, kind in self.use.layout.over_mesh if role_of(axis) in WITHIN_A_LAYER}
        return Layout(types)

    def type_text(self) -> str:
        """Describe the type in which a layer uses it, for display."""
        return self._within_layer.text(self.dims)


@dataclass(frozen=True)
class CrossingSpec:
    """A value that stage `source` computes and the stages `targets` read; `shape` is local, of one
    microbatch.

    `type` is the letter of its type over tp; `why` describes it, with the reason to send rather than
    recompute it.
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
    """One tensor of the message from stage `source` to `target`: the crossings `names` end to end, or their
    gradients.

    A tensor rank sends all of its `numel` elements (`parts` 1), or its `piece`, the last one padded with
    zeros; then the receivers gather the pieces over tp. `program/transfers.py` chooses.
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
    """The names that stage `index` reads and writes; `crossings` and `inputs` are keywords of its forward."""

    index: int
    crossings: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]


@dataclass(frozen=True)
class DropoutSpec:
    """One draw of the model, number `site` in call order: a dropout with drop probability `rate`, or noise.

    `batch` is the position of the batch rows in the value: (dim, elements of that dim before them); None if
    it has none.
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
    """One collective or send per microbatch (`scope`; or per "step", or per "update" of the parameters after
    it).

    `forward` and `backward` are its kinds in the two directions; every tensor and data rank of the pipeline
    ranks `pp_ranks` takes part. `payload_bytes` and `axis` are as in `program.calls.Call`.
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
    # How often per step, and per evaluation, unless once per microbatch.
    times: int = 1
    evaluation_times: int = 1


@dataclass(frozen=True)
class Line:
    """One operator of an emitted file: line `number` of `file`; `module` names a repeated layer by a star.

    `is_whole`: neither its operands nor its result are sharded, so every tensor rank does all of its work.
    """

    file: str
    number: int
    module: str
    operator: str
    is_whole: bool
