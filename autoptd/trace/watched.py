"""Call a model and restore it; refuse changes that the call has made, unless they are caches or logs.

In: a model, a loss function and a call. Out: the loss; the model is restored, without fake tensors from tracing.

    watched = Watched(model, loss_fn)
    loss = watched(*args, **kwargs)
    check_changes(watched, args, kwargs)
    # TraceError: layers.0.calls: is changed by the forward (0 before it, 1 after it)

A *cache* is made by the first call and found by the second one, and is the same for every batch: a mask, a table of
sines. A *log* is a number or a list that a call only adds to (`self.calls += 1`, `history.append(n)`), which affects
no later call. Whether a call reads it is found by stand-ins that notice being read.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from autoptd.compat import FakeTensor, tree_leaves, tree_map
from autoptd.errors import AutoptdError
from autoptd.subject.contents import MISSING, PLAIN, with_values
from autoptd.subject.storage import held_by
from autoptd.trace.changed_buffers import AssignedBuffers, KeptBuffers
from autoptd.trace.changes import RANDOM, Change, of_weights
from autoptd.trace.draws import any_mask, given_masks
from autoptd.trace.loss import WithLoss
from autoptd.trace.reads import Reads
from autoptd.trace.users import is_users, is_writing
from autoptd.trace.writes import REGISTERED, NoteCall, Place, Writes


class Watched(WithLoss):
    """Wrap the model and its loss, and restore both after every call; `seen` has the changes of the last one.

    `around` makes a context for the forward alone, from the record of its writes.
    """

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        around: Callable[[Writes], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__(model, loss_fn)
        self.seen, self.around = Seen(), around

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        # Copy the containers: a forward that takes items out of its arguments does not change state.
        args, kwargs = tree_map(lambda leaf: leaf, (args, kwargs))
        writes: Writes | None = None
        try:
            buffers = AssignedBuffers(self.model, self.loss_fn)
            with Writes.recorded(begins=True) as writes, self.around(writes):
                loss = super().forward(*args, **kwargs)
                self.seen.assigned = buffers.take()
                return loss
        finally:
            # Restore after failures too: fake tensors must not stay in the user's model.
            if writes is not None:
                self.seen.changes, self.seen.replaced = (
                    writes.changes(self._names),
                    writes.replaced(self._names),
                )
                self.seen.filled = writes.filled()
                written = {change.path: change.after for change in self.seen.changes}
                written |= dict.fromkeys(self.seen.replaced, "a tensor")
                self.seen.reads = partial(Reads.of, writes.entered, writes.asked, written)
                writes.undo()

    def _names(self) -> dict[int, str]:
        return names_of(self.model, self.loss_fn)


def names_of(model: nn.Module, loss_fn: Any = None) -> dict[int, str]:
    """Return the paths of a model's modules, and of the objects in them, by id."""
    found: dict[int, str] = {}
    roots = [(model, "")] + ([(loss_fn, "loss_fn")] if isinstance(loss_fn, nn.Module) else [])
    for root, prefix in roots:
        for path, module in root.named_modules(prefix=prefix):
            found[id(vars(module))] = path
            for name, value in vars(module).items():
                if isinstance(value, dict):
                    found[id(value)] = path if name in REGISTERED else _join(path, name)
        for path, value in held_by(root):
            if not isinstance(value, PLAIN):
                found.setdefault(id(value), _join(prefix, path))
    if loss_fn is not None:
        found.setdefault(id(loss_fn), "loss_fn")
    return found


def _join(path: str, name: str) -> str:
    return f"{path}.{name}".removeprefix(".")


class Seen:
    """Hold the observations of a call: changes, filled function caches, tensors no longer held as attributes,
    assigned buffers, and readable state.

    All calls share one object.
    """

    def __init__(self) -> None:
        self.changes: list[Change] = []
        self.filled: list[Change] = []
        self.replaced: dict[str, Tensor] = {}
        self.assigned: dict[str, Tensor] = {}
        self.reads: Callable[[], Reads] = Reads


