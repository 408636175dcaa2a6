"""Write the files of a program: one per stage, `layers.py` with the methods that several stages call, and `updates.py`.

In: a LOCAL graph, its crossings, an `About` for every stage, and `Updates` of buffers, if any. Out: `ProgramFiles`: the
texts, what each stage reads and writes, and the operator on every line. The same input gives the same bytes.

- A stage reads from top to bottom. Its file imports only torch and autoptd.runtime, does not branch on the rank or depend
  on the device, and has each collective on a separate line, with its bytes and reason above.
- A repeated layer is written once: in the file of a stage if all of its rounds are there, else in `layers.py`.
- Buffer updates run once per step, after its last microbatch, on every rank. A method returns the new values by name:

    def new_values(self):
        b = self.buffers
        counts = self.part(0, shape=[8], dtype=torch.float32)
        return {"router.bias": b.router.bias + 0.001 * (counts.mean() - counts).sign()}
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch.fx import Graph, Node

from autoptd.codegen.body import numbers_text, site_text, typed_text, value_text, write_body
from autoptd.codegen.counts import batch_sums, counted_losses, write_count, write_sums
from autoptd.codegen.expressions import bound_axes, expression
from autoptd.codegen.methods import (
    Layer,
    Method,
    make_layer,
    make_method,
    write_layer,
    write_method,
    write_method_call,
    write_run,
)
from autoptd.codegen.names import choose_names, operand_text
from autoptd.codegen.parts import Block, Crossing, Part, divide, name_values
from autoptd.codegen.repeats import Run
from autoptd.codegen.writer import WIDTH, Writer, check_source
from autoptd.ir.mesh import SUB_AXIS, Mesh
from autoptd.ir.names import in_docstring, quoted, shown, star
from autoptd.ir.notes import is_whole, note, op_name, ops, output, placeholders, tensor
from autoptd.ir.updates import Updates
from autoptd.program.specs import Line

HEAD_OF_LAYERS = "Methods that several stages of the program call, written once: every stage has them."
# The file of methods that several stages call.
LAYERS = "layers.py"
FOOTER = """

if __name__ == "__main__":
    rt.main(Stage{stage}, __file__)  # --check: run this stage alone on random inputs
