"""Translate between the names of cuts in `plan.json` and positions in the backbone.

In: the backbone in model order, and names, or layers per stage. Out: positions. A name is a module, for a cut after its
last operator (`transformer.h.3`, or within a layer: `transformer.h.3.attn`), or one of its operators, counted from 0
over all calls of the module: `transformer.h.3:add[0]`. `:add[2]` is an operator of the root module's forward.

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
from autoptd.ir.names import layer_of
from autoptd.ir.notes import is_tensor, note, op_name
from autoptd.ir.plan import nearest

SITE = "plan: cut"


class Places:
    """The positions of a backbone, by name.

    `ends`: module -> the position of its last operator; `operators`: (module, operator) -> the positions of its calls.
    """

    def __init__(self, backbone: Sequence[Node]) -> None:
        self.backbone = backbone
        self.ends: dict[str, int] = {}
        self.operators: dict[tuple[str, str], list[int]] = {}
        for i, node in enumerate(backbone):
            path = note(node).module
            parts = path.split(".") if path else []
            for k in range(1, len(parts) + 1):
                self.ends[".".join(parts[:k])] = i
            self.operators.setdefault((path, _label(node)), []).append(i)

    def name(self, position: int) -> str:
        """Name a cut after an operator: by the outermost module in its layer that ends there, or by the operator."""
        path = note(self.backbone[position]).module
        parts, layer = path.split("."), layer_of(path)
        modules = [".".join(parts[:k]) for k in range(len(parts), 0, -1)]
        # From the layer inwards; outside of numbered layers, from the innermost module outwards.
        if layer.rpartition(".")[2].isdigit():
            modules = modules[modules.index(layer) :: -1]
        for module in modules:
            if self.ends.get(module) == position:
                return module
        return self.label(position)

    def label(self, position: int) -> str:
        """Name an operator: `transformer.h.3:add[0]`."""
        path, label = note(self.backbone[position]).module, _label(self.backbone[position])
        return f"{path}:{label}[{self.operators[path, label].index(position)}]"

    def find(self, given: Sequence[int] | Sequence[str], stages: int) -> tuple[int, ...]:
        """Return the last operator of every stage but the last one; PlanError if these cuts cannot be made.

        `given` has the names of the cuts, or the number of layers of every stage.
        """
        names = list(given)
        if names and isinstance(names[0], int):
            names, positions = self._of_counts(names, stages)  # type: ignore[arg-type, assignment]
        else:
            positions = [self._of_name(str(name)) for name in names]
        if len(positions) != stages - 1:
            fact = f"{len(positions)} places cut the model into {len(positions) + 1} stages, p*v is {stages}"
            raise PlanError(SITE, fact, f"{stages - 1} names, or {stages} numbers of layers")
        cuts = list(zip(names, positions, strict=True))
        for (name, position), (next_name, next_position) in pairwise(cuts):
            if position >= next_position:
                fact = f"{next_name} does not come after {name} in the model"
                raise PlanError(
                    SITE, fact, "the places in the order in which the model computes them, each once"
                )
        for name, position in cuts:
            self._check_crossing(str(name), position)
        return tuple(positions)

    def like(self, other: Places, names: Sequence[int] | Sequence[str]) -> tuple[str, ...]:
        """Return the names in this backbone of the cuts that another backbone of the same model calls `names`.

        The two need not have the same operators: a cut stays after the last operator before it that both have. A stage
        without any of these gets the next operator here, which may be a conversion that only this backbone has.
        """
        blocks = SequenceMatcher(None, self._signatures(), other._signatures(), autojunk=False)
        # For every operator of the other backbone that both have, its position here; the order is the same.
        here: dict[int, int] = {}
        for block in blocks.get_matching_blocks():
            for i in range(block.size):
                here[block.b + i] = block.a + i
        labels, last = [], -1
        for name in names:
            cut = other._of_name(str(name))
            before = [position for theirs, position in here.items() if theirs <= cut]
            last = min(max([last + 1, *before]), len(self.backbone) - 1)
            labels.append(self.label(last))
        return tuple(labels)

    def _signatures(self) -> list[tuple[str, str]]:
        return [(note(node).module, _label(node)) for node in self.backbone]

    def _of_name(self, name: str) -> int:
        """Return the position of the last operator of a name."""
        path, colon, rest = name.partition(":")
        if not colon:
            if path not in self.ends:
                fact = f"{name!r} is not a module that computes a value from inputs and parameters"
                raise PlanError(SITE, fact, nearest(path, self.ends))
            return self.ends[path]
        match = re.fullmatch(r"(.+?)(?:\[(\d+)\])?", rest)
        label, number = (match[1], int(match[2] or 0)) if match else ("", 0)
        calls = self.operators.get((path, label), [])
        if number >= len(calls):
            fact = f"{name!r}: {path or 'the root module'} itself calls {label} {len(calls)} times"
            known = [operator for module, operator in self.operators if module == path]
            raise PlanError(SITE, fact, nearest(label, known))
        return calls[number]

    def _of_counts(self, counts: list[int], stages: int) -> tuple[list[str], list[int]]:
        """Return the names and positions of cuts after these numbers of layers; a first stage of 0 layers ends before
        the first layer.
        """
        layers = self._layers()
        run = f"{layers[0]} to {layers[-1]}" if layers else "none"
        if len(counts) != stages or sum(counts) != len(layers):
            fact = f"{counts} are {sum(counts)} layers on {len(counts)} stages"
            remedy = f"{stages} numbers that add up to {len(layers)} layers ({run}), or names of modules"
            raise PlanError(SITE, fact, remedy)
        names, positions = [], []
        layer_of_operators = [layer_of(note(node).module) for node in self.backbone]
        for count in list(accumulate(counts))[:-1]:
            if count:
                name, position = layers[count - 1], self.ends[layers[count - 1]]
            else:
                name, position = f"the start of {layers[0]}", layer_of_operators.index(layers[0]) - 1
            if position < 0:
                fact, remedy = f"nothing comes before {layers[0]}", "at least one layer on the first stage"
                raise PlanError(SITE, fact, remedy)
            names.append(name)
            positions.append(position)
        return names, positions

    def _layers(self) -> list[str]:
        """Return the layers of the longest run (`transformer.h.0`, `transformer.h.1`, ...), by their first operators."""
        runs: dict[str, dict[str, None]] = {}
        for node in self.backbone:
            layer = layer_of(note(node).module)
            prefix, _, number = layer.rpartition(".")
            if number.isdigit():
                runs.setdefault(prefix, {})[layer] = None
        return list(max(runs.values(), key=len, default={}))

    def _check_crossing(self, name: str, position: int) -> None:
        """Raise PlanError if a value that is not a tensor would cross a cut, or nothing is left after it."""
        if position == len(self.backbone) - 1:
            fact = f"{name} is the end of the model: nothing is left for later stages"
            raise PlanError(SITE, fact, "a place before it")
        order = {node: i for i, node in enumerate(self.backbone)}
        for node in self.backbone[: position + 1]:
            last_read = max((order[user] for user in node.users if user in order), default=0)
            if not is_tensor(node) and last_read > position:
                fact = f"{name} ends between {_label(node)} and the readers of its pieces, and a tuple cannot be sent"
                raise PlanError(SITE, fact, f"{self.name(last_read)}, or another place")


def _label(node: Node) -> str:
    if note(node).origin.ends_norm:
        return "batch_norm"
    return note(node).conversion or op_name(node).removeprefix("aten.")
