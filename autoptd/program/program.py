"""The result of a compilation: everything that the runtime needs to train, as plain data.

A `Program` holds one readable source file per stage, the records below, the schedule, and the values of buffers. It can be
written to a folder and read back without tracing:

    program.save("out/")            # stage_0.py ... program.json, schedule.txt, constants.pt
    program = Program.load("out/")

Calling convention of a stage: `Stage.forward` takes, by keyword, the crossings it reads and the batch inputs it reads, each
one microbatch; it returns a tuple of the crossings it writes, in the order of `StageSpec.outputs`. The loss stage returns its
loss last. Loss values add up: the sum over all microbatches and data-parallel replicas is the loss of the global batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import torch

from autoptd.errors import PlanError
from autoptd.ir.actions import Action, Orders, format_orders, parse_orders, ranks_of_stages
from autoptd.ir.buffers import digest
from autoptd.ir.fallback import Fallback
from autoptd.ir.fusion import Fusion
from autoptd.ir.layout import Layout
from autoptd.ir.mesh import Mesh
from autoptd.ir.types import Dims, Outer, Segmented, ValueType, outer_size, padded_size, placement
from autoptd.program.costs import Costs, read_costs, tupled

VERSION = 6
GATHER = "gather"  # the conversion of a `Collective` that puts a scattered parcel together


@dataclass(frozen=True)
class InputSpec:
    """One tensor of the batch: leaf number `leaf` of the flattened `(args, kwargs)` of `step`.

    `shape` is that of one microbatch; `batched` says that dim 0 carries the batch axis.
    """

    name: str
    leaf: int
    batched: bool
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model, once, however many names (`aliases`, `name` first) it is tied under.

    `type` is its type over tp (I, R or S), `shape` and `dims` are global, `stages` are the stages that use it. `adds` tells,
    for each of them, how often the backward (and W) of one microbatch adds to the gradient; empty for once each. `grad_dtype`
    is the dtype in which gradients add up, where that was asked for: then the parameter has a `main_grad`.
    """

    name: str
    aliases: tuple[str, ...]
    shape: tuple[int, ...]
    dtype: str
    requires_grad: bool
    stages: tuple[int, ...]
    layout: Layout
    dims: Dims
    why: str = ""
    adds: tuple[int, ...] = ()
    grad_dtype: str = ""

    @property
    def sum_dtype(self) -> str:
        """The dtype in which gradients add up, over microbatches and over ranks."""
        return self.grad_dtype or self.dtype

    def grad_bytes(self, mesh: Mesh) -> int:
        """Bytes of a rank's part of the gradient, as it is summed: of a piece that ranks share, in its place of the whole."""
        shape = self.shape if self.is_shared else self.local_shape(mesh)
        return math.prod(shape) * int(getattr(torch, self.sum_dtype).itemsize)

    def adds_in(self, stage: int) -> int:
        return self.adds[self.stages.index(stage)] if self.adds else 1

    @property
    def shard(self) -> tuple[str, ValueType] | None:
        """The axis of the mesh along which a rank owns a part, and the type; None where every rank owns all of it."""
        return self.layout.shard

    @property
    def is_shared(self) -> bool:
        """Whether several ranks of the axis that cuts it hold the same piece."""
        return self.shard is not None and self.shard[1].copies > 1

    @property
    def kind(self) -> str:
        """The letter of its type: S if an axis cuts it, R if its gradient is a partial sum over one, else I."""
        return "S" if self.shard else "R" if self.layout.over_mesh else "I"

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
        return self.shard[1]

    def owners(self, ranks: Sequence[int]) -> tuple[int, ...]:
        """Pipeline ranks that hold a copy, ascending; `ranks` are those of all stages."""
        return tuple(sorted({ranks[stage] for stage in self.stages}))

    def local_bytes(self, mesh: Mesh) -> int:
        """Bytes of one rank's part."""
        return math.prod(self.local_shape(mesh)) * int(getattr(torch, self.dtype).itemsize)

    def padded_size(self, mesh: Mesh) -> int:
        """Rows of a dim that the ranks do not divide, of which the last ones hold zeros instead; 0 where nothing is padded."""
        return padded_size(self.dims, self.shard[1], mesh.degree(self.shard[0])) if self.shard else 0

    def local_shape(self, mesh: Mesh) -> tuple[int, ...]:
        return self.layout.local_shape(self.dims, mesh) if self.shard else self.shape

    def placement(self, mesh: Mesh) -> tuple[object, ...]:
        """Where its elements lie on the ranks, whatever atoms its dims are written in: () where each has all."""
        return placement(self.dims, self.shard[1], mesh.degree(self.shard[0])) if self.shard else ()

    def type_text(self) -> str:
        return self.layout.text(self.dims)


