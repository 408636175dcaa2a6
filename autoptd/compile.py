"""The driver: one stage a line. An unmodified model and a request in, a `Program` out.

    program = compile(model, t=2, p=2, d=2, v=2, example_inputs=(ids, targets))
    program.save("out/")

No process group, no GPU and no weights in memory are needed: meta parameters compile as well.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.fx import Graph

from autoptd import codegen, passes, schedule
from autoptd import trace as tracing
from autoptd.compat import tree_flatten, tree_unflatten
from autoptd.errors import PlanError
from autoptd.ir.actions import Orders
from autoptd.ir.machine import Machine
from autoptd.ir.notes import copy_graph, note, op_name, ops, placeholders, tensor
from autoptd.ir.program import Collective, CrossingSpec, InputSpec, ParamSpec, Program, StageSpec
from autoptd.ir.types import I, S
from autoptd.options import Options, make_options


@dataclass(frozen=True)
class Batch:
    """How a step's rows are divided: `rows` per microbatch, `num_microbatches` per replica, `traced_rows` seen by the trace."""

    batched: tuple[int, ...]  # leaves that carry the batch axis
    rows: int
    num_microbatches: int
    pieces: int
    traced_rows: int


def compile(model: nn.Module, *, example_inputs: Any, **keywords: Any) -> Program:
    """Compile `model` for t*p*d ranks; keywords are those of `parallelize`.

    `example_inputs` is the global batch: a tuple of positional or a dict of keyword arguments of the model. Raises TraceError
    or PlanError, naming site, fact and remedy.
    """
    options = make_options(**keywords)
    args, kwargs = split_call(example_inputs)
    return compile_program(model, options, args, kwargs, replicas=options.d)


