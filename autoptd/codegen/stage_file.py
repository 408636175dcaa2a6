"""Write one stage as a Python file that a person can read top to bottom.

In: a LOCAL graph, a stage's index, and a few lines about the plan. Out: `StageFile`: source text, and what it reads and
writes. The file imports torch and autoptd.runtime only, has no branch on rank, and does not depend on the device; a repeated
layer is written once; every collective has its own line with its bytes and its reason.
"""

from __future__ import annotations

import json
import keyword
import operator
import re
import textwrap
from dataclasses import dataclass, field

from torch.fx import Graph, Node

from autoptd.codegen.expressions import expression
from autoptd.codegen.names import RESERVED, choose_names
from autoptd.codegen.repeats import Repeat, find_repeat, local_shape_text
from autoptd.ir import markers
from autoptd.ir.notes import note, op_name, ops, output, placeholders, tensor
from autoptd.ir.types import CONVERSIONS


@dataclass(frozen=True)
class Crossing:
    """A value that one stage makes and later stages read; `name` is its keyword in their forward."""

    node: Node
    name: str
    source: int
    targets: tuple[int, ...]


@dataclass(frozen=True)
class StageFile:
    """The text of a stage and the names it reads and writes."""

    text: str
    crossings: tuple[str, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    params: tuple[str, ...]
    buffers: tuple[str, ...]
    counts: bool


@dataclass
class Writer:
    """Lines of source with their indentation; comments of neighbouring lines are set below each other by no one."""

    lines: list[str] = field(default_factory=list)

    def add(self, indent: int, text: str, comment: str = "") -> None:
        self.lines.append(" " * (4 * indent) + text + (f"  # {comment}" if comment else ""))

    def gap(self) -> None:
        if self.lines and self.lines[-1] and not self.lines[-1].endswith(":"):
            self.lines.append("")


def crossings(graph: Graph) -> list[Crossing]:
    """All values that cross from one stage to later ones, in order."""
    found: list[Crossing] = []
    taken: set[str] = set()
    inputs = {note(node).name for node in placeholders(graph, "input")}
    for node in ops(graph):
        home = note(node).stages
        targets = sorted({stage for user in node.users for stage in note(user).stages} - set(home))
        if len(home) == 1 and targets:
            name = base = f"x_from_{home[0]}"
            number = len(taken)
            while name in taken | inputs:
                name, number = f"{base}_{number}", number + 1
            taken.add(name)
            found.append(Crossing(node, name, home[0], tuple(targets)))
    return found


def write_stage(graph: Graph, stage: int, t: int, crossing: list[Crossing], about: list[str]) -> StageFile:
    """Return the file of one stage; `about` are the lines of its header."""
    body = [node for node in ops(graph) if stage in note(node).stages]
    arriving = {one.node: one.name for one in crossing if stage in one.targets}
    leaving = [one for one in crossing if one.source == stage]
    loss = output(graph).args[0]
    results = [one.node for one in leaving] + ([loss] if stage in note(output(graph)).stages else [])
    read = dict.fromkeys(arg for node in body for arg in node.all_input_nodes if arg.op == "placeholder")
    named = {kind: [node for node in read if note(node).kind == kind] for kind in ("input", "param", "buffer")}
    given = arriving | {node: note(node).name for node in named["input"]}
    writer = Writer()
    _write_header(writer, stage, about)
    repeat = find_repeat(body, set(results))
    names = forward_names(body, given, results, repeat)  # type: ignore[arg-type]
    if repeat is not None:
        _write_block(writer, body, repeat, names, t)
    _write_forward(writer, body, list(given.values()), results, repeat, names, t)  # type: ignore[arg-type]
    counted = [node for node in body if node.target is markers.cross_entropy and node.kwargs["total"] != -1]
    if counted:
        _write_count(writer, body, counted, given)
    return StageFile(
        text="\n".join(writer.lines) + "\n",
        crossings=tuple(arriving.values()),
        inputs=tuple(note(node).name for node in named["input"]),
        outputs=tuple(one.name for one in leaving),
        params=tuple(note(node).name for node in named["param"]),
        buffers=tuple(note(node).name for node in named["buffer"]),
        counts=bool(counted),
    )


def _write_header(writer: Writer, stage: int, about: list[str]) -> None:
    writer.add(0, f'"""{about[0]}')
    writer.gap()
    for line in about[1:]:
        for part in textwrap.wrap(line, 118, subsequent_indent="    ") or [""]:
            writer.add(0, part)
    writer.add(0, '"""')
    writer.lines += [
        "",
        "import torch",
        "import torch.nn.functional as F",
        "",
        "from autoptd import runtime as rt",
        "",
        "",
    ]
    writer.add(0, f"class Stage{stage}(rt.Stage):")


def forward_names(
    body: list[Node], given: dict[Node, str], results: list[Node], repeat: Repeat | None
) -> dict[Node, str]:
    """The variables of forward; of a repeat only what comes out of it."""
    if repeat is None:
        return choose_names(body, given, results)
    before, loop, after = body[: repeat.start], body[repeat.start : repeat.stop], body[repeat.stop :]
    finals = finals_of(loop, repeat)
    inside = {node: len(before) for node in loop if node not in finals}
    carried = [node for node, _ in repeat.carried]
    same = dict(zip(finals, carried, strict=True))
    return choose_names([*before, *finals, *after], given, results, inside, same)


def finals_of(loop: list[Node], repeat: Repeat) -> list[Node]:
    """What the last period returns."""
    return [loop[repeat.length * (repeat.count - 1) + j] for j in repeat.returned]


def _write_block(writer: Writer, body: list[Node], repeat: Repeat, outside: dict[Node, str], t: int) -> None:
    """The repeated layer as a method: `w` (and `b`) are the parameters (and buffers) of one layer."""
    period = body[repeat.start : repeat.start + repeat.length]
    carried = {node: f"x_{i}" if i else "x" for i, (node, _) in enumerate(repeat.carried)}
    outer: dict[Node, str] = {}
    for node in repeat.outer:
        if note(node).kind not in ("param", "buffer"):
            taken = {*carried.values(), *outer.values()}
            outer[node] = f"{outside[node]}_given" if outside[node] in taken else outside[node]
    shared: dict[Node, str] = {}
    for node in repeat.outer:
        if note(node).kind in ("param", "buffer"):
            shared[node] = _argument_name(node, {*carried.values(), *outer.values(), *shared.values()})
    finals = [period[j] for j in repeat.returned]
    names = choose_names(period, carried | outer | shared, finals)
    layer = f"{repeat.prefix}.{repeat.first}." if repeat.prefix else f"{repeat.first}."
    own = [name for name, kind in (("w", "param"), ("b", "buffer")) if _reads(period, layer, kind)]
    arguments = ["self", *own, *carried.values(), *outer.values(), *shared.values()]
    last = repeat.first + repeat.count - 1
    writer.add(1, f"def layer({', '.join(arguments)}):")
    writer.add(2, f'"""One of {repeat.prefix}.{repeat.first} to {repeat.prefix}.{last}: `w` holds its parameters."""')
    writer.add(2, "tp = self.tp")
    _write_body(writer, period, names, t, layer)
    writer.add(2, f"return {', '.join(names[node] for node in finals)}")
    writer.gap()


def _argument_name(node: Node, taken: set[str]) -> str:
    name = re.sub(r"\W", "_", note(node).name)
    while name in taken or name in RESERVED or not name.isidentifier():
        name = f"{name}_" if name[:1].isalpha() else f"p_{name}"
    return name


def _is_stored(node: Node) -> bool:
    return note(node).kind in ("param", "buffer")


def _reads(period: list[Node], layer: str, kind: str) -> bool:
    """Whether a layer reads parameters, or buffers, of its own."""
    return any(note(a).kind == kind and note(a).name.startswith(layer) for node in period for a in node.all_input_nodes)


def _write_forward(
    writer: Writer,
    body: list[Node],
    arguments: list[str],
    results: list[Node],
    repeat: Repeat | None,
    names: dict[Node, str],
    t: int,
) -> None:
    writer.add(1, f"def forward(self, {', '.join(arguments)}):")
    writer.add(2, "tp, w = self.tp, self.weights")
    if any(note(arg).kind == "buffer" for node in body for arg in node.all_input_nodes):
        writer.add(2, "b = self.buffers")
    if repeat is None:
        _write_body(writer, body, names, t)
    else:
        before, loop, after = body[: repeat.start], body[repeat.start : repeat.stop], body[repeat.stop :]
        finals, carried = finals_of(loop, repeat), [node for node, _ in repeat.carried]
        _write_body(writer, before, names, t)
        _write_loop(writer, repeat, names, carried, finals)
        _write_body(writer, after, names, t)
    returned = ", ".join(names[node] for node in results)
    writer.add(2, f"return ({returned},)" if len(results) == 1 else f"return {returned}")


def _write_loop(
    writer: Writer, repeat: Repeat, names: dict[Node, str], carried: list[Node], finals: list[Node]
) -> None:
    writer.gap()
    for source, final in zip(carried, finals, strict=True):
        if names[source] != names[final]:
            writer.add(2, f"{names[final]} = {names[source]}")
    path = weight_text("w", f"{repeat.prefix}.0" if repeat.prefix else "0").removesuffix("[0]")
    results = ", ".join(names[node] for node in finals)
    outer = [
        names.get(node) or weight_text("w" if note(node).kind == "param" else "b", note(node).name)
        for node in sorted(repeat.outer, key=_is_stored)  # as the arguments of the layer: values, then parameters
    ]
    layer = f"{repeat.prefix}.{repeat.first}." if repeat.prefix else f"{repeat.first}."
    own = [
        f"{name}{path[1:]}[i]"
        for name, kind in (("w", "param"), ("b", "buffer"))
        if _reads(list(repeat.period), layer, kind)
    ]
    arguments = [*own, *(names[node] for node in finals), *outer]
    last = repeat.first + repeat.count
    writer.add(
        2, f"for i in range({repeat.first}, {last}):", f"{repeat.prefix}.{repeat.first} to {repeat.prefix}.{last - 1}"
    )
    writer.add(3, f"{results} = self.layer({', '.join(arguments)})")
    writer.gap()


def _write_body(writer: Writer, body: list[Node], names: dict[Node, str], t: int, layer: str = "") -> None:
    """One line per operator; a blank line and the module's path where the source module changes."""

    def text(node: Node) -> str:
        return names.get(node) or weight_text(
            "w" if note(node).kind == "param" else "b", note(node).name.removeprefix(layer)
        )

    section = None
    for node in body:
        if node.target is operator.getitem and _is_unpacked(node.args[0], body):  # type: ignore[arg-type]
            continue
        here = section_of(node, layer)
        if here != section:
            section = here
            writer.gap()
            source = f"  ({note(node).source})" if note(node).source else ""
            writer.add(2, f"# {here or 'the model itself'}{source}")
        target = names[node]
        if _is_unpacked(node, body):
            pieces = {user.args[1]: names[user] for user in node.users}
            target = ", ".join(pieces.get(i, "_") for i in range(len(node.meta["val"])))
        if (f := note(node).extra.get("swallowed")) is not None:
            writer.add(2, f"# overlap: all-reduce backward, {f.payload_bytes:,} B: {_brief(node, layer, f.why)}")
        writer.add(2, f"{target} = {expression(node, text, call_site(node, layer))}", comment_of(node, t, layer))


def call_site(node: Node, layer: str) -> str:
    """What a collective calls itself in errors and records: its module, the number of a repeated layer as a star."""
    path = note(node).module or "model"
    if not layer or not f"{path}.".startswith(layer):
        return path
    inside = f"{path}.".removeprefix(layer)
    return ".".join([*layer.split(".")[:-2], "*", inside]).rstrip(".")


def _is_unpacked(node: Node, body: list[Node]) -> bool:
    """A tuple whose pieces are taken right behind it is written as `q, k, v = ...`."""
    if not isinstance(node.meta["val"], (tuple, list)) or node not in body:
        return False
    at = body.index(node)
    near = body[at + 1 : at + 1 + len(node.users)]
    return all(user in near for user in node.users)


def section_of(node: Node, layer: str) -> str:
    """The source module that a line is shown under: its path to one name below the layer."""
    path = note(node).module
    inner = path.removeprefix(layer) if layer and path.startswith(layer) else "" if layer else path
    if layer:
        return inner.split(".")[0] or "the layer itself"
    parts = path.split(".")
    cut = next((i + 2 for i, part in enumerate(parts) if part.isdigit()), 2)
    return ".".join(parts[:cut])


def comment_of(node: Node, t: int, layer: str = "") -> str:
    """Local shape where it changes; for a conversion its collectives, bytes and reason; for a split GEMM its reason."""
    record = note(node)
    if node.target is markers.convert:
        both = zip(conversion_work(node), ("forward", "backward"), strict=True)
        work = [f"{what} {when}" for what, when in both if what != "none"]
        return f"{', '.join(work) or 'no communication'}, {collective_bytes(node, t):,} B: {_brief(node, layer, record.why)}"
    said = []
    first = next((arg for arg in node.args if isinstance(arg, Node)), None)
    literal = op_name(node) in ("aten.view", "aten.reshape", "aten.expand", "aten._unsafe_view")
    if not literal and tensor(node).dim() and (first is None or local_shape_text(first) != local_shape_text(node)):
        said.append(local_shape_text(node))
    if record.why.startswith(("column", "row")) or record.form:
        said.append(record.why)
    if "reason" in record.extra:
        said.append(record.extra["reason"])
    return "  ".join(said)


def _brief(node: Node, layer: str, why: str) -> str:
    """The reason of a conversion, without the path that the section above it shows already."""
    for known in (f"{note(node).module}: ", layer, f"{layer.removesuffix('.')}: "):
        why = why.removeprefix(known) if known not in ("", ": ") else why
    return why


def conversion_work(node: Node) -> tuple[str, str]:
    """What a conversion does forward and backward: its row of the table, less what this node does not need."""
    row = next(row for row in CONVERSIONS.values() if row.name == note(node).conversion)
    forward, backward = row.forward, row.backward
    if row.name == "s_to_s" and node.args[2] == node.args[4]:  # within one dim: see the runtime's s_to_s
        forward = backward = "none" if node.args[3] == node.args[5] else "all-gather"
    return forward, backward if note(node).needs_grad else "none"


def collective_bytes(node: Node, t: int) -> int:
    """Bytes of the whole value that a conversion moves (over tp, one microbatch)."""
    count = 1
    for size in note(node).extra["local_shapes"][0]:
        count *= size
    return count * tensor(node).element_size() * (t if note(node).tp.kind == "S" else 1)


def _write_count(writer: Writer, body: list[Node], counted: list[Node], given: dict[Node, str]) -> None:
    """`count`: what a weighted mean divides by, summed over all microbatches and replicas before the first forward."""
    needed: list[Node] = []

    def visit(node: Node) -> None:
        if node.op == "call_function" and node not in needed:
            for arg in node.all_input_nodes:
                visit(arg)
            needed.append(node)

    inputs = {node: name for node, name in given.items() if node.op == "placeholder"}
    for node in counted:
        for arg in node.args[1:]:
            if isinstance(arg, Node):
                visit(_whole(arg))
    read = [arg for node in needed for arg in node.all_input_nodes]
    read += [_whole(arg) for node in counted for arg in node.args[1:] if isinstance(arg, Node)]
    names = choose_names(needed, inputs, needed)

    def text(node: Node) -> str:
        return names.get(node) or weight_text("w" if note(node).kind == "param" else "b", note(node).name)

    writer.gap()
    writer.add(1, f"def count(self, {', '.join(inputs.values())}):")
    writer.add(2, '"""Number (or class weight) of the valid labels of one microbatch."""')
    if any(note(arg).kind == "buffer" for arg in read):
        writer.add(2, "b = self.buffers")
    for node in needed:
        writer.add(2, f"{names[node]} = {expression(node, text)}")
    calls = []
    for node in counted:
        targets, weight = node.args[1], node.args[2]
        keywords = f"ignore_index={node.kwargs['ignore_index']}"
        keywords += f", weight={text(_whole(weight))}" if isinstance(weight, Node) else ""
        calls.append(f"rt.count_labels({text(_whole(targets))}, {keywords})")  # type: ignore[arg-type]
    writer.add(2, f"return ({', '.join(calls)},)")


def _whole(node: Node) -> Node:
    return node.args[0] if node.target is markers.convert else node  # type: ignore[return-value]


def weight_text(root: str, name: str) -> str:
    """`w.transformer.h[0].ln_1.weight` for "transformer.h.0.ln_1.weight"; what is no name in Python: `w["my-emb"].weight`."""
    text = root
    for part in name.split("."):
        is_name = part.isidentifier() and not keyword.iskeyword(part) and not part.startswith("_")
        text += (
            f".{part}"
            if is_name
            else f"[{part}]"
            if part.isdecimal() and str(int(part)) == part
            else f"[{json.dumps(part)}]"
        )
    return text


__all__ = ["Crossing", "StageFile", "collective_bytes", "conversion_work", "crossings", "op_name", "write_stage"]
