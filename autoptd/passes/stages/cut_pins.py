"""Cuts by name: what `plan.json` calls a place to cut, and back.

In: the backbone in model order, and names, or layers per stage. Out: positions. A name is a module, meaning behind its last
operator (`transformer.h.3`, or inside of a layer: `transformer.h.3.attn`), or one of its operators, counted from 0 over all
calls of the module: `transformer.h.3:add[0]`. `:add[2]` is an operator of the model's own forward.

    places = Places(backbone)
    places.name(17)                                # "transformer.h.0"
    places.find(("transformer.h.0", "transformer.h.2"), stages=3)
    places.find((1, 2, 1), stages=3)               # layers per stage of the longest run of layers
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from difflib import SequenceMatcher
from itertools import accumulate, pairwise

from torch.fx import Node

from autoptd.errors import PlanError
from autoptd.ir.notes import is_tensor, note, op_name
from autoptd.ir.plan import nearest

SITE = "plan: cut"


class Places:
    """The positions of a backbone, by name."""

    def __init__(self, backbone: Sequence[Node]) -> None:
        self.backbone = backbone
        self.ends: dict[str, int] = {}  # module -> its last operator
        self.operators: dict[tuple[str, str], list[int]] = {}  # (module, operator) -> where it stands
        for i, node in enumerate(backbone):
            path = note(node).module
            parts = path.split(".") if path else []
            self.ends |= {".".join(parts[:k]): i for k in range(1, len(parts) + 1)}
            self.operators.setdefault((path, _label(node)), []).append(i)

    def name(self, at: int) -> str:
        """What a cut behind operator `at` is called: its layer, or a module that ends there (the outermost in the layer)."""
        path = note(self.backbone[at]).module
        parts, layer = path.split("."), layer_of(path)
        modules = [".".join(parts[:k]) for k in range(len(parts), 0, -1)]
        if layer.rpartition(".")[2].isdigit():
            modules = modules[modules.index(layer) :: -1]
        ended = [one for one in modules if self.ends.get(one) == at]
        return ended[0] if ended else self.label(at)

    def label(self, at: int) -> str:
        """What operator `at` is called."""
        path, label = note(self.backbone[at]).module, _label(self.backbone[at])
        return f"{path}:{label}[{self.operators[path, label].index(at)}]"

    def find(self, given: Sequence[int] | Sequence[str], stages: int) -> tuple[int, ...]:
        """The last operator of every stage but the last one; PlanError if these cuts cannot be made."""
        names = list(given)
        if names and isinstance(names[0], int):
            names, found = self._of_counts(names, stages)  # type: ignore[arg-type, assignment]
        else:
            found = [self._of_name(str(one)) for one in names]
        if len(found) != stages - 1:
            fact = f"{len(found)} places cut the model into {len(found) + 1} stages, p*v is {stages}"
            raise PlanError(SITE, fact, f"{stages - 1} names, or {stages} numbers of layers")
        for (one, a), (other, b) in pairwise(zip(names, found, strict=True)):
            if a >= b:
                fact = f"{other} does not come behind {one} in the model"
                raise PlanError(
                    SITE, fact, "the places in the order in which the model computes them, each once"
                )
        for one, at in zip(names, found, strict=True):
            self._check_crossing(str(one), at)
        return tuple(found)

    def like(self, other: Places, names: Sequence[int] | Sequence[str]) -> tuple[str, ...]:
        """The names, here, of the places that another backbone of the same model calls `names`.

        The two need not have the same operators: a cut stays behind the last operator before it that both have.
        """
        mine, theirs = ([(note(node).module, _label(node)) for node in one.backbone] for one in (self, other))
        here = {
            block.b + i: block.a + i
            for block in SequenceMatcher(None, mine, theirs, autojunk=False).get_matching_blocks()
            for i in range(block.size)
        }
        cuts = [other._of_name(str(name)) for name in names]
        return tuple(self.label(max((here[at] for at in here if at <= cut), default=0)) for cut in cuts)

    def _of_name(self, name: str) -> int:
        """Where a name ends."""
        path, colon, rest = name.partition(":")
        if not colon:
            if path not in self.ends:
                fact = f"{name!r} is no module that computes anything from inputs and parameters"
                raise PlanError(SITE, fact, nearest(path, self.ends))
            return self.ends[path]
        found = re.fullmatch(r"(.+?)(?:\[(\d+)\])?", rest)
        label, number = (found[1], int(found[2] or 0)) if found else ("", 0)
        same = self.operators.get((path, label), [])
        if number >= len(same):
            fact = f"{name!r}: {path or 'the model itself'} has {len(same) or 'no'} {label} of its own"
            raise PlanError(
                SITE, fact, nearest(label, [one for module, one in self.operators if module == path])
            )
        return same[number]

    def _of_counts(self, counts: list[int], stages: int) -> tuple[list[str], list[int]]:
        """Cuts behind so many layers; none at the front: before the first layer."""
        layers = self._layers()
        run = f"{layers[0]} to {layers[-1]}" if layers else "none"
        if len(counts) != stages or sum(counts) != len(layers):
            fact = f"{counts} are {sum(counts)} layers on {len(counts)} stages"
            remedy = f"{stages} numbers that add up to {len(layers)} layers ({run}), or names of modules"
            raise PlanError(SITE, fact, remedy)
        names, found = [], []
        first = next(
            (i for i, node in enumerate(self.backbone) if layer_of(note(node).module) == layers[0]), 0
        )
        for count in list(accumulate(counts))[:-1]:
            at = self.ends[layers[count - 1]] if count else first - 1
            if at < 0:
                raise PlanError(
                    SITE, f"nothing comes before {layers[0]}", "at least one layer on the first stage"
                )
            names.append(layers[count - 1] if count else f"the front of {layers[0]}")
            found.append(at)
        return names, found

    def _layers(self) -> list[str]:
        """The layers of the longest run (`transformer.h.0`, `transformer.h.1`, ...), in order of their first operator."""
        runs: dict[str, dict[str, None]] = {}
        for node in self.backbone:
            layer = layer_of(note(node).module)
            prefix, _, number = layer.rpartition(".")
            if number.isdigit():
                runs.setdefault(prefix, {})[layer] = None
        return list(max(runs.values(), key=len, default={}))

    def _check_crossing(self, name: str, at: int) -> None:
        """What lives on behind a cut must be tensors, and something must be left to do."""
        if at == len(self.backbone) - 1:
            raise PlanError(
                SITE,
                f"{name} is the end of the model: nothing is left for the stages behind it",
                "a place before it",
            )
        order = {node: i for i, node in enumerate(self.backbone)}
        for node in self.backbone[: at + 1]:
            if not is_tensor(node) and any(order.get(user, 0) > at for user in node.users):
                free = self.name(max(order[user] for user in node.users if user in order))
                fact = f"{name} ends between {_label(node)} and the pieces that are taken of it, which cannot be sent"
                raise PlanError(SITE, fact, f"{free}, or another place")


def layer_of(path: str) -> str:
    """A module's path up to its first number: `transformer.h.3` for all inside that layer, else the path's first name."""
    parts = path.split(".")
    for i, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: i + 1])
    return parts[0]


def _label(node: Node) -> str:
    return note(node).conversion or op_name(node).removeprefix("aten.")
