"""Choose the variable of every value in an emitted function: the user's names where they are known.

In: operators in order, and the names of arguments. Out: a name for every value. The last operator of a source
line `q, k, v = ...` gets these variables as its names, and the only operator of a module gets the module's
name; others are named after their operator. A name is reused as soon as its value is dead.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Collection, Sequence

from torch.fx import Node

from autoptd.codegen.writer import weight_text
from autoptd.ir import markers
from autoptd.ir.names import RESERVED, free_name
from autoptd.ir.notes import converted_types, is_pair, note, op_name
from autoptd.ir.operators.table import operator_of

# Fused operators whose result keeps the name of their first operand.
KEEPING = {"rotary"}
# The suffix of gathered values.
WHOLE = "_whole"
# The operators of one source line are at most this far apart.
MAX_DISTANCE = 5


def choose_names(
    body: list[Node],
    given: dict[Node, str],
    results: list[Node],
    inside: dict[Node, int] | None = None,
    same: dict[Node, str] | None = None,
    held: dict[Node, int] | None = None,
    reserved: Collection[str] = (),
    beyond: Sequence[Node] = (),
) -> dict[Node, str]:
    """Name the value of every node of `body`, run in this order; `given` are the arguments, `results` live to
    the end.

    `inside` are readers in a loop, with the index in `body` of that loop's results; `same` are the names of
    those results in the loop; `held` is the index up to which a value lives past its last reader. `reserved`
    names are never chosen. `beyond` are the operators that follow in another function.
    """
    # A name is free again after the last reader of its value. Readers in other functions have no position
    # here (-1): the values they read stay live as `results` or `held`.
    position = {node: i for i, node in enumerate(body)} | (inside or {})
    last_use: dict[Node, int] = {}
    for node in [*given, *body]:
        readers = [position.get(user, -1) for user in node.users]
        last_use[node] = max(readers, default=-1)
    for node, until in (held or {}).items():
        last_use[node] = max(last_use.get(node, -1), until)
    for node in results:
        last_use[node] = len(body)
    # The value that each variable holds at this point of the function.
    holder = {name: node for node, name in given.items()}
    names = dict(given)
    for i, node in enumerate(body):
        wanted = (same or {}).get(node) or _wanted(node, [*body, *beyond], i, names)
        # The user may have chosen w, or F, which emitted files use themselves.
        free = wanted = free_name(wanted)
        count = 1
        while free in reserved or (free in holder and last_use[holder[free]] > i):
            count += 1
            free = f"{wanted}_{count}"
        names[node] = free
        holder[free] = node
    return names


def operand_text(node: Node, names: dict[Node, str]) -> str:
    """Return the text that reads a value: its variable, or `w.h[0].ln.weight`, with `b.` for a buffer."""
    if node in names:
        return names[node]
    root = "w" if note(node).kind == "param" else "b"
    return weight_text(root, note(node).name)


def _wanted(node: Node, body: list[Node], i: int, names: dict[Node, str]) -> str:
    # Try names in the order in which a reader recognizes them: the user's variable, the user's module, the
    # operator. Given by a pass that made the node.
    if note(node).origin.name:
        return note(node).origin.name
    if is_pair(node):
        return "pair"
    assigned = assigned_name(body, i)
    if assigned:
        return assigned
    # "aten.linear" -> "linear"
    name = op_name(node).rpartition(".")[2]
    source = node.args[0] if node.args and isinstance(node.args[0], Node) else None
    is_named = source is not None and (source in names or note(source).kind in ("param", "buffer"))
    if is_named and _keeps_name(node, name, source):
        base = _base(names.get(source, ""), source)
        # Gathered twice on its way, a value is still `x_whole`, not `x_whole_whole`.
        return f"{base.removesuffix(WHOLE)}{WHOLE}" if _gathers(node) else base
    # To a reader, a module with one operator is that operator: `c_fc = F.linear(...)`.
    leaf = note(node).module.split(".")[-1]
    of_module = [other for other in body if note(other).module == note(node).module and _counts(other)]
    if len(of_module) == 1 and leaf.isidentifier() and leaf not in RESERVED:
        return leaf
    return operator_of(node).variable or name


def _keeps_name(node: Node, name: str, source: Node) -> bool:
    """Tell whether a result keeps the name of its first operand: a slice of labels is still called labels."""
    if node.target in (*markers.PLACED, markers.batch_sum) or name in KEEPING:
        return True
    if operator_of(node).keeps_name:
        return True
    return name in ("slice", "pad") and not note(source).of_params


def _gathers(node: Node) -> bool:
    """Tell whether the operand is a shard, and the result the whole value."""
    return node.target is markers.convert and note(node).conversion in ("s_to_r", "s_to_i")


def _base(name: str, source: Node) -> str:
    """Return the name of an operand that its result keeps; for a parameter, its last two words."""
    if note(source).kind in ("param", "buffer"):
        # "h.0.ln_1.weight" -> "ln_1_weight"; layer numbers are not identifiers and are dropped.
        return "_".join(word for word in note(source).name.split(".")[-2:] if word.isidentifier()) or "x"
    return name


def assigned_name(body: list[Node], i: int) -> str:
    """Return the variable assigned by the source line of operator i if it is the line's last one; else ""."""
    node = body[i]
    is_piece = node.target is operator.getitem and _counts(node.args[0])  # type: ignore[arg-type]
    piece = node.args[1] if is_piece else note(node).origin.piece
    if piece is not None:
        targets = _targets(note(node if note(node).origin.piece is not None else node.args[0]).code)  # type: ignore[arg-type]
        return targets[piece] if len(targets) > piece else ""  # type: ignore[index, operator]
    line, module = note(node).source, note(node).module
    # `x = x + self.attn(x)` is many operators with one line: only the last of them is the user's `x`. The
    # same line run by another module, as that of the next layer, is another assignment.
    for distance, after in enumerate(body[i + 1 :]):
        if note(after).source != line or _brings_to_layers(after, node):
            continue
        other = note(after).module
        if _owns(other, module) or (distance < MAX_DISTANCE and _is_near(other, module)):
            return ""
    targets = _targets(note(node).code)
    return targets[0] if len(targets) == 1 else ""


