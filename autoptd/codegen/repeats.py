"""Find the repeated layer in a stage: a run of operators that comes again and again with other parameters.

No module name is looked at to find it; names only choose where a period starts, and must tell its parameters apart
(`h.0.ln.weight`, `h.1.ln.weight`) so that the emitted loop can index them. In: the operators of a stage. Out: a `Repeat`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from torch.fx import Node
from torch.fx.node import map_aggregate

from autoptd.ir.notes import note, shape


@dataclass(frozen=True)
class Repeat:
    """`count` periods of `length` operators (`period`: the first), from index `start`.

    The parameters of period k are called `{prefix}.{first + k}.{suffix}`.

    `carried` are (value before the loop, index in a period that replaces it) pairs; `outer` are values that every period
    reads; `returned` are the indices in a period that are carried or read after the loop.
    """

    period: tuple[Node, ...]
    start: int
    length: int
    count: int
    prefix: str
    first: int
    carried: tuple[tuple[Node, int], ...]
    outer: tuple[Node, ...]
    returned: tuple[int, ...]

    @property
    def stop(self) -> int:
        return self.start + self.length * self.count


def find_repeat(body: list[Node], results: set[Node]) -> Repeat | None:
    """The repeat that covers most operators, or None."""
    signature = [_signature(node) for node in body]
    best: Repeat | None = None
    for length in _periods(signature):
        for low, high in _runs(signature, length):
            for start in _starts(body, low, min(low + length, high)):
                found = _build(body, start, length, (high + length - start) // length, results)
                if found and (best is None or found.length * found.count > best.length * best.count):
                    best = found
    return best


def _signature(node: Node) -> Any:
    place = {arg: f"node {i}" for i, arg in enumerate(node.all_input_nodes)}  # f(x, x, y) is not f(x, y, y)
    literals = map_aggregate((node.args, node.kwargs), lambda arg: place[arg] if isinstance(arg, Node) else arg)
    return repr((str(node.target), str(literals), note(node).extra.get("local_shapes")))


def _periods(signature: list[Any]) -> list[int]:
    """Distances between equal operators, the commonest first."""
    last: dict[Any, int] = {}
    distances: Counter[int] = Counter()
    for i, one in enumerate(signature):
        if one in last:
            distances[i - last[one]] += 1
        last[one] = i
    return [length for length, times in distances.most_common(12) if length > 2 and 4 * times >= length]


def _runs(signature: list[Any], length: int) -> list[tuple[int, int]]:
    """Ranges [low, high) in which every operator equals the one a period later."""
    runs, low = [], None
    for i in range(len(signature) - length + 1):
        same = i + length < len(signature) and signature[i] == signature[i + length]
        if same and low is None:
            low = i
        if not same and low is not None:
            if i - low >= length // 2:
                runs.append((low, i))
            low = None
    return runs


def _starts(body: list[Node], low: int, high: int) -> list[int]:
    """Where a period may begin: at a change of layer."""
    layers = [_layer(node) for node in body]
    return [i for i in range(low, high + 1) if i < len(body) and layers[i] and (i == 0 or layers[i] != layers[i - 1])]


def _layer(node: Node) -> str:
    parts = note(node).module.split(".")
    return next((".".join(parts[: i + 1]) for i, part in enumerate(parts) if part.isdigit()), "")


def _build(body: list[Node], start: int, length: int, count: int, results: set[Node]) -> Repeat | None:
    """The repeat with as many periods as agree, at least two."""
    if count < 2 or start + length > len(body):
        return None
    layer = _layer(body[start])
    if not layer.rpartition(".")[2].isdigit():
        return None
    prefix, _, first = layer.rpartition(".")
    position = {node: i for i, node in enumerate(body)}
    base = _describe(
        body, position, start, length, 1, f"{prefix}.{int(first) + 1}." if prefix else f"{int(first) + 1}."
    )
    agreed = 1
    for k in range(1, count):
        if start + (k + 1) * length > len(body):
            break
        name = f"{prefix}.{int(first) + k}." if prefix else f"{int(first) + k}."
        if base is None or _describe(body, position, start, length, k, name) != base:
            break
        agreed += 1
    zero = _describe(body, position, start, length, 0, f"{layer}.")
    if agreed < 2 or base is None or zero is None:
        return None
    carried: dict[int, Node] = {}
    for ours, theirs in zip(zero, base, strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            if mine == other:
                continue
            if mine[0] != "outer" or other[0] != "before" or carried.setdefault(other[1], mine[1]) is not mine[1]:
                return None
    outer = dict.fromkeys(slot[1] for slots in base for slot in slots if slot[0] == "outer")
    stop = start + length * agreed
    inside = set(body[start:stop])
    final = body[stop - length : stop]
    read_after = {
        node
        for node in inside
        if node in results or any(user not in inside and position.get(user, -1) >= stop for user in node.users)
    }
    if not read_after <= set(final) or any(note(one).kind == "op" and one in inside for one in outer):
        return None
    returned = sorted({*carried, *(final.index(node) for node in read_after)})
    pairs = tuple((carried[j], j) for j in sorted(carried))
    if set(carried) != set(returned):
        return None
    return Repeat(
        tuple(body[start : start + length]),
        start,
        length,
        agreed,
        prefix,
        int(first),
        pairs,
        tuple(outer),
        tuple(returned),
    )


def _describe(
    body: list[Node], position: dict[Node, int], start: int, length: int, k: int, prefix: str
) -> list[list[tuple[str, Any]]] | None:
    """What each operand of period k is: inside the period, made by the period before, a parameter of the layer, or outer."""
    low = start + k * length
    told: list[list[tuple[str, Any]]] = []
    for node in body[low : low + length]:
        slots: list[tuple[str, Any]] = []
        for arg in node.all_input_nodes:
            at = position.get(arg, -1)
            if note(arg).kind in ("param", "buffer"):
                own = note(arg).name.startswith(prefix)
                slots.append((note(arg).kind, note(arg).name.removeprefix(prefix)) if own else ("outer", arg))
            elif at >= low:
                slots.append(("inside", at - low))
            elif at >= low - length and at >= start:
                slots.append(("before", at - low + length))
            elif at >= start:
                return None  # reaches back further than one period
            else:
                slots.append(("outer", arg))
        told.append(slots)
    return told


def local_shape_text(node: Node) -> str:
    """`[2, 64, 96]`: the local shape of a node's (first) value."""
    shapes = note(node).extra.get("local_shapes") or [shape(node)]
    return str(list(shapes[0]))
