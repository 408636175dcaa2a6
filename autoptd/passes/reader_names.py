"""Name the operator that a value is converted for, in the reason of the conversion.

In: the node that reads the value. Out: a word. Torch's name of the first operator says little if it is part
of a known pattern: an RMS norm begins with `pow`, and a `view` that folds dims is a reshape.

    reader_name(view)       # "reshape"
"""

from __future__ import annotations

from collections.abc import Collection

from torch.fx import Node

from autoptd.ir.notes import op_name
from autoptd.ir.operators.table import operator_of

# Names by the way an operator moves entries.
WORDS = {"fold": "reshape", "cast": "cast"}
# The chain of operators that reads the square of a value in an RMS norm.
NORM = (("mean",), ("add",), ("rsqrt", "sqrt"))


def reader_name(reader: Node) -> str:
    """Return the common name of an operator; `the loss` for the end of the graph."""
    if reader.op != "call_function":
        return "the loss"
    name = _name(reader)
    if name == "pow" and _leads_to(reader, NORM):
        return "rms_norm"
    return WORDS.get(operator_of(reader).moves, name)


def _leads_to(node: Node, path: Collection[Collection[str]]) -> bool:
    for names in path:
        readers = [user for user in node.users if _name(user) in names]
        if not readers:
            return False
        node = readers[0]
    return True


def _name(node: Node) -> str:
    return op_name(node).removeprefix("aten.")


__all__ = ["reader_name"]