def _brings_to_layers(after: Node, node: Node) -> bool:
    """Tell whether `after` converts `node` to the type in which layers begin, and so keeps its name."""
    return after.target is markers.convert and after.args[0] is node and converted_types(after)[0].kind != "P"


def _counts(node: Node) -> bool:
    """Tell whether a value may have the name of its module: it is neither a conversion nor a pair."""
    return node.target not in markers.MARKERS[:3] and not is_pair(node)


def _owns(owner: str, module: str) -> bool:
    """Tell whether a line of `owner` may have called `module`."""
    return owner != module and (not owner or module.startswith(f"{owner}."))


def _is_near(other: str, module: str) -> bool:
    """Tell whether two modules are the same, or may have been called by one line, unlike layers."""
    parent, _, leaf = module.rpartition(".")
    return other == module or (not leaf.isdigit() and other.startswith(f"{parent}." if parent else ""))


def _targets(code: str) -> list[str]:
    """Return the names on the left of an assignment; [] for any other line."""
    try:
        parsed = ast.parse(code.strip()).body
    except SyntaxError:
        # A statement of several lines: the trace has only the text of the first one.
        return []
    if len(parsed) != 1:
        return []
    target: ast.expr
    match parsed[0]:
        case ast.Assign(targets=[target, *_]) | ast.AugAssign(target=target):
            elements = target.elts if isinstance(target, ast.Tuple) else [target]
        case _:
            return []
    names = [element.id for element in elements if isinstance(element, ast.Name)]
    # Pieces are named together: if one target is a `self.x` or a reserved name, none of them is used.
    if len(names) < len(elements) or set(names) & RESERVED:
        return []
    return names
