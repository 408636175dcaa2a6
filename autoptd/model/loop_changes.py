"""Notice what a loop changes of the model from outside, which compiled programs do not follow: a schedule
that it sets.

In: the user's model, and the programs that were compiled of it. Out: one RuntimeFault that names what has
changed, both values, and where the forward computes otherwise. Values that a forward can read are compared
(`trace/reads.py`); only where one differs the model is traced again, and only where its trace differs as
well, and does not with that value put back, is it a fault.

    changes = LoopChanges(remade, loss_fn)
    changes.follow(program, modes)          # right after it is compiled
    changes.check([program], site="step 31", buffers={})
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from autoptd.errors import RuntimeFault
from autoptd.model.loop_watch import is_rounded
from autoptd.program.program import Program
from autoptd.trace import (
    Difference,
    LossAndOutputs,
    Snapshot,
    Stamp,
    Traced,
    evaluating,
    has_values,
    in_modes,
)

FIRST_STEPS = (2, 31, 101)
# What changes at every step without an effect is traced again for so much of the time that has passed.
SHARE_OF_TIME = 0.002
MOST_TRIED = 8
REMEDY = (
    "pass what a schedule sets as a tensor among the inputs of forward; set what stays before parallelize, "
    "or call parallelize again"
)


def is_due(step: int, every: int) -> bool:
    """Tell whether the model is looked at before step number `step`; `every` 0 never does."""
    return every > 0 and (step in FIRST_STEPS or step % every == 0)


class LoopChanges:
    """The state of the model at each compilation; `given` is the user's model, `remade` makes the one that is
    traced.
    """

    def __init__(self, given: nn.Module, remade: Callable[[], nn.Module], loss_fn: Any) -> None:
        self._given, self._remade, self._loss_fn = given, remade, loss_fn
        self._watched: weakref.WeakKeyDictionary[Traced, Watched] = weakref.WeakKeyDictionary()
        self._first: dict[str, Stamp] | None = None

    def follow(self, program: Program, *, evaluates: bool = False) -> Program:
        """Keep the model's state at the compilation of a program; return the program."""
        if program.traced is not None and program.traced not in self._watched:
            if self._first is None:
                self._first = {name: Stamp.of(x) for name, x in self._given.named_buffers()}
            # A function of an evaluation's outputs is looked at as well.
            of_program = program.traced.loss_fn
            loss_fn = of_program if isinstance(of_program, LossAndOutputs) else self._loss_fn
            snapshot = Snapshot(self._given, loss_fn, program.traced.reads)
            modes = program.traced.modes
            # Where eval mode only removes dropouts, evaluations are traced in training's modes.
            evaluates = evaluates and not any(modes.values())
            self._watched[program.traced] = Watched(
                self._given, self._remade, snapshot, self._first, modes, evaluates
            )
        return program

    def check(self, programs: Iterable[Program], site: str, buffers: Mapping[str, torch.Tensor]) -> None:
        """Raise RuntimeFault where the model is no longer what one of the programs computes; `buffers` are
        the ranks'.
        """
        for traced in dict.fromkeys(program.traced for program in programs):
            # A program that was written by hand, or loaded, has none.
            if traced is not None and (watched := self._watched.get(traced)) is not None:
                watched.check(traced, site, buffers)