"""
ABOUT_SUB_AXES = (
    "axis:(b)n is a part of an axis whose ranks are a grid: a factor of n ranks, after a slower factor of b."
)
IMPORTS = {r"\btorch\.": "import torch", r"\bF\.": "import torch.nn.functional as F"}
# By `method_key`.
Methods = dict[object, Layer | Method]
UPDATES = "updates.py"
HEAD_OF_UPDATES = (
    "Buffers that the forward updates: computed once a step, after the last microbatch, on every rank."
)


@dataclass(frozen=True)
class About:
    """Describe a stage for its reader.

    `header` begins its file, `legend` explains the abbreviations of collectives, `ranks` is the pipeline rank
    of every stage, `ends` are headings with lines about reductions and gathers, and `gathered` says of layers how their
    parameters arrive.
    """

    header: Sequence[str]
    legend: Sequence[str]
    ranks: Sequence[int]
    ends: Sequence[tuple[str, Sequence[str]]]
    gathered: Mapping[str, str]


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


@dataclass(frozen=True)
class ProgramFiles:
    """The texts of all files by name, what each stage reads and writes, and the operator on every line."""

    sources: dict[str, str]
    stages: tuple[StageFile, ...]
    lines: tuple[Line, ...]


def write_program(
    graph: Graph,
    mesh: Mesh,
    crossing: Sequence[Crossing],
    about: Sequence[About],
    updates: Updates | None = None,
) -> ProgramFiles:
    """Return the files of a program; `about` has an entry for every stage."""
    parts = divide(graph, crossing, len(about))
    names = [name_values(part) for part in parts]
    methods: Methods = {}
    # The stages that call each method. All methods are named before the first file is written, as only then
    # is it known whether a method belongs in a stage's file or in `LAYERS`.
    homes: dict[object, set[int]] = {}
    for part in parts:
        _name_methods(part, names[part.index], methods, homes)
    shared = [key for key in methods if len(homes[key]) > 1]
    files = tuple(
        write_stage(part, names[part.index], mesh, about[part.index], methods, shared) for part in parts
    )
    sources = {f"stage_{part.index}.py": file.text for part, file in zip(parts, files, strict=True)}
    lines = [line for file in files for line in file.lines]
    if shared:
        writer = Writer()
        writer.add(0, "class Layers(rt.Stage):")
        for key in shared:
            write_any(writer, methods[key], mesh)
        while not writer.lines[-1]:
            writer.lines.pop()
        writer = with_header(writer, [HEAD_OF_LAYERS, *about[0].header[1:]], about[0].legend)
        sources[LAYERS] = "\n".join(writer.lines) + "\n"
        lines += lines_of(LAYERS, writer, mesh)
    if updates is not None:
        sources[UPDATES] = write_updates(updates, about[0].header)
    for name, source in sources.items():
        check_source(name, source)
    return ProgramFiles(sources, files, tuple(lines))


def _name_methods(
    part: Part, names: dict[Node, str], methods: Methods, homes: dict[object, set[int]]
) -> None:
    """Add the methods that a stage is the first to call, with arguments named like values in its forward."""

    text = partial(operand_text, names=names)
    for call in part.calls:
        key = method_key(call)
        homes.setdefault(key, set()).add(part.index)
        # Later stages use the names that the first stage gave the method.
        if key in methods:
            continue
        taken = [method.name for method in methods.values()]
        if isinstance(call, Run):
            methods[key] = make_layer(call, text, taken)
        else:
            methods[key] = make_method(call, text, taken)


def method_key(call: Run | Block) -> object:
    """Return the key that all calls of one method share."""
    return call.repeat if isinstance(call, Run) else call.nodes


def write_stage(
    part: Part, names: dict[Node, str], mesh: Mesh, about: About, methods: Methods, shared: Collection[object]
) -> StageFile:
    """Return the file of a stage with the methods that only it calls; those in `shared` are in `LAYERS`."""
    writer = Writer()
    writer.add(0, f"class Stage{part.index}(rt.Stage):")
    called = dict.fromkeys(method_key(call) for call in part.calls)
    shared_methods = [f"self.{methods[key].name}" for key in called if key in shared]
    if shared_methods:
        # The loader adds the methods of that file to the class of the stage.
        writer.add(1, f'layers = "{LAYERS}"', f"has {', '.join(shared_methods)}")
        writer.lines.append("")
    for key in called:
        if key not in shared:
            write_any(writer, methods[key], mesh)
    _write_forward(writer, part, names, mesh, about, methods)
    counted = counted_losses(part.body)
    if counted:
        write_count(writer, counted, part.given)
    # A batch sum that only other sums depend on is not in the body.
    for number, sums in enumerate(batch_sums((*part.body, *part.summed))):
        write_sums(writer, number, sums, part.given)
    for heading, lines in about.ends:
        _write_end(writer, heading, lines)
    writer = with_header(writer, about.header, about.legend)
    return StageFile(
        text="\n".join(writer.lines) + "\n" + FOOTER.format(stage=part.index),
        crossings=tuple(crossing.name for crossing in part.arriving),
        inputs=tuple(note(node).name for node in part.read("input")),
        outputs=tuple(crossing.name for crossing in part.leaving),
        params=tuple(note(node).name for node in part.read("param")),
        buffers=tuple(note(node).name for node in part.read("buffer")),
        counts=bool(counted),
        lines=lines_of(f"stage_{part.index}.py", writer, mesh),
    )


def _write_forward(
    writer: Writer, part: Part, names: dict[Node, str], mesh: Mesh, about: About, methods: Methods
) -> None:
    text = partial(operand_text, names=names)

    def express(_: int, node: Node) -> str:
        return expression(node, text, site_text(node))

    writer.add(1, f"def forward({', '.join(['self', *part.given.values()])}):")
    for crossing in part.arriving:
        source = f"from stage {crossing.source} (pipeline rank {about.ranks[crossing.source]})"
        writer.comment(2, f"{crossing.name}: {typed_text(crossing.node, mesh)}, {source}: {crossing.origin}")
    for node in part.read("input"):
        writer.comment(2, f"{note(node).name}: {value_text(node)}, from the batch")
    # `tp, w = self.groups["tp"], self.weights`: groups are looked up once, even if a loop uses them.
    writer.bind(bound_axes(_own_nodes(part)) | {"w": "self.weights"})
    if part.read("buffer"):
        writer.bind({"b": "self.buffers"})
    # Between the calls, write the operators of the stage itself.
    end = 0
    for call in part.calls:
        write_body(writer, part.body[end : call.start], names, mesh, express)
        method = methods[method_key(call)]
        if isinstance(method, Layer):
            write_run(writer, method, call, names, text, about.gathered)  # type: ignore[arg-type]
        else:
            write_method_call(writer, method, part.index, names, text)
        end = call.end
    write_body(writer, part.body[end:], names, mesh, express)
    for crossing in part.leaving:
        where = _destination(crossing, about)
        back = "; its gradient comes back" if note(crossing.node).needs_grad else ""
        writer.comment(2, f"{names[crossing.node]} goes to {where}: {typed_text(crossing.node, mesh)}{back}")
    # Always return a tuple: the executor zips it with `outputs`.
    returned = ", ".join(names[node] for node in part.results)
    writer.add(2, f"return ({returned},)" if len(part.results) == 1 else f"return {returned}")


def _destination(crossing: Crossing, about: About) -> str:
    """Return `stages 1, 2 (pipeline ranks 0, 1) as x_from_0`."""
    ranks = sorted({about.ranks[stage] for stage in crossing.targets})
    stages = _plural("stage", crossing.targets)
    return f"{stages} ({_plural('pipeline rank', ranks)}) as {crossing.name}"


def _plural(word: str, numbers: Sequence[int]) -> str:
    """Return `stage 3`, or `stages 3, 5 to 7`."""
    ending = "s" if len(numbers) > 1 else ""
    return f"{word}{ending} {numbers_text(numbers)}"


def _own_nodes(part: Part) -> list[Node]:
    """Return the operators in the forward of a stage, outside of method calls."""
    own: list[Node] = []
    end = 0
    for call in part.calls:
        own += part.body[end : call.start]
        end = call.end
    return own + part.body[end:]


def _write_end(writer: Writer, heading: str, lines: Sequence[str]) -> None:
    """Write comments on what this stage's pipeline rank does outside of its operators."""
    if lines:
        writer.lines += ["", ""]
        writer.comment(0, heading)
        for line in lines:
            writer.comment(0, f"- {line}")