def check_changes(watched: Watched, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuse the changes of the last call, except caches, which the first call makes and the second finds."""
    changes = watched.seen.changes
    if not changes and not watched.seen.filled:
        return
    # Random numbers are never a cache, though a second call may leave the same state by chance.
    drawn = [change for change in changes if change.path in RANDOM]
    try:
        again = drawn or _changes_of_second_call(watched, args, kwargs)
    except (AutoptdError, torch.OutOfMemoryError):
        raise
    except Exception:
        # It ran from its original state: the first call has broken it, such as by using up an iterator.
        raise [*changes, *watched.seen.filled][0].refuse() from None
    if again:
        raise next((change for change in changes if change.path == again[0].path), again[0]).refuse()


def _changes_of_second_call(watched: Watched, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Change]:
    """Call twice without restoring in between; return the changes made by the second call.

    All changes are refused if the first call leaves a value that depends on its batch: a call on the first row
    alone, and one on the last, must return the same as with a fresh model. (At most one of them contains the
    largest entry of the batch.) The same holds for a call with other weights: a value computed once from
    weights is stale in later steps.
    """
    model, loss_fn = watched.model, watched.loss_fn
    twin = watched.twin()
    first = next(model.parameters(), None)
    fake = first.fake_mode if isinstance(first, FakeTensor) else None
    # Fake parameters cannot be combined with a real batch.
    if fake is not None:
        args, kwargs = tree_map(lambda x: fake.from_tensor(x) if _is_real(x) else x, (args, kwargs))
    has_values = first is None or not (first.is_meta or fake)
    names, buffers = partial(names_of, model, loss_fn), AssignedBuffers(model, loss_fn)
    kept = KeptBuffers(model) if has_values else None

    def run(call: Any, note: NoteCall | None = None) -> tuple[Tensor, Writes]:
        call = tree_map(lambda leaf: leaf, call)
        masks = given_masks(any_mask) if has_values else nullcontext()
        with torch.no_grad(), fake or nullcontext(), masks, Writes.recorded(note) as writes:
            written.append(writes)
            loss = twin(*call[0], **call[1])
            # Updates of buffers are in the graph.
            buffers.take()
            if kept is not None:
                kept.put_back()
        return loss, writes

    def run_once() -> None:
        run((args, kwargs), note_reading)
        # This restores the stand-ins, which must not be restored again later.
        written.pop().undo()

    def begin_anew() -> None:
        while written:
            written.pop().undo()

    written: list[Writes] = []
    try:
        _, first_writes = run((args, kwargs))
        made = first_writes.changes(names) + first_writes.filled()
        _, later_writes = run((args, kwargs))
        found = later_writes.changes(names)
        if found and (places := later_writes.logged()) and only_logs(places, run_once):
            warn_of_logs(found)
            found = []
        if found or not has_values:
            return found
        # A cache of values (the largest entry, say) is only right for its batch: try two others.
        for row in (0, -1):
            others = tree_map(
                partial(_one_row, row=row, sizes=_leading_sizes((args, kwargs))), (args, kwargs)
            )
            later, _ = run(others)
            begin_anew()
            if not torch.equal(later.nan_to_num(), run(others)[0].nan_to_num()):
                return made
            begin_anew()
            run((args, kwargs))
        if made:
            with _other_weights(model):
                later, _ = run((args, kwargs))
                begin_anew()
                if not torch.equal(later.nan_to_num(), run((args, kwargs))[0].nan_to_num()):
                    raise of_weights(made).refuse()
        return []
    finally:
        begin_anew()


@contextmanager
def _other_weights(model: nn.Module) -> Iterator[None]:
    """Double the parameters temporarily: halving restores them bitwise."""
    doubled = [p.data for p in model.parameters() if p.is_floating_point() and p.dtype.itemsize > 1]
    # Parameters may share memory, and are doubled more than once.
    doubled = [x for x in doubled if not x.is_inference() and (16 * x).isfinite().all()]
    try:
        for x in doubled:
            x.mul_(2)
        yield
    finally:
        for x in doubled:
            # Ctrl-C may arrive before all are doubled: the version counter of `.data` shows which are.
            if x._version:
                x.mul_(0.5)


def warn_of_logs(logs: list[Change]) -> None:
    """Warn about state that a forward only adds to and never reads."""
    texts = []
    for change in logs:
        # A list has a new entry.
        is_list = change.before == repr(MISSING)
        path = change.path.rpartition("[")[0] if is_list else change.path
        done, remedy = ("added to", "log") if is_list else ("counted", "count")
        text = f"{path} ({change.line}): is {done} by the forward, which no rank does; nothing in the forward reads it"
        texts.append(f"{text}: {remedy} in the training loop")
    for text in dict.fromkeys(texts):
        warnings.warn(text, stacklevel=2)


def _leading_sizes(call: Any) -> list[int]:
    return [
        leaf.shape[0]
        for leaf in tree_leaves(call)
        if isinstance(leaf, Tensor) and leaf.dim() and leaf.shape[0] > 1
    ]


def _one_row(leaf: Any, row: int, sizes: list[int]) -> Any:
    """Cut tensors that are as long as the batch (as most tensors are) to one row."""
    is_batch = (
        isinstance(leaf, Tensor)
        and leaf.dim() > 0
        and leaf.shape[0] == max(sizes, key=sizes.count, default=0)
    )
    return leaf[row].expand_as(leaf).clone() if is_batch else leaf


def _is_real(x: Any) -> bool:
    return isinstance(x, Tensor) and not isinstance(x, FakeTensor)


# Levels of nesting to search in arguments.
ARGUMENT_LEVELS = 8


class Read(Exception):
    """Signal that the value of a stand-in was read."""


class Tally:
    """Return itself for additions; every other operation counts as a read."""

    def __init__(self) -> None:
        self.is_read = False

    def _add(self, other: Any) -> Tally:
        return self

    def _read(self, *args: Any) -> Any:
        self.is_read = True
        raise Read

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # Our own recorder, and nn.Module's attribute assignment, are not reads of the forward.
        if is_writing(sys._getframe(1).f_code):
            return Tally
        return self._read()  # type: ignore[no-any-return]

    __add__ = __radd__ = __iadd__ = __sub__ = __isub__ = _add
    __bool__ = __int__ = __float__ = __complex__ = __index__ = __round__ = __trunc__ = __floor__ = (
        __ceil__
    ) = _read
    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = __hash__ = _read  # type: ignore[assignment]
    __mul__ = __rmul__ = __truediv__ = __rtruediv__ = __floordiv__ = __rfloordiv__ = __mod__ = __rmod__ = (
        _read
    )
    __pow__ = __rpow__ = __rsub__ = __neg__ = __pos__ = __abs__ = __invert__ = __divmod__ = __rdivmod__ = (
        _read
    )
    __and__ = __rand__ = __or__ = __ror__ = __xor__ = __rxor__ = __lshift__ = __rlshift__ = __rshift__ = _read
    __rrshift__ = __matmul__ = __rmatmul__ = __getitem__ = __len__ = __iter__ = __contains__ = __call__ = (
        _read
    )
    __repr__ = __str__ = __format__ = __reduce_ex__ = __reduce__ = __getattr__ = __dir__ = _read  # type: ignore[assignment]


class Log(Tally):
    """Accept additions to a list and drop them."""

    def append(self, value: Any) -> None:
        pass

    def extend(self, values: Any) -> None:
        list(values)

    appendleft, extendleft = append, extend
    __add__ = __radd__ = __sub__ = __rsub__ = __isub__ = Tally._read


# Lets a sequence pattern of a `match` statement read the length, and be noticed.
Sequence.register(Log)  # type: ignore[attr-defined]


def note_reading(function: Any, args: Iterable[Any]) -> None:
    """Count logs passed to a call as read: C code checks for lists in ways that a stand-in cannot see."""
    called = getattr(function, "__func__", function)
    # The user's code is watched separately, and adding is not a read.
    is_seen = isinstance(called, types.FunctionType) and (
        is_users(called.__code__) or is_writing(called.__code__)
    )
    if not is_seen:
        for log in _logs_in(args, 0):
            log.is_read = True


def _logs_in(values: Iterable[Any], depth: int) -> Iterator[Log]:
    for value in values:
        kind = type(value)
        if kind is Log:
            yield value
        elif kind in (list, tuple, dict) and depth < ARGUMENT_LEVELS:
            yield from _logs_in(value.values() if kind is dict else value, depth + 1)


def only_logs(places: Sequence[Place], call: Callable[[], Any]) -> bool:
    """Tell whether a call only adds to the values at these places; restore them afterwards."""
    kept = [(holder, holder.kept()) for holder, _, _ in places]
    # A list with several names gets one stand-in.
    logs = {id(held): Log() for _, _, held in places if held is not None}
    stand_ins = [Tally() if held is None else logs[id(held)] for _, _, held in places]
    try:
        for (holder, entry, _), stand_in in zip(places, stand_ins, strict=True):
            holder.restore(with_values(holder, {entry: stand_in}))
        call()
    # Any error comes from the stand-ins: the call has run with the real values.
    except Exception:
        return False
    finally:
        for holder, content in kept:
            holder.restore(content)
    return not any(vars(stand_in)["is_read"] for stand_in in stand_ins)
