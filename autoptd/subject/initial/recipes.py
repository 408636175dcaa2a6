"""Initial values that every rank makes for itself: it replays what a parameter's constructor did, one at a time.

In: tensors by name, fake ones of a `Recording` and perhaps others with values. Out: a `Source` (sources.py): whole
tensors, or rows of them. A rank holds no more than one whole tensor beside its slices.

    recipes = Recipes({"head.weight": model.head.weight, ...})
    recipes.reader().rows("head.weight", dim=0, rows=rows)

The key of a draw is the recording's seed, the first tensor here that takes the draw, and the draw's number
among that tensor's draws. So all ranks draw the same, and what is added to a model leaves the rest of it as it was.
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
from autoptd.subject.initial.replay import Replay, key_of
from autoptd.subject.initial.tape import Constant, Place, Tape

# Of whole tensors that stay: ranks that are threads ask for the same ones at about the same time.
KEPT_BYTES = 1 << 26


@dataclass(frozen=True)
class Recipe:
    """How a tensor is made: its place on a tape. Without one, `value` has its values."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device
    place: Place | None
    value: Tensor


class Recipes:
    """Tensors by name, which are made when they are asked for. The order of names decides whose a shared draw is."""

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
        """Return the keys of all draws that have one of their own."""
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
        """Make a tensor, which belongs to everybody who asks for it: one thread at a time makes one."""
        with self._lock:
            if name not in self._whole:
                entry = self.entries[name]
                size = math.prod(entry.shape) * entry.dtype.itemsize
                # Before the next one is made: a large one is never held beside another.
                while self._whole and sum(x.nbytes for x in self._whole.values()) + size > KEPT_BYTES:
                    self._whole.popitem(last=False)
                self._whole[name] = self._make([name])[0]
            return self._whole[name]

    def make(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Make tensors all at once: those that share memory on the tape share theirs."""
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
        """Hash what is done to make the tensors, with constants and keys: what was drawn elsewhere hashes differently."""
        return hashlib.sha256(repr(sorted(self.parts().items())).encode()).hexdigest()[:16]

    def parts(self) -> dict[str, str]:
        """Hash each tensor alone."""
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
        fact = f"makes other initial values of {shown or 'its tensors'} than rank 0: its constructor ran otherwise"
        remedy = (
            "draw in the block, with torch; or seed what else draws, alike on all ranks: random.seed(0), "
            "numpy.random.seed(0)"
        )
        return fact, remedy


class RecipeReader:
    """Gives a rank its part of the tensors."""

    def __init__(self, recipes: Recipes) -> None:
        self._recipes = recipes

    def has(self, name: str) -> bool:
        return name in self._recipes.entries

    def whole(self, name: str) -> Tensor:
        """Return a tensor, in memory of its own."""
        return self._recipes.whole(name).clone()

    def rows(self, name: str, dim: int, rows: Tensor) -> Tensor:
        """Return the entries `rows` along `dim`, counted from 1, in this order; a 0 stands for zeros (padding)."""
        whole = self._recipes.whole(name)
        part = whole.index_select(dim, (rows - 1).clamp(min=0).to(whole.device))
        padding = (rows == 0).nonzero().flatten().to(whole.device)
        # Not in place: ranks in one process compare how often a parameter was written to.
        return part.index_fill(dim, padding, 0) if len(padding) else part


class _Prints:
    """Hashes of what tensors of one tape take. Numbers of steps and storages are left out: one more elsewhere
    changes nothing.
    """

    def __init__(self, replay: Replay) -> None:
        self._tape, self._keys = replay.tape, replay.keys
        self._constants: dict[int, str] = {}
        # By step that draws from a stream: of all its draws down to this one.
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
        """Hash all draws of a stream down to one."""
        for step in self._tape.draws_down_to(number, self._chains):
            draw = self._tape.steps[step].draw
            assert draw is not None
            root = digest(self._tape.roots[draw.root]) if draw.before is None else self._chains[draw.before]
            self._chains[step] = _hash([root, self._step(step, {})])
        return self._chains[number]

    def _step(self, number: int, names: dict[int, int]) -> object:
        step = self._tape.steps[number]
        operands = [tree_map(lambda x: self._text(x, names), each) for each in (step.args, dict(step.kwargs))]
        # A function of Python has its address in its repr.
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
        # Ranks may have devices of their own; all is replayed on the CPU.
        return "device" if isinstance(x, torch.device) else repr(x)


def _hash(text: object) -> str:
    return hashlib.sha256(repr(text).encode()).hexdigest()[:16]


def recording_of(x: Tensor) -> Recording | None:
    """Return the recording that a tensor belongs to, if any."""
    mode = x.fake_mode if isinstance(x, FakeTensor) else None
    return mode if isinstance(mode, Recording) else None


__all__ = ["Recipe", "RecipeReader", "Recipes", "recording_of"]
