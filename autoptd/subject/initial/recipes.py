"""Make initial values on each rank, by replaying a parameter's constructor, one parameter at a time.

In: tensors by name, fake ones of a `Recording` and perhaps others with values. Out: a `Source`
(program/sources.py): whole tensors, or rows of them. A rank holds its slices and at most one whole tensor.

    recipes = Recipes({"head.weight": model.head.weight, ...})
    recipes.reader().rows("head.weight", dim=0, rows=rows)

A draw has a key: the seed of the recording, the first tensor here that uses the draw, and the number of the
draw among that tensor's. So all ranks draw the same, and an addition to the model does not change other
tensors.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from autoptd.compat import FakeTensor, tree_map
from autoptd.ir.buffers import digest
from autoptd.subject.initial.recording import Recording
from autoptd.subject.initial.tape import Constant, Place, Replay, Tape, key_of

# Bytes of whole tensors that are kept: ranks that are threads need the same ones at about the same time.
KEPT_BYTES = 1 << 26


@dataclass(frozen=True)
class Recipe:
    """The origin of a tensor: its place on a tape; without one, `value` has its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    place: Place | None
    value: Tensor


class Recipes:
    """Tensors by name, made on demand. A draw that several tensors use belongs to the first of them."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self.entries: dict[str, Recipe] = {}
        self._replay_of: dict[str, Replay] = {}
        replays: dict[Recording, Replay] = {}
        for name, x in tensors.items():
            recording = recording_of(x)
            place = None if recording is None else recording.place_of(x)
            self.entries[name] = Recipe(tuple(x.shape), x.dtype, x.device, place, x.detach())
            if recording is not None:
                self._replay_of[name] = replays.setdefault(recording, Replay(recording.tape, {}))
        for replay in replays.values():
            replay.keys = self._keys(replay)
        self._lock = threading.Lock()
        self._whole: OrderedDict[str, Tensor] = OrderedDict()

    def _keys(self, replay: Replay) -> dict[int, str]:
        """Return the keys of all draws that are not in a stream."""
        tape, keys = replay.tape, dict[int, str]()
        for name, entry in self.entries.items():
            if entry.place is None or self._replay_of[name] is not replay:
                continue
            draws = [number for number in tape.makers([entry.place.storage]) if tape.is_named(number)]
            for count, number in enumerate(draws):
                keys.setdefault(number, key_of(tape.seed, name, count))
        return keys

    def reader(self) -> RecipeReader:
        return RecipeReader(self)

    def whole(self, name: str) -> Tensor:
        """Return a shared tensor; one thread at a time makes one."""
        with self._lock:
            if name not in self._whole:
                entry = self.entries[name]
                size = math.prod(entry.shape) * entry.dtype.itemsize
                # Before the next one is made, so that a large tensor is the only one.
                while self._whole and sum(x.nbytes for x in self._whole.values()) + size > KEPT_BYTES:
                    self._whole.popitem(last=False)
                self._whole[name] = self._make([name])[0]
            return self._whole[name]

    def make(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Make tensors together: those that share memory on the tape share memory."""
        wanted = list(names)
        with self._lock:
            return dict(zip(wanted, self._make(wanted), strict=True))

    def _make(self, names: list[str]) -> list[Tensor]:
        made = {name: self.entries[name].value for name in names}
        for replay in dict.fromkeys(self._replay_of.values()):
            mine = [name for name in names if self._replay_of.get(name) is replay]
            places = [place for name in mine if (place := self.entries[name].place) is not None]
            made |= dict(zip(mine, replay.make(places), strict=True))
        return list(made.values())

    def fingerprint(self) -> str:
        """Hash the steps that make the tensors, with constants and keys: values drawn elsewhere change the
        hash.
        """
        return hashlib.sha256(repr(sorted(self.parts().items())).encode()).hexdigest()[:16]

    def parts(self) -> dict[str, str]:
        """Hash each tensor separately."""
        prints: dict[Tape, _Prints] = {}
        found = {}
        for name, entry in self.entries.items():
            if entry.place is None:
                found[name] = digest(entry.value)
                continue
            replay = self._replay_of[name]
            known = prints.setdefault(replay.tape, _Prints(replay))
            found[name] = known.of(entry.place)
        return found

    def difference(self, names: list[str]) -> tuple[str, str]:
        """Return (fact, remedy) for a rank that makes other values of these tensors."""
        shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if names[3:] else "")
        fact = f"makes other initial values of {shown or 'its tensors'} than rank 0: its constructor ran differently"
        remedy = (
            "draw in the block, with torch; or seed other generators equally on all ranks: random.seed(0), "
            "numpy.random.seed(0)"
        )
        return fact, remedy