@dataclass(frozen=True)
class CrossingSpec:
    """A value made by stage `source` and read by the stages `targets`; `shape` is local, of one microbatch.

    `type` is the letter of its type over tp; `why`: what it is, and why it is sent and not computed again.
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
class Parcel:
    """One tensor of the message of stage `source` to stage `target`: the crossings `names` end to end, or their gradients.

    Of its `numel` elements a tensor rank sends all (`parts` 1) or its `piece`, the last one filled up with zeros; then the
    receivers gather the pieces over tp. How that is decided: `program/transfers.py`.
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
        return self.piece * int(getattr(torch, self.dtype).itemsize)

    @property
    def site(self) -> str:
        """What records call the calls that it takes."""
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
    """One dropout of the model, number `site` in the order of calls: a share `rate` is dropped.

    `batch` is where the value carries the rows of the batch: (dim, elements of that dim before them); None: nowhere.
    """

    site: int
    module: str
    rate: float
    batch: tuple[int, int] | None
    why: str = ""


@dataclass(frozen=True)
class Collective:
    """One collective or send of one microbatch (or, with `scope="step"`, of one step), as the compiler inserted it.

    `forward` and `backward` are what it does in the two directions; every tensor and data rank of the pipeline ranks `pp_ranks`
    takes part. `payload_bytes` and `axis` are those of `ir.calls.Call`.
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

    `is_whole`: neither what it reads nor what it gives is sharded, so that every tensor rank does all of its work.
    """

    file: str
    number: int
    module: str
    operator: str
    is_whole: bool


class Picture(Protocol):
    """What `Program.graph` returns: `viz/picture.py`."""

    @property
    def dot(self) -> str: ...

    @property
    def svg(self) -> str | None: ...

    @property
    def why_not(self) -> str: ...

    def save(self, path: str | Path) -> None: ...


