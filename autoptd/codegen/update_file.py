"""Write the buffer updates, which run once per step, after its last microbatch.

In: `Updates`. Out: the text of `updates.py`, a class whose method returns the new values by name; every rank
runs it:

    def new_values(self):
        b = self.buffers
        counts = self.part(0, shape=[8], dtype=torch.float32)
        return {"router.bias": b.router.bias + 0.001 * (counts.mean() - counts).sign()}
"""

from __future__ import annotations

from collections.abc import Sequence

from torch.fx import Node

from autoptd.codegen.expressions import expression
from autoptd.codegen.names import choose_names, operand_text
from autoptd.codegen.stage_file import with_header
from autoptd.codegen.writer import Writer
from autoptd.ir.names import quoted
from autoptd.ir.notes import note, ops, output, placeholders, tensor
from autoptd.ir.updates import Updates

UPDATES = "updates.py"
HEAD = "Buffers that the forward updates: computed once a step, after the last microbatch, on every rank."


def write_updates(updates: Updates, header: Sequence[str]) -> str:
    """Return the text of the file; `header` are the lines that every file begins with."""
    writer, body = Writer(), list(ops(updates.graph))
    new: tuple[Node, ...] = output(updates.graph).args[0]  # type: ignore[assignment]
    read = {arg for node in body for arg in node.all_input_nodes} | set(new)
    parts = [part for part in updates.parts if part in read]
    names = choose_names([*parts, *body], {}, list(new))

    def text(node: Node) -> str:
        return operand_text(node, names)

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
    return "\n".join(with_header(writer, [HEAD, *header[1:]], []).lines) + "\n"