class Watched:
    """The model of one program."""

    def __init__(
        self,
        given: nn.Module,
        remade: Callable[[], nn.Module],
        snapshot: Snapshot,
        first: Mapping[str, Stamp],
        modes: Mapping[str, bool],
        evaluates: bool,
    ) -> None:
        # What buffers held when the first program was compiled: later ones are compiled with those of the
        # ranks.
        self._first = first
        self._given, self._remade, self._snapshot, self._evaluates = given, remade, snapshot, evaluates
        self._modes = modes
        self._sorts = sorts_of(given)
        # What had no effect: its values, and until when it is not tried again.
        self._harmless: dict[str, Any] = {}
        self._rest_until = 0.0
        # Those of the ranks.
        self._buffers: Mapping[str, torch.Tensor] = {}

    def check(self, traced: Traced, site: str, buffers: Mapping[str, torch.Tensor]) -> None:
        """Raise RuntimeFault where the forward of `traced` has become another one."""
        self._buffers = buffers
        found = self._changes(traced)
        caches = [one for one in found if self._is_cache(one, traced)]
        changes = [one for one in found if one not in caches]
        if not changes or self._rests(changes):
            return
        start = time.monotonic()
        with put_back(caches):
            # Writes to a tensor are not undone.
            culprits = [one for one in changes if traced.has(one.path) and not one.is_replaced]
            where = f"what reads {culprits[0].path}" if culprits else self._differs(traced)
            is_unknown = bool(where) and not culprits and self._differs_without(traced, changes)
            if is_unknown:
                culprits = [one for one in changes if one.is_tensor and not one.is_replaced]
            elif where and not culprits:
                culprits = self._culprits(traced, changes)
        if culprits:
            raise _fault(culprits, where, site)
        if is_unknown:
            text = f"changed since the model was compiled ({_values(changes[0])}), and its trace differs for other reasons"
            warnings.warn(
                f"{changes[0].path}: {text}: whether the forward reads it is not known", stacklevel=5
            )
        self._harmless |= {one.path: one.after for one in changes}
        end = time.monotonic()
        self._rest_until = end + (end - start) / SHARE_OF_TIME

    def _changes(self, traced: Traced) -> list[Difference]:
        return [one for one in self._snapshot.changes() if not self._is_followed(one, traced)]

    def _is_followed(self, change: Difference, traced: Traced) -> bool:
        """Tell whether a change is none of the loop's: of modes, of what the ranks have as well."""
        if change.path.rpartition(".")[2] == "training":
            # A model that is in eval mode as a whole is being evaluated; ranks train in the modes at
            # compilation.
            return self._evaluates or self._given.training != self._modes[""]
        own = dict(self._given.named_buffers()).get(change.path)
        if own is None:
            return False
        # Of a model that was moved to meta nothing is left.
        if own.is_meta or self._first.get(change.path) == Stamp.of(own):
            return True
        ranks = self._buffers.get(change.path)
        if ranks is not None and is_rounded(ranks.to(own.device), own):
            return True
        return change.path in traced.updated or not traced.has(change.path)

    def _is_cache(self, change: Difference, traced: Traced) -> bool:
        """Tell whether the forward itself has made the current value."""
        made = traced.reads.written.get(change.path)
        return made is not None and (made == change.texts[1] or not has_values(self._given))

    def _rests(self, changes: list[Difference]) -> bool:
        """Tell whether all that changed is known to have no effect, as far as is worth its time."""
        if any(one.path not in self._harmless for one in changes):
            return False
        is_new = any(repr(self._harmless[one.path]) != repr(one.after) for one in changes)
        return not is_new or time.monotonic() < self._rest_until

    def _differs(self, traced: Traced) -> str:
        # A model that was moved or cast since then is traced with its old dtypes and devices: a trace has no
        # values.
        with sorted_as(self._given, self._sorts, without_values):
            model = self._remade()
            with self._in_modes(model):
                where = traced.differs(model)
        # A trace does not have the values of buffers.
        read = [one.path for one in self._changes(traced) if traced.has(one.path)]
        return where or (f"what reads {read[0]}" if read else "")

    def _in_modes(self, model: nn.Module) -> AbstractContextManager[None]:
        if self._evaluates:
            return evaluating(model)
        if self._given.training == self._modes[""]:
            return nullcontext()
        return in_modes({module: self._modes[path] for path, module in model.named_modules()})

    def _differs_without(self, traced: Traced, changes: list[Difference]) -> bool:
        with put_back(changes):
            return bool(self._differs(traced))

    def _culprits(self, traced: Traced, changes: list[Difference]) -> list[Difference]:
        """Return the changes with which the forward computes something else."""
        places = list(dict.fromkeys(id(one.place) for one in changes))
        found = []
        for place in places[:MOST_TRIED] if len(places) > 1 else []:
            if self._differs_without(traced, [one for one in changes if id(one.place) != place]):
                found += [one for one in changes if id(one.place) == place]
        culprits = found or changes
        # Tables that are filled on demand, and switches such as use_cache, give the same numbers by other
        # operators.
        is_late = any(one.is_number and one.path not in traced.reads.written for one in culprits)
        if is_late or not has_values(self._given):
            return culprits
        with self._in_modes(self._given), sorted_as(self._given, self._sorts, cast_back):
            return [] if traced.is_same(self._given, partial(put_back, changes)) else culprits


@contextmanager
def put_back(changes: list[Difference]) -> Iterator[None]:
    """Give what changed, for a while, the content that it had."""
    places = list({id(one.place): one.place for one in changes}.values())
    now = [place.holder.kept() for place in places]
    try:
        for place in places:
            place.holder.restore(place.kept)
        yield
    finally:
        for place, kept in zip(places, now, strict=True):
            place.holder.restore(kept)


def _values(change: Difference) -> str:
    before, after = change.texts
    return f"{before} then, {after} now"


def _fault(culprits: list[Difference], where: str, site: str) -> RuntimeFault:
    named = "; ".join(f"{one.path} ({_values(one)})" for one in culprits[:MOST_TRIED])
    fact = f"changed since the model was compiled: {named}; the ranks do not follow it, and the forward would differ at {where}"
    return RuntimeFault(site, fact, REMEDY)


class Sort(NamedTuple):
    """What a trace reads of a parameter or a buffer."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, x: Tensor) -> Sort:
        return cls(x.shape, x.dtype, x.device)


def sorts_of(model: nn.Module) -> dict[str, Sort]:
    """Return the sorts of all parameters and buffers."""
    return {name: Sort.of(x) for name, _, _, x in _registered(model)}


@contextmanager
def sorted_as(
    model: nn.Module, sorts: Mapping[str, Sort], make: Callable[[Tensor, Sort], Tensor]
) -> Iterator[None]:
    """Replace, for a while, tensors that had another dtype or device by what `make` returns."""
    before, made = [], dict[int, Tensor]()
    for name, home, key, x in _registered(model):
        then = sorts.get(name)
        if then is not None and then != Sort.of(x) and then.shape == x.shape:
            if id(x) not in made:
                value = make(x.detach(), then)
                is_parameter = isinstance(x, nn.Parameter)
                made[id(x)] = nn.Parameter(value, x.requires_grad) if is_parameter else value
            before.append((home, key, x))
            home[key] = made[id(x)]
    try:
        yield
    finally:
        for home, key, x in before:
            home[key] = x


def without_values(x: Tensor, then: Sort) -> Tensor:
    """Return a tensor of a sort that takes no memory."""
    return torch.zeros((), dtype=then.dtype, device=then.device).expand(then.shape)


def cast_back(x: Tensor, then: Sort) -> Tensor:
    """Return a tensor in the dtype that it had, where it is now."""
    return x.to(then.dtype)


def _registered(model: nn.Module) -> Iterator[tuple[str, dict[str, Tensor | None], str, Tensor]]:
    """Yield the name of each parameter and buffer, also of one that has several; where it is registered, and
    as what.
    """
    for path, module in model.named_modules():
        for home in (module._parameters, module._buffers):
            for key, x in list(home.items()):
                if x is not None:
                    yield f"{path}.{key}".removeprefix("."), home, key, x  # type: ignore[misc]