def split_call(example_inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(args, kwargs) of a call given as a tuple, a dict or one tensor."""
    if isinstance(example_inputs, dict):
        return (), example_inputs
    return (tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)), {}


def compile_program(
    model: nn.Module,
    options: Options,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    replicas: int,
    check: bool = True,
) -> Program:
    """Compile for the batch in `(args, kwargs)`, which holds the rows of `replicas` replicas (1 under torchrun, else d)."""
    check_device(model, args, kwargs)
    batch = plan_batch(options, args, kwargs, replicas)
    dump = Dump()

    captured = tracing.capture(model, *resize(args, kwargs, batch, batch.traced_rows), options.loss_fn)
    if check and not any(p.is_meta for p in model.parameters()):
        call = resize(args, kwargs, batch, batch.traced_rows)
        tracing.compare(model, options.loss_fn, captured.graph, captured.buffers, *call)
    doubled = None
    if batch.pieces > 1:
        doubled = tracing.capture(model, *resize(args, kwargs, batch, 2 * batch.traced_rows), options.loss_fn).graph
    graph = captured.graph
    graphs = {"TRACED": copy_graph(graph)}
    dump("traced", graph)

    batched = {name for name, leaf in captured.inputs if leaf in batch.batched} if batch.pieces > 1 else set()
    axes, assignment = passes.annotate(graph, doubled, captured.buffers, batched, batch.pieces, options.t, Machine())
    graphs["ANNOTATED"] = copy_graph(graph)
    dump("annotated", graph)

    unknown = passes.unknown_ops(graph, axes)
    redundant = passes.redundant_flops(graph)
    passes.communicate(graph, assignment, batch.pieces)
    passes.check_connected(graph, axes)
    graphs["CONNECTED"] = copy_graph(graph)
    dump("connected", graph)

    cut = passes.cut(graph, options.num_stages)
    graphs["CUT"] = copy_graph(graph)
    dump("cut", graph)

    sizes = passes.Sizes(options.t, batch.traced_rows, batch.rows, batch.pieces)
    passes.localize(graph, sizes)
    graphs["LOCAL"] = graph
    dump("local", graph)

    crossing = codegen.crossings(graph)
    orders = make_orders(options, batch.num_microbatches, crossing)
    files = [
        codegen.write_stage(graph, k, options.t, crossing, about(options, batch, k)) for k in range(options.num_stages)
    ]
    costs = {"flops_per_stage": cut["flops"], "redundant_gemm_flops": redundant, "total_flops": sum(cut["flops"])}
    params = param_specs(graph, captured)
    return Program(
        mesh=options.mesh,
        v=options.v,
        num_microbatches=batch.num_microbatches,
        schedule_name=str(options.schedule),
        tree=captured.tree,
        constants=captured.constants,
        inputs=input_specs(graph, captured, batch),
        params=params,
        crossings=tuple(crossing_spec(one) for one in crossing),
        stages=tuple(stage_spec(k, file) for k, file in enumerate(files)),
        orders=orders,
        sources={f"stage_{k}.py": file.text for k, file in enumerate(files)},
        collectives=tuple(collectives(graph, options, crossing, params)),
        unknown_ops=tuple(unknown),
        weighted=any(file.counts for file in files),
        plan=plan_record(options, batch, cut, params),
        costs=costs,
        buffers={name: value.detach() for name, value in captured.buffers.items()},
        graphs=graphs,
    )


def check_device(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Model and example inputs must be on one device."""
    devices = {p.device for p in model.parameters()}
    if len(devices) > 1:
        raise PlanError("model", f"its parameters are on several devices: {sorted(map(str, devices))}", "model.to(one)")
    for i, leaf in enumerate(tree_flatten((args, kwargs))[0]):
        if isinstance(leaf, torch.Tensor) and devices and leaf.device not in devices:
            home = next(iter(devices))
            fact = f"tensor {i} is on {leaf.device}, the model on {home}"
            raise PlanError("example_inputs", fact, f"move the example inputs to {home} with .to('{home}')")


def plan_batch(options: Options, args: tuple[Any, ...], kwargs: dict[str, Any], replicas: int) -> Batch:
    """Decide microbatches: see `Options.num_microbatches` for the default."""
    leaves = tree_flatten((args, kwargs))[0]
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.dim()]
    if not tensors:
        raise PlanError(
            "example_inputs", "no tensor with a batch dim", "pass the tensors that the model is called with"
        )
    total = leaves[tensors[0]].shape[0]
    batched = tuple(i for i in tensors if leaves[i].shape[0] == total)
    if total % replicas:
        raise PlanError(
            "example_inputs", f"{total} rows do not divide over d={replicas}", f"a multiple of {replicas} rows"
        )
    share = total // replicas
    m = options.num_microbatches or default_microbatches(share, options.p)
    if share % m:
        fits = [k for k in range(1, share + 1) if share % k == 0]
        fact = f"{share} rows of a replica do not divide into {m} microbatches"
        raise PlanError(f"num_microbatches={m}", fact, f"num_microbatches in {{{', '.join(map(str, fits))}}}")
    rows, pieces = share // m, m * options.d
    return Batch(batched, rows, m, pieces, rows if pieces == 1 else max(rows, 2))


def default_microbatches(rows: int, p: int) -> int:
    """The largest divisor of `rows` that is at most 4p, a multiple of p preferred."""
    fits = [k for k in range(1, min(rows, 4 * p) + 1) if rows % k == 0]
    return max([k for k in fits if k % p == 0] or fits)


