"""Write the files of a program: one per stage, and `layers.py` with the methods that several stages call.

In: a LOCAL graph, its crossings, and an `About` for every stage. Out: `ProgramFiles`. A repeated layer is
written once: in the file of a stage if all of its rounds are there, else in `layers.py`. The same input gives
the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch.fx import Graph, Node

from autoptd.codegen.blocks import make_method
from autoptd.codegen.loops import make_layer
from autoptd.codegen.names import operand_text
from autoptd.codegen.parts import Crossing, Part, divide, name_values
from autoptd.codegen.runs import Run
from autoptd.codegen.stage_file import (
    LAYERS,
    About,
    Methods,
    StageFile,
    lines_of,
    method_key,
    with_header,
    write_any,
    write_stage,
)
from autoptd.codegen.update_file import UPDATES, write_updates
from autoptd.codegen.writer import Writer, check_source
from autoptd.ir.mesh import Mesh
from autoptd.ir.updates import Updates
from autoptd.program.specs import Line

HEAD = "What several stages of the program call, written once: every stage has these methods."


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
        writer = with_header(writer, [HEAD, *about[0].header[1:]], about[0].legend)
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

    def text(node: Node) -> str:
        return operand_text(node, names)

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
