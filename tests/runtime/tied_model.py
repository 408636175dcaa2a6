"""A small language model with tied embeddings, and its program written by hand for any (t, p, d, v): no compiler involved.

It has one of everything that the runtime must get right: a tied weight (embedding on the first stage, head on the last), a
fused gate|up weight whose shard is two row blocks, a bias that is added once, a norm-like `scale` of type R, values that skip
stages, one of them without a gradient, a frozen parameter, a buffer, ignored labels.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd.compat import tree_flatten
from autoptd.ir.actions import ranks_of_stages
from autoptd.ir.layout import Layout
from autoptd.ir.machine import Machine
from autoptd.ir.mesh import ORDER, Mesh
from autoptd.ir.placement import placements
from autoptd.ir.types import I, R, S, ValueType
from autoptd.program.program import Program
from autoptd.program.specs import CrossingSpec, InputSpec, ParamSpec, StageSpec
from autoptd.program.transfers import plan_transfers
from autoptd.schedule import add_transfers, build_orders

VOCAB, WIDTH, HIDDEN, LENGTH = 12, 6, 8, 5
IGNORED = 0


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(1 + 0.1 * torch.randn(WIDTH))
        self.gate_up = nn.Linear(WIDTH, 2 * HIDDEN, bias=False)
        self.down = nn.Linear(HIDDEN, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x * self.scale).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)


class TiedModel(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.wte.weight
        self.offset = nn.Parameter(torch.randn(WIDTH), requires_grad=False)
        self.table: Tensor
        self.register_buffer("table", torch.randn(LENGTH, WIDTH))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = first = self.wte(ids) + self.table + self.offset
        mask = (ids != 3).to(x.dtype).unsqueeze(-1)
        for layer in self.layers:
            x = layer(x)
        logits = self.head((x + 0.5 * first) * mask)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=IGNORED)


def make_model(layers: int = 4, seed: int = 0) -> TiedModel:
    torch.manual_seed(seed)
    return TiedModel(layers).double()


def make_batch(rows: int = 8, seed: int = 1) -> tuple[Tensor, Tensor]:
    """(ids, targets) with ignored labels at uneven counts."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCAB, (rows, LENGTH), generator=generator)
    targets = torch.randint(1, VOCAB, (rows, LENGTH), generator=generator)
    for row in range(rows):
        targets[row, : row % LENGTH] = IGNORED
    return ids, targets


@dataclass(frozen=True)
class Case:
    t: int = 1
    p: int = 1
    d: int = 1
    v: int = 1
    m: int = 2
    schedule: str = "1f1b"
    rows: int = 8  # global
    layers: int = 4
    p2p: str = "auto"
    order: str = ORDER

    def __str__(self) -> str:
        return f"t{self.t}p{self.p}d{self.d}v{self.v}m{self.m}-{self.schedule}-{self.p2p}"