def resize(
    args: tuple[Any, ...], kwargs: dict[str, Any], batch: Batch, rows: int
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The call with `rows` rows: the first ones of the example, repeated where it has fewer."""
    leaves, tree = tree_flatten((args, kwargs))
    for i in batch.batched:
        times = -(-rows // leaves[i].shape[0])
        leaves[i] = leaves[i].repeat(times, *[1] * (leaves[i].dim() - 1))[:rows]
    return tree_unflatten(leaves, tree)  # type: ignore[return-value]


def make_orders(options: Options, m: int, crossing: list[codegen.Crossing]) -> Orders:
    """The schedule with its transfers, simulated to the end before anything runs."""
    merged: dict[tuple[int, int], bool] = {}
    for one in crossing:
        for target in one.targets:
            merged[one.source, target] = merged.get((one.source, target), False) or note(one.node).needs_grad
    links = [(*pair, has_grad) for pair, has_grad in sorted(merged.items())]
    orders = schedule.build_orders(str(options.schedule), options.p, options.v, m)
    orders = schedule.add_transfers(orders, options.p, links)
    schedule.simulate(orders, options.p, links=links)
    return orders


def about(options: Options, batch: Batch, stage: int) -> list[str]:
    """The header of a stage file."""
    b, m = batch.rows, batch.num_microbatches
    return [
        f"Stage {stage} of {options.num_stages}: model chunk {stage // options.p} of pipeline rank {stage % options.p}.",
        "Written by AutoPTD. It reads top to bottom, can be stepped through, and is the same for all tensor and data ranks.",
        f"plan: {options.mesh}, v={options.v}, {m} microbatches of {b} rows per replica, schedule {options.schedule}.",
        "Shapes in comments are a rank's, of one microbatch. `w`: parameters, `b`: buffers, `tp`: the tensor-parallel group.",
        "Types over tp: I invariant, R replicated with a partial gradient, P partial sum, S sharded; rt.p_to_i turns P into I.",
    ]


def param_specs(graph: Graph, captured: tracing.Captured) -> tuple[ParamSpec, ...]:
    """Every parameter of the model once; those that the loss does not use live on stage 0, whole."""
    used = {note(node).name: node for node in placeholders(graph, "param")}
    specs = []
    for name, parameter in captured.parameters.items():
        node = used.get(name)
        record = note(node) if node is not None else None
        specs.append(
            ParamSpec(
                name=name,
                aliases=captured.aliases[name],
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                requires_grad=parameter.requires_grad and record is not None,
                stages=record.stages if record else (0,),
                type=record.tp if record else I,
                dims=record.dims if record else tuple((size,) for size in parameter.shape),
                why=record.why if record else "not used by the loss",
            )
        )
    return tuple(specs)


def input_specs(graph: Graph, captured: tracing.Captured, batch: Batch) -> tuple[InputSpec, ...]:
    """The tensors of the call; batched ones with the rows of one microbatch."""
    leaf_of = dict(captured.inputs)
    specs = []
    for node in placeholders(graph, "input"):
        name = note(node).name
        size = tuple(tensor(node).shape)
        is_batched = leaf_of[name] in batch.batched
        size = (batch.rows, *size[1:]) if is_batched else size
        specs.append(InputSpec(name, leaf_of[name], is_batched, size, str(tensor(node).dtype).removeprefix("torch.")))
    return tuple(specs)


def crossing_spec(one: codegen.Crossing) -> CrossingSpec:
    record = note(one.node)
    dtype = str(tensor(one.node).dtype).removeprefix("torch.")
    return CrossingSpec(one.name, one.source, one.targets, record.extra["local_shapes"][0], dtype, record.needs_grad)


def stage_spec(index: int, file: codegen.StageFile) -> StageSpec:
    return StageSpec(index, file.crossings, file.inputs, file.outputs, file.params, file.buffers)


def collectives(
    graph: Graph, options: Options, crossing: list[codegen.Crossing], params: tuple[ParamSpec, ...]
) -> list[Collective]:
    """Everything that is communicated, per microbatch and per step, with payload bytes and the reason."""
    found = []
    for node in ops(graph):
        record = note(node)
        for stage in record.stages:
            site = f"{record.module} ({record.source})"
            if record.conversion:
                row = passes.conversion_row(record.conversion)
                nbytes = codegen.collective_bytes(node, options.t)
                found.append(
                    Collective(
                        site, stage, record.conversion, "tp", row.forward, row.backward, nbytes, options.t, record.why
                    )
                )
            elif op_name(node) == "cross_entropy" and node.kwargs["vocab"]:
                tokens = node.args[1].meta["autoptd"].extra["local_shapes"][0]  # type: ignore[union-attr]
                nbytes = 3 * torch.Size(tokens).numel() * tensor(node).element_size()
                why = "maximum, then sum of exponentials and picked logit, of every token"
                name = "vocab_parallel_cross_entropy"
                found.append(Collective(site, stage, name, "tp", "all-reduce", "none", nbytes, options.t, why))
    for one in crossing:
        nbytes = torch.Size(note(one.node).extra["local_shapes"][0]).numel() * tensor(one.node).element_size()
        for target in one.targets:
            back = "send" if note(one.node).needs_grad else "none"
            why = f"{one.name} is read by stage {target}"
            site = f"stage {one.source} to {target}"
            found.append(Collective(site, one.source, "send/receive", "pp", "send", back, nbytes, 2, why))
    return found + _step_collectives(options, params)


def _step_collectives(options: Options, params: tuple[ParamSpec, ...]) -> list[Collective]:
    found = []
    for stage in range(options.num_stages):
        for kind, group in (("I", options.d), ("S", options.d), ("R", options.d * options.t)):
            mine = [one for one in params if min(one.stages) == stage and one.type.kind == kind and one.requires_grad]
            nbytes = sum(_bytes(one, options.t) for one in mine)
            axis = "dp x tp" if kind == "R" else "dp"
            if nbytes and group > 1:
                why = f"gradients of {len(mine)} parameters of type {kind}"
                found.append(
                    Collective(
                        f"stage {stage}", stage, "gradient sum", axis, "none", "all-reduce", nbytes, group, why, "step"
                    )
                )
    for one in params:
        owners = sorted({stage % options.p for stage in one.stages})
        if len(owners) > 1:
            why = f"{one.name} is used by stages {', '.join(map(str, one.stages))}"
            nbytes = _bytes(one, options.t)
            found.append(
                Collective(
                    one.name, one.stages[0], "tied sum", "pp", "none", "all-reduce", nbytes, len(owners), why, "step"
                )
            )
    return found


def _bytes(spec: ParamSpec, t: int) -> int:
    return torch.Size(spec.local_shape(t)).numel() * getattr(torch, spec.dtype).itemsize


def plan_record(options: Options, batch: Batch, cut: dict[str, Any], params: tuple[ParamSpec, ...]) -> dict[str, Any]:
    """What `plan.json` says: the decisions, by the model's own names."""
    shard = [
        {"pattern": one.name, "dim": one.type.dim, "axis": "tp"} for one in params if one.type.kind == S(0, 0).kind
    ]
    return {
        "version": 1,
        "mesh": {"t": options.t, "p": options.p, "d": options.d, "v": options.v},
        "num_microbatches": batch.num_microbatches,
        "schedule": options.schedule,
        "options": {"seed": options.seed},
        "cut": cut["after"],
        "shard": shard,
    }


class Dump:
    """With AUTOPTD_DUMP=folder, one numbered text per form: `passes/03_connected.txt`, and the change in operator counts."""

    def __init__(self) -> None:
        self.folder = os.environ.get("AUTOPTD_DUMP")
        self.count = 0
        self.before: Counter[str] = Counter()

    def __call__(self, name: str, graph: Graph) -> None:
        if not self.folder:
            return
        counts = Counter(note(node).conversion or op_name(node) for node in ops(graph))
        change = {key: counts[key] - self.before[key] for key in sorted({*counts, *self.before})}
        lines = [f"{amount:+d} {key}" for key, amount in change.items() if amount]
        folder = Path(self.folder) / "passes"
        folder.mkdir(parents=True, exist_ok=True)
        text = passes.describe(graph) + "\nchange in operators:\n" + "\n".join(lines) + "\n"
        (folder / f"{self.count:02d}_{name}.txt").write_text(text)
        self.count, self.before = self.count + 1, counts
