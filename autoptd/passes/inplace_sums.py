"""Find the all-reduces over tp that may run in place (LOCAL -> LOCAL).

In: a LOCAL graph with hooks. Out: the same graph, in which a g (P -> I) whose operand has no other reader, or
an f (I -> R) whose gradient has none, is marked `owned` and emitted as `rt.p_to_i(x, tp, owned=True)`. Such a
value was just computed by an operator whose backward does not need it:

- g: the operand is the result of a GEMM or an addition, or rows of an embedding, and g is its only reader;
- f: all readers are GEMMs, so the gradient is computed by a GEMM, or is autograd's sum of several GEMM
  results.

Views in between do not matter as long as they have no other readers.
"""

from __future__ import annotations

from torch.fx import Graph, Node

from autoptd.ir import markers
from autoptd.ir.notes import note, ops
from autoptd.ir.operators.table import operator_of
from autoptd.passes.context import Context
from autoptd.passes.hook_gemms import gemm_operands
from autoptd.passes.runner import Form, graph_pass


@graph_pass(takes=Form.LOCAL, gives=Form.LOCAL, changes=("is_owned",))
def mark_owned(graph: Graph, ctx: Context) -> None:
    """Mark the conversions that may reduce in place."""
    for node in ops(graph):
        if node.target is not markers.convert:
            continue
        name = note(node).conversion
        if (name == "p_to_i" and _is_fresh(node)) or (name == "i_to_r" and _is_read_by_gemms(node)):
            note(node).is_owned = True


def _is_fresh(node: Node) -> bool:
    """Tell whether the operand of `node` is newly allocated and has no other reader."""
    x = node.args[0]
    while isinstance(x, Node) and len(x.users) == 1 and note(x).stages == note(node).stages:
        record = operator_of(x)
        # Nothing else refers to the memory of its result, and its backward does not read it.
        if record.is_fresh:
            return True
        if record.moves != "fold":
            return False
        x = x.args[0]
    return False


def _is_read_by_gemms(node: Node) -> bool:
    """Tell whether only GEMMs compute the gradient of `node`."""
    # The list grows during iteration: the readers of a view are appended.
    reads = [(node, user) for user in node.users]
    for source, user in reads:
        operands = user.args if user.target is markers.linear else gemm_operands(user)
        if operands is not None and operands[0] is source and source not in operands[1:]:
            continue
        if operator_of(user).moves != "fold":
            return False
        # The gradient of a view is a view of the gradient from its readers.
        reads += [(user, reader) for reader in user.users]
    return bool(reads) and all(note(user).stages == note(node).stages for _, user in reads)
