"""Write one stage as a Python file that a person can read top to bottom.

In: a LOCAL graph, a stage's index, and a few lines about the plan. Out: `StageFile`: source text, and what it reads and
writes. The file imports torch and autoptd.runtime only, has no branch on rank, and does not depend on the device; a repeated
layer is written once; every collective has its own line with its bytes and its reason.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from torch.fx import Graph, Node

from autoptd.codegen.body import write_body
from autoptd.codegen.comments import collective_bytes, conversion_work, origin_text
from autoptd.codegen.counts import counted_losses, write_count
from autoptd.codegen.expressions import expression
from autoptd.codegen.loops import Layer, make_layer, write_layer, write_loop
from autoptd.codegen.names import choose_names
from autoptd.codegen.repeats import Repeat, find_repeats
from autoptd.codegen.writer import Writer, weight_text
from autoptd.ir.notes import is_whole, note, op_name, ops, output, placeholders
from autoptd.program.calls import star
from autoptd.program.program import Line

FOOTER = """

if __name__ == "__main__":
    rt.main(Stage{stage}, __file__)  # --check: this stage alone, on random numbers
"""


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
    lines: tuple[Line, ...]


def crossings(graph: Graph) -> list[Crossing]:
    """All values that cross from one stage to later ones, in order."""
    found: list[Crossing] = []
    taken: set[str] = set()
    inputs = {note(node).name for node in placeholders(graph, "input")}
    for node in ops(graph):
        home = note(node).stages
        targets = sorted({stage for user in node.users for stage in note(user).stages} - set(home))
        if targets:
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
    repeats = find_repeats(body, set(results))  # type: ignore[arg-type]
    names = forward_names(body, given, results, repeats)  # type: ignore[arg-type]

    def text(node: Node) -> str:
        return names.get(node) or weight_text("w" if note(node).kind == "param" else "b", note(node).name)

    layers: list[Layer] = []
    for repeat in repeats:
        layers.append(make_layer(repeat, text, [one.name for one in layers]))
        write_layer(writer, layers[-1], t)
    writer.add(1, f"def forward(self, {', '.join(given.values())}):")
    for one in (one for one in crossing if stage in one.targets):
        writer.add(2, f"# {one.name}: {origin_text(one.node)}, from stage {one.source}")
    writer.add(2, "tp, w = self.tp, self.weights")
    if named["buffer"]:
        writer.add(2, "b = self.buffers")

    def spell(_: int, node: Node, site: str) -> str:
        return expression(node, text, site)

    end = 0
    for layer in layers:
        write_body(writer, body[end : layer.repeat.at.start], names, t, spell)
        write_loop(writer, layer, names, text)
        end = layer.repeat.at.stop
    write_body(writer, body[end:], names, t, spell)
    returned = ", ".join(names[node] for node in results)  # type: ignore[index]
    writer.add(2, f"return ({returned},)" if len(results) == 1 else f"return {returned}")
    counted = counted_losses(body)
    if counted:
        write_count(writer, counted, given)
    return StageFile(
        text="\n".join(writer.lines) + "\n" + FOOTER.format(stage=stage),
        crossings=tuple(arriving.values()),
        inputs=tuple(note(node).name for node in named["input"]),
        outputs=tuple(one.name for one in leaving),
        params=tuple(note(node).name for node in named["param"]),
        buffers=tuple(note(node).name for node in named["buffer"]),
        counts=bool(counted),
        lines=tuple(line_of(stage, number, node, t) for number, node in writer.nodes.items()),
    )


def line_of(stage: int, number: int, node: Node, t: int) -> Line:
    """What stands on a line of the file."""
    is_redundant = t > 1 and not note(node).conversion and is_whole(node)
    return Line(stage, number, star(note(node).module), note(node).conversion or op_name(node), is_redundant)


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
    body: list[Node], given: dict[Node, str], results: list[Node], repeats: list[Repeat]
) -> dict[Node, str]:
    """The variables of forward; of a repeat only what comes out of it."""
    shown: list[Node] = []
    inside: dict[Node, int] = {}
    held: dict[Node, int] = {}
    same: dict[Node, Node] = {}
    end = 0
    for repeat in repeats:
        shown += body[end : repeat.at.start]
        first, behind = len(shown), len(shown) + len(repeat.finals)
        loop = body[repeat.at.start : repeat.at.stop]
        inside |= {node: first for node in loop if node not in repeat.finals}
        # What every round reads, and what goes from round to round, must not share a name with another of them.
        outer = [node for slots in repeat.at.operands for one in slots for node in one.nodes]
        held |= dict.fromkeys([*outer, *repeat.finals], behind)
        same |= {final: initial for final, (_, initial) in zip(repeat.finals, repeat.carried, strict=True)}
        shown += repeat.finals
        end = repeat.at.stop
    return choose_names([*shown, *body[end:]], given, results, inside, same, held)


__all__ = ["Crossing", "StageFile", "collective_bytes", "conversion_work", "crossings", "forward_names", "write_stage"]