def write_any(writer: Writer, method: Layer | Method, mesh: Mesh) -> None:
    """Write a method of either kind."""
    if isinstance(method, Layer):
        write_layer(writer, method, mesh)
    else:
        write_method(writer, method, mesh)


def lines_of(file: str, writer: Writer, mesh: Mesh) -> tuple[Line, ...]:
    """Return the operators on the lines of a file."""
    lines = []
    for number, node in writer.nodes.items():
        # Every tensor rank computes it in full: plots show that cost.
        is_redundant = mesh.value_ranks > 1 and not note(node).conversion and is_whole(node)
        name = note(node).conversion or op_name(node)
        lines.append(Line(file, number, star(note(node).module), name, is_redundant))
    return tuple(lines)


def with_header(body: Writer, header: Sequence[str], legend: Sequence[str]) -> Writer:
    """Put the docstring and the imports before `body`; only a file with collectives gets the `legend`."""
    # The body is written first, since the header depends on the names that it uses.
    writer, text = Writer(), "\n".join(body.lines)
    has_calls = any(note(node).conversion for node in body.nodes.values())
    writer.add(0, f'"""{in_docstring(header[0])}')
    writer.gap()
    lines = list(header[1:])
    if SUB_AXIS.search(text):
        lines.append(ABOUT_SUB_AXES)
    if has_calls:
        lines += legend
    for line in lines:
        writer.lines += map(in_docstring, textwrap.wrap(shown(line), WIDTH, subsequent_indent="    "))
    writer.add(0, '"""')
    imports = [line for word, line in IMPORTS.items() if re.search(word, text)]
    writer.lines += ["", *imports]
    if imports:
        writer.lines.append("")
    writer.lines += ["from autoptd import runtime as rt", "", ""]
    writer.extend(body)
    return writer


def write_updates(updates: Updates, header: Sequence[str]) -> str:
    """Return the text of the file; `header` are the lines that every file begins with."""
    writer, body = Writer(), list(ops(updates.graph))
    new: tuple[Node, ...] = output(updates.graph).args[0]  # type: ignore[assignment]
    read = {arg for node in body for arg in node.all_input_nodes} | set(new)
    parts = [part for part in updates.parts if part in read]
    names = choose_names([*parts, *body], {}, list(new))

    text = partial(operand_text, names=names)
    writer.add(0, "class Updates(rt.BufferUpdates):")
    writer.add(1, "def new_values(self):")
    if any(node in read for node in placeholders(updates.graph, "buffer")):
        writer.add(2, "b = self.buffers")
    for number, part in enumerate(updates.parts):
        if part in parts:
            shape = f"shape={list(tensor(part).shape)}, " if tensor(part).dim() else ""
            about = "summed over the batch" if updates.sums[number] else "the same for every microbatch"
            call = f"self.part({number}, {shape}dtype={tensor(part).dtype})"
            writer.add(2, f"{names[part]} = {call}", about)
    module = ""
    for node in body:
        if note(node).module != module:
            module = note(node).module
            writer.gap()
            writer.comment(2, module or "the model itself")
        writer.add(2, f"{names[node]} = {expression(node, text)}")
    writer.add(2, "return {")
    for name, node in zip(updates.buffers, new, strict=True):
        writer.add(3, f"{quoted(name)}: {text(node)},")
    writer.add(2, "}")
    return "\n".join(with_header(writer, [HEAD_OF_UPDATES, *header[1:]], []).lines) + "\n"