def make_program(case: Case, model: TiedModel) -> Program:
    """The program of `model`; layers are dealt out to stages in equal runs."""
    stages, b = case.p * case.v, case.rows // (case.m * case.d)
    of_stage = [
        list(range(case.layers))[k * case.layers // stages : (k + 1) * case.layers // stages]
        for k in range(stages)
    ]
    last = stages - 1
    dtype = "float64"
    crossings = [CrossingSpec(f"x_{k}", k, (k + 1,), (b, LENGTH, WIDTH), dtype, True) for k in range(last)]
    if last:
        crossings.append(CrossingSpec("first", 0, tuple(sorted({1, last})), (b, LENGTH, WIDTH), dtype, True))
        crossings.append(CrossingSpec("mask", 0, (last,), (b, LENGTH, 1), dtype, False))
    params = [
        _param(
            "wte.weight",
            (VOCAB, WIDTH),
            S(0, 0),
            tuple(sorted({0, last})),
            aliases=("wte.weight", "head.weight"),
        )
    ]
    params.append(_param("offset", (WIDTH,), I, (0,), requires_grad=False))
    for k, layers in enumerate(of_stage):
        for i in layers:
            name = f"layers.{i}"
            params.append(_param(f"{name}.scale", (WIDTH,), R, (k,)))
            fused = ((2, HIDDEN), (WIDTH,))
            params.append(_param(f"{name}.gate_up.weight", (2 * HIDDEN, WIDTH), S(0, 1), (k,), fused))
            params.append(_param(f"{name}.down.weight", (WIDTH, HIDDEN), S(1, 0), (k,)))
            params.append(_param(f"{name}.down.bias", (WIDTH,), I, (k,)))
    links = [(one.source, target, one.has_grad) for one in crossings for target in one.targets]
    orders = add_transfers(build_orders(case.schedule, case.p, case.v, case.m), links)
    specs = []
    for k in range(stages):
        read = tuple(one.name for one in crossings if k in one.targets)
        made = tuple(one.name for one in crossings if one.source == k)
        inputs = (("ids",) if k == 0 else ()) + (("targets",) if k == last else ())
        used = tuple(one.name for one in params if k in one.stages)
        specs.append(StageSpec(k, read, inputs, made, used, ("table",) if k == 0 else ()))
    sources = {f"stage_{k}.py": stage_source(specs[k], of_stage[k], last) for k in range(stages)}
    batch = tuple(InputSpec(name, i, True, (b, LENGTH), "int64") for i, name in enumerate(("ids", "targets")))
    mesh = Mesh(case.t, case.p, case.d, case.order)
    return Program(
        mesh=mesh,
        v=case.v,
        num_microbatches=case.m,
        schedule_name=case.schedule,
        tree=str(tree_flatten((make_batch(), {}))[1]),
        constants=(),
        inputs=batch,
        params=tuple(params),
        crossings=tuple(crossings),
        transfers=plan_transfers(crossings, ranks_of_stages(orders), mesh, case.p2p, Machine()),
        stages=tuple(specs),
        orders=orders,
        sources=sources,
        weighted=True,
        buffers={"table": model.table},
    )


def stage_source(spec: StageSpec, layers: list[int], last: int) -> str:
    lines = [
        "import torch.nn.functional as F",
        "from autoptd import runtime as rt",
        f"class Stage{spec.index}(rt.Stage):",
        f"    def forward(self, {', '.join([*spec.crossings, *spec.inputs])}):",
        '        tp, w, b = self.groups["tp"], self.weights, self.buffers',
    ]
    if spec.index == 0:
        lines += [
            "        rows = rt.vocab_parallel_embedding(ids, w.wte.weight, tp)",
            "        x = first = rt.p_to_i(rows, tp) + b.table + w.offset",
            "        mask = (ids != 3).to(x.dtype).unsqueeze(-1)",
        ]
    else:
        lines.append(f"        x = x_{spec.index - 1}")
    if spec.index == 1 and spec.index != last:
        lines.append("        x = x + 0 * first  # a second reader of `first`")
    for i in layers:
        lines += [
            f"        layer = w.layers[{i}]",
            "        h = rt.i_to_r(x, tp) * layer.scale",
            "        gate, up = F.linear(h, layer.gate_up.weight).chunk(2, -1)",
            "        x = x + rt.p_to_i(F.linear(F.silu(gate) * up, layer.down.weight), tp) + layer.down.bias",
        ]
    if spec.index == last:
        lines += [
            "        x = rt.i_to_r((x + 0.5 * first) * mask, tp)",
            "        logits = F.linear(x, w.head.weight).flatten(0, 1)",
            "        loss = rt.vocab_parallel_cross_entropy(",
            f"            logits, targets.flatten(), tp, ignore_index={IGNORED}, reduction='sum'",
            "        ) / self.totals[0]",
            "        return (loss,)",
            "    def count(self, targets, **others):",
            f"        return (rt.count_labels(targets, ignore_index={IGNORED}),)",
        ]
    else:
        outputs = [f"x_{spec.index}" if name.startswith("x_") else name for name in spec.outputs]
        lines += [f"        x_{spec.index} = x", f"        return ({', '.join(outputs)},)"]
    return "\n".join(lines) + "\n"


def _param(
    name: str,
    shape: tuple[int, ...],
    kind: ValueType,
    stages: tuple[int, ...],
    dims: tuple[tuple[int, ...], ...] = (),
    aliases: tuple[str, ...] = (),
    requires_grad: bool = True,
) -> ParamSpec:
    dims = dims or tuple((size,) for size in shape)
    storage, use = placements(Layout({"tp": kind}), "float64", stages)
    return ParamSpec(name, aliases or (name,), shape, dims, requires_grad, stages, storage, use)