@dataclass(frozen=True)
class Program:
    """A compiled model: see the module's docstring."""

    mesh: Mesh
    v: int
    num_microbatches: int
    schedule_name: str
    tree: str  # structure of the (args, kwargs) that `step` takes
    constants: tuple[tuple[int, Any], ...]  # leaves of the call that are no tensors: baked in, compared at every step
    inputs: tuple[InputSpec, ...]
    params: tuple[ParamSpec, ...]
    crossings: tuple[CrossingSpec, ...]
    stages: tuple[StageSpec, ...]
    orders: Orders
    sources: dict[str, str]  # file name -> text
    collectives: tuple[Collective, ...] = ()
    parcels: tuple[Parcel, ...] = ()  # what travels between pipeline ranks for one microbatch
    lines: tuple[Line, ...] = ()
    seed: int = 0  # of the dropout masks
    looked_at: tuple[tuple[str, str], ...] = ()  # buffers whose values the compiler has read, with their digests
    dropouts: tuple[DropoutSpec, ...] = ()
    fallbacks: tuple[Fallback, ...] = ()  # operators that tp does not split as one would expect, and why
    fuse: str | bool = False  # the backend of fused operators
    fusions: tuple[Fusion, ...] = ()  # what they stand for, and what they do not, with the reason
    unlisted: tuple[str, ...] = ()  # operators without a row of the table, and what probing found of them
    weighted: bool = False  # the loss stage has `count(...)`: labels to count before the first forward
    plan: dict[str, Any] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    graphs: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    explainer: Callable[[str], str] | None = field(default=None, repr=False, compare=False)
    painter: Callable[[Program, str, int | None], Picture] | None = field(default=None, repr=False, compare=False)

    @property
    def loss_stage(self) -> int:
        return len(self.stages) - 1

    @property
    def rows(self) -> int:
        """Rows of the batch in a microbatch."""
        return next((spec.shape[0] for spec in self.inputs if spec.batched), 1)

    @property
    def schedule(self) -> str:
        return format_orders(self.orders)

    def explain(self, module: str) -> str:
        """Return how tp splits the parameters and matrix products of a module (or one parameter), why, and what every other
        way would have cost: seconds per microbatch more than the chosen plan, memory priced in.

        PlanError for a name that the model does not have, and for a program that was loaded: the solver's tables are not saved.
        """
        if self.explainer is None:
            raise PlanError("explain", "a loaded program has no costs of alternatives", "compile the model again")
        return self.explainer(module)

    def graph(self, level: str = "layer", stage: int | None = None) -> Picture:
        """Return a picture of the program: `.svg` and `.dot` are its text, `.save("graph.svg")` writes it, notebooks show it.

        `level` is "model" (the stages and what they send each other), "layer" (the operators of one of each distinct layer) or
        "full" (all operators); with `stage`, of that stage alone. PlanError for others.
        """
        if self.painter is None:
            remedy = "autoptd.viz.graph_picture(program, 'model'), or compile the model again"
            raise PlanError("program.graph", "a loaded program has no graphs", remedy)
        return self.painter(self, level, stage)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The pipeline rank of every stage, as the schedule has it."""
        return ranks_of_stages(self.orders)

    def rank_of_stage(self, stage: int) -> int:
        """Pipeline rank that holds `stage`."""
        return self.ranks[stage]

    def chunk_of_stage(self, stage: int) -> int:
        """Which model chunk of its pipeline rank `stage` is: 0 for the rank's first one."""
        return self.ranks[:stage].count(self.ranks[stage])

    def param(self, name: str) -> ParamSpec:
        return next(spec for spec in self.params if name in spec.aliases)

    def differing(self, buffers: Mapping[str, torch.Tensor]) -> list[str]:
        """Names of buffers that the program was compiled for other values of: those that the compiler has read."""
        return [name for name, text in self.looked_at if name in buffers and digest(buffers[name]) != text]

    def fingerprint(self) -> str:
        """Hash of everything that ranks must agree on before the first step."""
        text = json.dumps(self._record(), sort_keys=True) + json.dumps(self.sources, sort_keys=True) + self.schedule
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, folder: str | Path) -> None:
        """Write the program to `folder`; `load` reads it back without tracing."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.sources.items():
            (folder / name).write_text(text)
        (folder / "program.json").write_text(_json(self._record()))
        (folder / "plan.json").write_text(_json(self.plan))
        (folder / "schedule.txt").write_text(self.schedule)
        torch.save(self.buffers, folder / "constants.pt")

    @staticmethod
    def load(folder: str | Path) -> Program:
        """Read a program that `save` wrote; the graphs stay behind."""
        folder = Path(folder)
        record = json.loads((folder / "program.json").read_text())
        if record.pop("version") != VERSION:
            raise ValueError(f"{folder}/program.json was written by another version of AutoPTD")
        sources = {name: (folder / name).read_text() for name in record.pop("files")}
        return Program(
            mesh=Mesh(**record.pop("mesh")),
            constants=tuple((leaf, value) for leaf, value in record.pop("constants")),
            inputs=tuple(InputSpec(**tupled(one)) for one in record.pop("inputs")),
            params=tuple(_param(one) for one in record.pop("params")),
            crossings=tuple(CrossingSpec(**tupled(one)) for one in record.pop("crossings")),
            parcels=tuple(Parcel(**tupled(one)) for one in record.pop("parcels")),
            stages=tuple(StageSpec(**tupled(one)) for one in record.pop("stages")),
            collectives=tuple(Collective(**tupled(one)) for one in record.pop("collectives")),
            dropouts=tuple(DropoutSpec(**tupled(one)) for one in record.pop("dropouts")),
            fallbacks=tuple(Fallback(**one) for one in record.pop("fallbacks")),
            fusions=tuple(Fusion(**one) for one in record.pop("fusions")),
            unlisted=tuple(record.pop("unlisted")),
            looked_at=tuple((name, text) for name, text in record.pop("looked_at")),
            lines=tuple(Line(**one) for one in record.pop("lines")),
            costs=read_costs(record.pop("costs")),
            orders=parse_orders((folder / "schedule.txt").read_text()),
            sources=sources,
            plan=json.loads((folder / "plan.json").read_text()),
            buffers=torch.load(folder / "constants.pt", weights_only=True),
            **record,
        )

    def _record(self) -> dict[str, Any]:
        skipped = ("orders", "sources", "plan", "buffers", "graphs", "explainer", "painter")
        fields = [item.name for item in dataclasses.fields(self) if item.name not in skipped]
        record = {name: _plain(getattr(self, name)) for name in fields}
        return {"version": VERSION, "files": sorted(self.sources), **record}


def _json(record: dict[str, Any]) -> str:
    """JSON with one line per entry of a list, so that people can read it and a diff shows what changed."""
    parts = []
    for key, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
            lines = ",\n".join(f"  {json.dumps(one)}" for one in value)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _plain(value: Any) -> Any:
    if isinstance(value, Segmented):
        return list(value.blocks)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _param(record: dict[str, Any]) -> ParamSpec:
    record = tupled(record)
    every = record.pop("dims")
    dims = tuple(tuple(Segmented(one) if isinstance(one, list) else one for one in atoms) for atoms in every)
    types = {axis: ValueType(**tupled(kind)) for axis, kind in record["layout"]["types"]}
    return ParamSpec(**{**record, "layout": Layout(types), "dims": dims})


__all__ = [
    "Action",
    "Collective",
    "CrossingSpec",
    "DropoutSpec",
    "Fallback",
    "Fusion",
    "InputSpec",
    "Line",
    "ParamSpec",
    "Parcel",
    "Picture",
    "Program",
    "StageSpec",
]