class RecipeReader:
    """Reads a rank's part of the tensors."""

    def __init__(self, recipes: Recipes) -> None:
        self._recipes = recipes

    def has(self, name: str) -> bool:
        return name in self._recipes.entries

    def whole(self, name: str) -> Tensor:
        """Return a tensor in separate memory."""
        return self._recipes.whole(name).clone()

    def rows(self, name: str, dim: int, rows: Tensor) -> Tensor:
        """Return the entries `rows` along `dim`, counted from 1, in this order; a 0 stands for zeros
        (padding).
        """
        whole = self._recipes.whole(name)
        part = whole.index_select(dim, (rows - 1).clamp(min=0).to(whole.device))
        padding = (rows == 0).nonzero().flatten().to(whole.device)
        # Not in place, since ranks in one process compare how often a parameter was written to.
        return part.index_fill(dim, padding, 0) if len(padding) else part


class _Prints:
    """Hashes of the steps that tensors of one tape need, without the numbers of steps and storages, which
    depend on others.
    """

    def __init__(self, replay: Replay) -> None:
        self._tape, self._keys = replay.tape, replay.keys
        self._constants: dict[int, str] = {}
        # By step that draws from a stream: the hash of all draws up to this one.
        self._chains: dict[int, str] = {}

    def of(self, place: Place) -> str:
        text: list[object] = [self._tape.seed, self._tape.order]
        names: dict[int, int] = {}
        for number in self._tape.makers([place.storage]):
            text += [self._step(number, names), self._draw(number)]
        text.append(self._text(place, names))
        return _hash(text)

    def _draw(self, number: int) -> object:
        tape = self._tape
        if tape.steps[number].draw is None:
            return None
        if tape.is_named(number):
            return self._keys.get(number), tape.asked.get(number)
        return self._chain(number)

    def _chain(self, number: int) -> str:
        """Hash all draws of a stream up to this one."""
        for step in self._tape.draws_down_to(number, self._chains):
            draw = self._tape.steps[step].draw
            assert draw is not None
            root = digest(self._tape.roots[draw.root]) if draw.before is None else self._chains[draw.before]
            self._chains[step] = _hash([root, self._step(step, {})])
        return self._chains[number]

    def _step(self, number: int, names: dict[int, int]) -> object:
        step = self._tape.steps[number]
        operands = [tree_map(lambda x: self._text(x, names), each) for each in (step.args, dict(step.kwargs))]
        # The repr of a Python function has its address.
        function = (
            getattr(step.function, "__name__", "") if not hasattr(step.function, "_schema") else step.function
        )
        return str(function), operands, [self._text(place, names) for place in step.results], step.default

    def _text(self, x: object, names: dict[int, int]) -> object:
        if isinstance(x, Place):
            number = names.setdefault(x.storage, len(names))
            return number, x.dtype, x.size, x.stride, x.offset, x.is_conj, x.is_neg
        if isinstance(x, Constant):
            known = self._constants.get(id(x))
            if known is None:
                known = self._constants[id(x)] = digest(x.value)
            return known
        # Ranks may have different devices; everything is replayed on the CPU.
        return "device" if isinstance(x, torch.device) else repr(x)


def _hash(text: object) -> str:
    return hashlib.sha256(repr(text).encode()).hexdigest()[:16]


def recording_of(x: Tensor) -> Recording | None:
    """Return the recording that a tensor belongs to, if any."""
    mode = x.fake_mode if isinstance(x, FakeTensor) else None
    return mode if isinstance(mode, Recording) else None
