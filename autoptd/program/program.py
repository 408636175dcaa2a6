"""Define the result of a compilation: everything that the runtime needs to train, as plain data.

A `Program` holds one readable source file per stage, the records below, the schedule, and the values of
buffers. It can be written to a folder and read back without tracing:

    program.save("out/")            # stage_0.py ... program.json, schedule.txt, constants.pt
    program = Program.load("out/")

Calling convention of a stage: `Stage.forward` takes, by keyword, the crossings and the batch inputs that it
reads, for one microbatch; it returns a tuple of the crossings that it writes, in the order of
`StageSpec.outputs`. The loss stage returns its loss last. Losses are additive: the sum over all microbatches
and data-parallel replicas is the loss of the global batch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from autoptd.errors import PlanError, a_type
from autoptd.ir.actions import Orders, format_orders, parse_orders, ranks_of_stages
from autoptd.ir.buffers import digest
from autoptd.ir.fusion import Fusion
from autoptd.ir.layout import Layout
from autoptd.ir.mesh import Mesh, Role, is_sub_axis, parts_of
from autoptd.ir.notes import Fallback
from autoptd.ir.placement import Placement, joined_sums
from autoptd.ir.types import Segmented, ValueType
from autoptd.program.buckets import busy_axes, state_memory
from autoptd.program.costs import Costs, read_costs, tupled
from autoptd.program.specs import (
    Collective,
    CrossingSpec,
    DropoutSpec,
    InputSpec,
    Line,
    OutputSpec,
    ParamSpec,
    StageSpec,
    TransferBuffer,
    UpdatePart,
)
from autoptd.program.state_memory import StateMemory

# The version of the format of program.json, and of the functions that emitted files call.
VERSION = 14
Spec = TypeVar("Spec")


class Picture(Protocol):
    """What `Program.graph` returns: `wings/viz/picture.py`."""

    @property
    def dot(self) -> str: ...

    @property
    def svg(self) -> str | None: ...

    @property
    def why_not(self) -> str: ...

    def save(self, path: str | Path) -> None: ...


@dataclass(frozen=True, eq=False)
class Program:
    """A compiled model: see the module's docstring."""

    mesh: Mesh
    v: int
    num_microbatches: int
    schedule_name: str
    # Structure of the (args, kwargs) of `step`, and its non-tensor leaves by number: they are constants in
    # the emitted files, compared at every step.
    tree: str
    constants: tuple[tuple[int, Any], ...]
    inputs: tuple[InputSpec, ...]
    params: tuple[ParamSpec, ...]
    crossings: tuple[CrossingSpec, ...]
    stages: tuple[StageSpec, ...]
    orders: Orders
    # File name -> text.
    sources: dict[str, str]
    collectives: tuple[Collective, ...] = ()
    # The messages between pipeline ranks for one microbatch.
    transfers: tuple[TransferBuffer, ...] = ()
    lines: tuple[Line, ...] = ()
    # Of the dropout masks.
    seed: int = 0
    # Buffers whose values the compiler has read, with digests of the values.
    looked_at: tuple[tuple[str, str], ...] = ()
    dropouts: tuple[DropoutSpec, ...] = ()
    # Operators that tp does not split as expected, and why.
    fallbacks: tuple[Fallback, ...] = ()
    # The backend of fused operators, and the groups that were fused or not, with the reason.
    fuse: str | bool = False
    fusions: tuple[Fusion, ...] = ()
    # Operators without a record, and the results of probing them.
    unlisted: tuple[str, ...] = ()
    # Non-persistent buffers that `precision` still casts, because the model does not run otherwise.
    cast_buffers: tuple[str, ...] = ()
    # Whether the loss stage has `count(...)`, of the labels before the first forward.
    weighted: bool = False
    # Rows of every replica, for an evaluation where they differ: each replica runs only the microbatches that
    # it has.
    row_counts: tuple[int, ...] = ()
    # Buffers that are updated after the last microbatch of a step; those whose update depends on the batch;
    # the parts that microbatches keep for it.
    updated: tuple[str, ...] = ()
    updated_by_batch: tuple[str, ...] = ()
    update_parts: tuple[UpdatePart, ...] = ()
    # Of an evaluation, besides the loss.
    outputs: tuple[OutputSpec, ...] = ()
    plan: dict[str, Any] = field(default_factory=dict)
    costs: Costs = field(default_factory=Costs)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict, repr=False, compare=False)
    graphs: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    # If it was compiled here: how its model was traced (trace/again.py).
    traced: Any = field(default=None, repr=False, compare=False)
    # If it was read from disk, without graphs: the program whose parameters and cut it follows.
    follows: Program | None = field(default=None, repr=False, compare=False)

    def __eq__(self, other: object) -> bool:
        """Compare all saved fields, so that a loaded program equals the compiled one."""
        compared = [item.name for item in dataclasses.fields(Program) if item.compare]
        return isinstance(other, Program) and all(
            getattr(self, name) == getattr(other, name) for name in compared
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise PlanError on copy or pickle of a program with its graphs."""
        if self.graphs:
            fact = "it has the graphs of its compilation, and is neither copied nor pickled"
            raise PlanError(
                "copy of a Program", fact, "program.save(folder), and Program.load(folder) where it is needed"
            )
        return super().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        """Summarize the program on one line; `explain`, `graph` and `save` show more."""
        numbers = sum(math.prod(spec.shape) for spec in self.params)
        pieces = f"{self.num_microbatches} x {self.rows} rows a replica"
        mesh = f"{self.mesh} v={self.v}, {self.schedule_name}, {pieces}"
        return f"<Program {mesh}: {len(self.stages)} stages, {numbers:,} parameters, {len(self.collectives)} collectives>"

    @property
    def loss_stage(self) -> int:
        return len(self.stages) - 1

    @property
    def rows(self) -> int:
        """Rows of the batch in a microbatch."""
        return next((spec.shape[0] for spec in self.inputs if spec.batched), 1)

    @property
    def row_blocks(self) -> int:
        """The number of batch blocks with equal parts in a microbatch: 2 if rows i and i + B/2 belong
        together.
        """
        return next((spec.blocks for spec in self.inputs if spec.batched), 1)

    @property
    def mask_rows(self) -> int:
        """Rows of a microbatch as dropout masks number them: within a block."""
        return self.rows // self.row_blocks

    @property
    def schedule(self) -> str:
        return format_orders(self.orders)

    @property
    def model_flops(self) -> int:
        """The FLOPs of a step's matrix products on all ranks, forward and backward: 3 times those of forward.

        The gradients of frozen parameters, and of values that depend only on these, are not counted.
        """
        costs, is_whole = self.costs, all(spec.requires_grad for spec in self.params)
        # If the whole model is trained, products that read the batch itself count in full, by convention.
        whole = 2 * costs.total_flops
        backward = whole if is_whole else costs.total_backward_flops or whole
        return (costs.total_flops + backward) * self.num_microbatches * self.mesh.replicas

    def explain(self, module: str) -> str:
        """Explain how tp splits the parameters and matrix products of a module (or one parameter), and why.

        Every alternative is listed with its additional cost over the chosen plan, in seconds per microbatch
        including the price of memory. Then come the values that backward needs, kept or recomputed, with the
        cost of the other choice. PlanError for a name that the model does not have, and for a loaded program:
        the solver's tables are not saved.
        """
        raise PlanError("explain", "a loaded program has no costs of alternatives", "compile the model again")

    def graph(self, level: str = "layer", stage: int | None = None) -> Picture:
        """Return a plot of the program: `.svg` and `.dot` are its text, `.save("graph.svg")` writes it,
        notebooks show it.

        `level` is "model" (the stages and their messages), "layer" (the operators of each distinct layer) or
        "full" (all operators); `stage` restricts it to one stage. PlanError for other values.
        """
        remedy = "autoptd.wings.viz.graph_picture(program, 'model'), or compile the model again"
        raise PlanError("program.graph", "a loaded program has no graphs", remedy)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The pipeline rank of every stage, according to the schedule."""
        return ranks_of_stages(self.orders)

    @cached_property
    def sub_axes(self) -> tuple[str, ...]:
        """The sub-axes with communication or parameter types, in the same order on all ranks."""
        axes = {axis for spec in self.params for axis in spec.use.layout.sub_axes}
        named = {axis for collective in self.collectives for axis in parts_of(collective.axis)}
        return tuple(sorted(axes | {axis for axis in named if is_sub_axis(axis)}))

    @cached_property
    def joint_axes(self) -> tuple[tuple[str, ...], ...]:
        """The combinations of axes and sub-axes for joint gradient sums, in the same order on all ranks."""
        found: set[tuple[str, ...]] = set()
        for sums in {spec.sums for spec in self.params}:
            within_row = [step for step in sums if step.role is not Role.STAGES]
            wide = [step for step in within_row if self.mesh.degree(step.axis) > 1]
            found |= {step.axes for step in joined_sums(wide, self.mesh)}
        return tuple(sorted(axes for axes in found if len(axes) > 1))

    @cached_property
    def busy_axes(self) -> tuple[str, ...]:
        """The axes along which ranks have different samples, whose rows stages still read."""
        return busy_axes(self.collectives)

    @property
    def stage_axes(self) -> tuple[str, ...]:
        """The axes and sub-axes over which stages may communicate."""
        return (*self.mesh.value_axes, *self.busy_axes, *self.sub_axes)

    def rank_of_stage(self, stage: int) -> int:
        """Return the pipeline rank that holds `stage`."""
        return self.ranks[stage]

    def chunk_of_stage(self, stage: int) -> int:
        """Return which model chunk of its pipeline rank `stage` is: 0 for the rank's first one."""
        return self.ranks[:stage].count(self.ranks[stage])

    def param(self, name: str) -> ParamSpec:
        return next(spec for spec in self.params if name in spec.aliases)

    def differing(self, buffers: Mapping[str, torch.Tensor]) -> list[str]:
        """Return the names of buffers whose values differ from those that the compiler has read."""
        found = []
        for name, text in self.looked_at:
            if name in buffers:
                # Compare in the dtype of the program, which `precision` may have narrowed.
                own = self.buffers.get(name, buffers[name])
                if digest(buffers[name].to(own.dtype)) != text:
                    found.append(name)
        return found

    def memory(self, rank: int = 0) -> StateMemory:
        """Return the predicted bytes of `rank` for parameters, gradients and AdamW's state; see
        `pm.memory()`.
        """
        return state_memory(self.params, self.orders, self.mesh, rank)

    def fingerprint(self) -> str:
        """Hash everything that ranks must agree on before the first step."""
        record = json.dumps(self._record(), sort_keys=True)
        sources = json.dumps(self.sources, sort_keys=True)
        text = record + sources + self.schedule
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def save(self, folder: str | Path) -> None:
        """Write the program to `folder`; `load` reads it back without tracing."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in self.sources.items():
            (folder / name).write_text(text, encoding="utf-8")
        (folder / "program.json").write_text(_json(self._record()))
        (folder / "plan.json").write_text(_json(self.plan))
        (folder / "schedule.txt").write_text(self.schedule)
        torch.save(self.buffers, folder / "constants.pt")

    @staticmethod
    def load(folder: str | Path) -> Program:
        """Read a program that `save` wrote; its graphs are not saved."""
        folder = Path(folder)
        record = json.loads((folder / "program.json").read_text())
        if record.pop("version") != VERSION:
            raise ValueError(f"{folder}/program.json was written by another version of AutoPTD")
        sources = {name: (folder / name).read_text(encoding="utf-8") for name in record.pop("files")}
        return Program(
            mesh=Mesh(**record.pop("mesh")),
            constants=tuple((leaf, value) for leaf, value in record.pop("constants")),
            inputs=_specs(InputSpec, record.pop("inputs")),
            params=tuple(_param(row) for row in record.pop("params")),
            crossings=_specs(CrossingSpec, record.pop("crossings")),
            transfers=_specs(TransferBuffer, record.pop("transfers")),
            stages=_specs(StageSpec, record.pop("stages")),
            collectives=_specs(Collective, record.pop("collectives")),
            dropouts=_specs(DropoutSpec, record.pop("dropouts")),
            fallbacks=_specs(Fallback, record.pop("fallbacks")),
            fusions=_specs(Fusion, record.pop("fusions")),
            unlisted=tuple(record.pop("unlisted")),
            cast_buffers=tuple(record.pop("cast_buffers")),
            updated=tuple(record.pop("updated")),
            row_counts=tuple(record.pop("row_counts")),
            updated_by_batch=tuple(record.pop("updated_by_batch")),
            update_parts=_specs(UpdatePart, record.pop("update_parts")),
            outputs=_specs(OutputSpec, record.pop("outputs")),
            looked_at=tuple((name, text) for name, text in record.pop("looked_at")),
            lines=_specs(Line, record.pop("lines")),
            costs=read_costs(record.pop("costs")),
            orders=parse_orders((folder / "schedule.txt").read_text()),
            sources=sources,
            plan=json.loads((folder / "plan.json").read_text()),
            buffers=torch.load(folder / "constants.pt", weights_only=True),
            **record,
        )

    def _record(self) -> dict[str, Any]:
        skipped = (
            "orders",
            "sources",
            "plan",
            "buffers",
            "graphs",
            "traced",
            "follows",
        )
        fields = [item.name for item in dataclasses.fields(Program) if item.name not in skipped]
        record = {name: _plain(getattr(self, name)) for name in fields}
        return {"version": VERSION, "files": sorted(self.sources), **record}


def _json(record: dict[str, Any]) -> str:
    """Format JSON with one line per list entry, so that it is readable and diffs are short."""
    parts = []
    for key, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
            lines = ",\n".join(f"  {json.dumps(entry)}" for entry in value)
            parts.append(f" {json.dumps(key)}: [\n{lines}\n ]")
        else:
            parts.append(f" {json.dumps(key)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


RARE = ("order", "model_dims")


def _plain(value: Any) -> Any:
    """Return a value as dicts, lists and JSON scalars."""
    if isinstance(value, Segmented):
        return list(value.blocks)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        # Leave out rare fields at their defaults: the order of shards, other atoms in a checkpoint.
        found = {item.name: getattr(value, item.name) for item in dataclasses.fields(value)}
        return {name: _plain(each) for name, each in found.items() if each or name not in RARE}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _specs(kind: type[Spec], rows: list[dict[str, Any]]) -> tuple[Spec, ...]:
    return tuple(kind(**tupled(row)) for row in rows)


def _param(record: dict[str, Any]) -> ParamSpec:
    record = tupled(record)
    dims: dict[str, Any] = {
        name: _dims(record.pop(name)) for name in ("dims", "model_dims") if name in record
    }
    placed = {name: _placement(record[name]) for name in ("storage", "use")}
    return ParamSpec(**{**record, **placed, **dims})


def _dims(record: Sequence[Any]) -> tuple[tuple[Any, ...], ...]:
    dims = []
    for atoms in record:
        # A list stands for the blocks of a `Segmented`: see `_plain`.
        dims.append(tuple(Segmented(atom) if isinstance(atom, list) else atom for atom in atoms))
    return tuple(dims)


def _placement(record: dict[str, Any]) -> Placement:
    types = {axis: ValueType(**tupled(kind)) for axis, kind in record["layout"]["types"]}
    return Placement(**{**record, "layout": Layout(types)})


def check_program(site: str, given: Any) -> None:
    """Raise PlanError for anything but a program; the usual mistake is a running model, which has one."""
    if not isinstance(given, Program):
        has_one = isinstance(getattr(given, "program", None), Program)
        remedy = "its program: pm.program" if has_one else "what autoptd.compile returns"
        raise PlanError(site, f"takes a Program, and got {a_type(given)}", remedy)


__all__ = ["Picture", "Program", "check_program"]
