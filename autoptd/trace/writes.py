"""Record writes by the user's Python code: attributes, items, globals, cells, objects changed by C methods.

In: a block in which the model is called. Out: for every object older than the block that has changed, its name,
the line and both values; and a way to restore it. Nothing is searched: the target of an instruction is saved
just before the write, and compared after the block.

    with Writes.recorded(names) as writes:
        model(x)
    writes.changes()      # [Change("layers.0.calls (net.py:41)", "0", "1")]
    writes.undo()         # a trace leaves no fake tensor in the model
"""

from __future__ import annotations

import gc
import inspect
import sys
import types
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from autoptd.ir.scopes import paused_collection
from autoptd.subject.contents import (
    CONTAINERS,
    MISSING,
    Attributes,
    Cell,
    Content,
    Holder,
    Moved,
    Name,
    OfModule,
    Registered,
    base_of,
    is_opaque,
    slots_of,
)
from autoptd.trace.calls import Harmless, Kind, called, handed_to, is_iterator, is_python, operands
from autoptd.trace.changes import Cache, Change, caches_of, differing, is_same, random_states, text_of
from autoptd.trace.instructions import NULL, ValueStack, at, attribute_of, variable_of, watching
from autoptd.trace.users import is_users, line_of

NoteCall = Callable[[Any, list[Any]], None]
NUMBERS = (int, float)
# A holder, the text that names the place in it, and the list there; None for a number.
Place = tuple[Holder, str, Any]
# The dicts of nn.Module that hold attributes that are tensors or modules.
REGISTERED = ("_parameters", "_buffers", "_modules")


@dataclass(frozen=True, slots=True)
class Record:
    """Hold the target of a write, its old content, and the line; `named` is its name there, if known."""

    holder: Holder
    entries: dict[str, Any]
    kept: Any
    line: str
    named: str
    was_tracked: bool


Records = dict[tuple[Any, ...], Record]


class Writes:
    """Record the writes of a block; see the module."""

    def __init__(self, note: NoteCall | None = None) -> None:
        self._records: Records = {}
        self._note = note
        self._drawn: list[str] = []
        self._caches: dict[int, Cache] = {}
        self._caches_of: dict[type, list[Any]] = {}
        self._stack = ValueStack()
        # All code that ran, with its globals, and the attributes that it looked up by string.
        self.entered: list[tuple[types.CodeType, dict[str, Any]]] = []
        self.asked: set[str] = set()
        self._harmless = Harmless()
        self._begins = False
        # Code that runs between these two is not recorded.
        self.pause: Callable[[], Any] = _do_nothing
        self.resume: Callable[[], Any] = _do_nothing

    @classmethod
    @contextmanager
    def recorded(cls, note: NoteCall | None = None, *, begins: bool = False) -> Iterator[Writes]:
        """Record a block; `note` is called with every function that is about to be called, and its arguments.

        With `begins`, function caches of tensors are cleared, so that every call is traced.
        """
        writes, drawn = cls(note), random_states()
        writes._begins = begins
        with paused_collection():
            newcomers = Newcomers()
            try:
                with watching(writes._see, is_users, writes._enter) as watch:
                    writes.pause, writes.resume = watch.pause, watch.resume
                    writes.entered = watch.tables.entered
                    yield writes
            finally:
                writes.pause = writes.resume = _do_nothing
                writes._drawn = [
                    name for name, state in random_states().items() if drawn.get(name, state) != state
                ]
                _drop(writes._records, _is_written)
                # Drop objects that only records keep alive: they ended with the call.
                while _drop(writes._records, Held(writes._records)):
                    pass
                writes._records = newcomers.left_out(writes._records)

    def changes(self, names: Callable[[], dict[int, str]]) -> list[Change]:
        """Return the changes; `names` returns the names of objects by id."""
        found, drawn = [], [Change(name, "", "") for name in self._drawn]
        for record in self._records.values():
            if isinstance(record.holder, Moved):
                found.append((record, ("", MISSING, MISSING)))
            else:
                found += [(record, entry) for entry in differing(record.entries, record.holder.entries())]
        known = names() if found else {}
        return drawn + [_change(record, entry, known) for record, entry in found]

    def logged(self) -> list[Place]:
        """Return the places of all changes if these are numbers and lists that have grown, else nothing."""
        found: list[Place] = []
        for record in self._records.values():
            differs = differing(record.entries, record.holder.entries())
            held = record.holder.holder
            if isinstance(record.holder, Moved) or is_opaque(held):
                return []
            if all(type(one) in NUMBERS and type(other) in NUMBERS for _, one, other in differs):
                found += [(record.holder, entry, None) for entry, _, _ in differs]
            elif type(held) in (list, deque) and is_same(record.kept, list(held)[: len(record.kept)]):
                places = places_of(held)
                if not places:
                    return []
                found += [(holder, entry, held) for holder, entry in places]
            else:
                return []
        return [] if self._drawn else found

    def replaced(self, names: Callable[[], dict[int, str]]) -> dict[str, Tensor]:
        """Return the tensors that are no longer in their place."""
        found = []
        for record in self._records.values():
            now = record.holder.entries()
            for entry, before in record.entries.items():
                if isinstance(before, Tensor) and now.get(entry) is not before:
                    found.append((record, entry, before))
        known = names() if found else {}
        return {_path(record, entry, known): before for record, entry, before in found}

    def filled(self) -> list[Change]:
        """Return the function caches that have new entries."""
        return [cache.change() for cache in self._caches.values() if cache.is_filled()]

    def undo(self) -> None:
        """Restore all contents; function caches only drop tensors, as other entries stay valid."""
        for cache in self._caches.values():
            cache.drop_filled()
        for record in reversed(self._records.values()):
            record.holder.restore(record.kept)

    def _enter(self, frame: types.FrameType) -> None:
        """Record a cache that its wrapped function is about to fill: a property may call it unseen."""
        code = frame.f_code
        if not code.co_argcount:
            return
        kind = type(frame.f_locals.get(code.co_varnames[0]))
        if kind not in self._caches_of:
            self._caches_of[kind] = caches_of(kind)
        for function in self._caches_of[kind]:
            if getattr(inspect.unwrap(function), "__code__", None) is code:
                self._caches.setdefault(id(function), Cache(function, line_of(frame), begun=1))

    def _see(self, frame: types.FrameType, name: str, arg: int, top: int) -> None:
        """Save the target of an instruction."""
        if name == "CALL" and self._note is None and called(arg, top) in self._harmless:
            return
        code = frame.f_code
        if name in CALLS:
            self._see_call(frame, name, arg, top)
        elif name in ("STORE_ATTR", "DELETE_ATTR"):
            self._set_attribute(frame, at(top, 0), code.co_names[arg])
        elif name in ITEMS:
            self._set_item(frame, at(top, ITEMS[name]))
        elif name in ("STORE_GLOBAL", "DELETE_GLOBAL"):
            self._keep(frame, Name(frame.f_globals, code.co_names[arg]))
        elif name in ("STORE_DEREF", "DELETE_DEREF"):
            self._keep(frame, Cell(self._stack.variable(frame, arg), variable_of(code, arg)))
        elif name == "BINARY_OP":
            target = base_of(at(top, 1))
            if isinstance(target, CONTAINERS) or is_opaque(target):
                self._keep(frame, Content(target))
        elif name == "BINARY_SUBSCR":
            owner = at(top, 1)
            # Reading a missing key changes a defaultdict.
            if isinstance(owner, dict) and hasattr(type(owner), "__missing__"):
                self._keep(frame, Content(owner))
        elif name in ("LOAD_ATTR", "LOAD_METHOD"):
            self._set_attribute(frame, at(top, 0), attribute_of(code, name, arg))
        elif is_iterator(at(top, 0)):
            self._keep(frame, Moved(at(top, 0), "is taken from"))

    def _set_attribute(self, frame: types.FrameType, owner: Any, name: str) -> None:
        if name == "__dict__":
            self.asked |= getattr(owner, "__dict__", {}).keys()
        if isinstance(owner, (types.ModuleType, type)):
            if name != "__dict__":
                self._keep(frame, Name(owner, name))
        elif name == "__class__":
            self._keep(frame, Moved(owner, "has its class set"))
        elif isinstance(owner, nn.Module):
            self._keep(frame, OfModule(vars(owner), weakref.ref(owner)), type(owner).__name__)
            for kind in REGISTERED:
                if kind in vars(owner):
                    self._keep(frame, Registered(vars(owner)[kind]), type(owner).__name__)
        elif is_opaque(owner):
            self._keep(frame, Content(base_of(owner)))
        elif _is_of_c(owner, name):
            self._keep(frame, Moved(owner, f"has its {name} set"))
        elif hasattr(owner, "__dict__") or hasattr(type(owner), "__slots__"):
            self._keep(frame, Attributes(owner))
        elif not isinstance(owner, Tensor):
            self._keep(frame, Moved(owner, "has an attribute set"))

    def _set_item(self, frame: types.FrameType, owner: Any) -> None:
        owner = base_of(owner)
        if isinstance(owner, CONTAINERS) or is_opaque(owner):
            self._keep(frame, Content(owner))
        elif not isinstance(owner, (Tensor, types.MappingProxyType)) and not is_python(owner, "__setitem__"):
            self._keep(frame, Moved(owner, "is written to"))

    def _see_call(self, frame: types.FrameType, name: str, arg: int, top: int) -> None:
        function, args = operands(name, arg, top)
        if self._note is not None:
            self._note(function, args)
        if (function is getattr or function is hasattr) and len(args) > 1:
            self.asked.add(str(args[1]))
        for handed in handed_to(function, args):
            if handed.kind is Kind.CACHE:
                cache = self._caches.setdefault(id(handed.value), Cache(handed.value, line_of(frame)))
                if self._begins:
                    cache.drop_tables()
            elif handed.kind is Kind.ATTRIBUTE:
                self._set_attribute(frame, handed.value, handed.how)
            elif handed.kind is Kind.CONTENT:
                self._set_item(frame, handed.value)
            else:
                self._keep(frame, Moved(handed.value, handed.how))

    def _keep(self, frame: types.FrameType, holder: Holder, named: str = "") -> None:
        target = holder.holder
        key = (type(holder), id(target), getattr(holder, "name", ""))
        if key not in self._records and target is not NULL:
            named, tracked = named or _own_name(frame, holder), gc.is_tracked(target)
            self._records[key] = Record(
                holder, holder.entries(), holder.kept(), line_of(frame), named, tracked
            )


CALLS = ("CALL", "CALL_KW", "CALL_FUNCTION_EX")
# Position of the container on the stack.
ITEMS = {"STORE_SUBSCR": 1, "DELETE_SUBSCR": 1, "STORE_SLICE": 2}


class Newcomers:
    """Tell new objects from old ones by their generation, while automatic garbage collection is off."""

    def __init__(self) -> None:
        # Moves existing objects out of generation 0, so that later ones can be recognised.
        gc.collect(0)

    def left_out(self, records: Records) -> Records:
        """Return the records of objects that existed before."""
        hidden = [record for record in records.values() if not record.was_tracked]
        targets = [record.holder.holder for record in hidden]
        new = set(map(id, gc.get_objects(generation=0))) if records else set()
        old = self._old_among(targets, records, new) if targets else set()
        found = {}
        for key, record in records.items():
            target = id(record.holder.holder)
            is_old = target not in new if record.was_tracked else target in old
            if is_old or (isinstance(record.holder, OfModule) and _is_of_old_module(record.holder, new)):
                found[key] = record
        return found

    def _old_among(self, targets: list[Any], records: Records, new: set[int]) -> set[int]:
        """Return the old ones among objects that the collector does not track: old objects refer to them."""
        ours = {id(record.holder) for record in records.values()} | {id(targets)}
        before = {id(value) for record in records.values() for value in record.entries.values()}
        stored = {id(value) for record in records.values() for value in record.holder.entries().values()}
        found, hides, known_by_id = set(), gc.get_freeze_count() > 0, referrers(targets)
        for target in targets:
            known_by = [one for one in known_by_id[id(target)] if id(one) not in ours]
            # Without known referrers it is in an untracked tuple, or referred to by frozen objects.
            is_known = any(id(one) not in new or _is_of_old(one, new) for one in known_by)
            is_old = is_known or hides or not known_by
            if is_old and (id(target) in before or id(target) not in stored):
                found.add(id(target))
        return found


def _is_of_old_module(holder: OfModule, new: set[int]) -> bool:
    # From Python 3.13 on the collector does not report a module as a referrer of its `__dict__`.
    owner = holder.owner()
    return (owner is not None and id(owner) not in new) or _is_of_old(holder.holder, new)


def _is_of_old(names: Any, new: set[int]) -> bool:
    """Tell whether a new dict is the `__dict__` of an older object: Python creates it on first access."""
    if not isinstance(names, dict):
        return False
    owners = [one for one in gc.get_referrers(names) if id(one) not in new]
    return any(getattr(one, "__dict__", None) is names for one in owners)


def _drop(records: Records, keeps: Callable[[Record], bool]) -> bool:
    """Remove the records for which `keeps` is false; tell whether there were any."""
    dropped = [key for key, record in records.items() if not keeps(record)]
    for key in dropped:
        del records[key]
    return bool(dropped)


def _is_written(record: Record) -> bool:
    """Tell whether the content of a record has changed."""
    if isinstance(record.holder, Moved):
        return True
    now, before = record.holder.entries(), record.entries
    return list(now) != list(before) or any(now[name] is not before[name] for name in now)


class Held:
    """Tell whether the object of a record is referenced by anything other than records."""

    def __init__(self, records: Records) -> None:
        self._counts = Counter(id(record.holder.holder) for record in records.values())

    def __call__(self, record: Record) -> bool:
        # `getrefcount` holds one more reference.
        return sys.getrefcount(record.holder.holder) > self._counts[id(record.holder.holder)] + 1


def _change(record: Record, entry: tuple[str, Any, Any], names: dict[int, str]) -> Change:
    suffix, before, after = entry
    if isinstance(record.holder, Moved):
        return Change(_path(record, "", names), "", "", record.line, record.holder.how)
    return Change(_path(record, suffix, names), text_of(before), text_of(after), record.line)


def _path(record: Record, entry: str, names: dict[int, str]) -> str:
    target = record.holder.holder
    if isinstance(record.holder, Name):
        home = target.get("__name__", "") if isinstance(target, dict) else getattr(target, "__qualname__", "")
        return f"{home or getattr(target, '__name__', 'globals')}{entry}"
    path = record.named or getattr(target, "__qualname__", type(target).__name__)
    path = names.get(id(target), path)
    return f"{path}{entry}".removeprefix(".")


def _own_name(frame: types.FrameType, holder: Holder) -> str:
    """Return the name that the code uses for the target of its write, "" for none."""
    code, target = frame.f_code, holder.holder
    if isinstance(holder, Cell):
        return f"{code.co_name}.{holder.name}"
    for name in code.co_names:
        if frame.f_globals.get(name) is target:
            return f"{frame.f_globals.get('__name__', '')}.{name}".removeprefix(".")
    if code.co_freevars:
        return next((name for name in code.co_freevars if frame.f_locals.get(name) is target), "")
    return ""


def _do_nothing() -> None: ...


def _is_of_c(owner: Any, name: str) -> bool:
    """Tell whether an attribute is stored outside of any `__dict__`, such as the defaults of a function."""
    descriptor = getattr(type(owner), name, None)
    return (
        isinstance(descriptor, types.GetSetDescriptorType | types.MemberDescriptorType)
        and name not in ("__dict__", *slots_of(owner))
        and not isinstance(owner, Tensor)
    )


# A record may keep a list of pairs.
MOST_PAIRS = 1


def places_of(value: Any) -> list[tuple[Holder, str]]:
    """Return all places that hold an object, each with a text that names it, except variables of frames and the
    entries of records; nothing if one of them cannot be replaced, such as an entry of a tuple.
    """
    owners = [one for one in gc.get_referrers(value) if not isinstance(one, (Content, types.FrameType))]
    known_by = referrers(containers(owners))
    found: list[tuple[Holder, str]] = []
    for owner in owners:
        holders = known_by.get(id(owner), [])
        if _is_kept(owner, holders):
            continue
        places = _places_in(owner, holders, value)
        if not places:
            return []
        found += places
    return found


def containers(values: list[Any]) -> list[Any]:
    """Return the values that may hold others, in order or by name."""
    return [value for value in values if isinstance(value, (dict, list, tuple))]


def referrers(values: list[Any]) -> dict[int, list[Any]]:
    """Return the referrers of each value, by its id; one walk over all objects finds them all."""
    found: dict[int, list[Any]] = {id(value): [] for value in values}
    for one in gc.get_referrers(*values):
        for key in found.keys() & set(map(id, gc.get_referents(one))):
            found[key].append(one)
    return found


def _places_in(owner: Any, holders: list[Any], value: Any) -> list[tuple[Holder, str]]:
    if isinstance(owner, types.CellType):
        return [(Cell(owner, ""), "")]
    if type(owner) is list:
        return [(Content(owner), f"[{i}]") for i, one in enumerate(owner) if one is value]
    if isinstance(owner, dict):
        # The `__dict__` of a class is read-only: set its names through the class.
        classes = [one for one in holders if isinstance(one, type)]
        names = [key for key, one in dict.items(owner) if one is value]
        if not all(isinstance(name, str) for name in names):
            return []
        return [(Name(classes[0] if classes else owner, name), f".{name}") for name in names]
    # An object may keep its attributes without a dict, in different ways up to and from Python 3.13.
    names = [name for name, one in getattr(owner, "__dict__", {}).items() if one is value]
    return [(Attributes(owner), f".{name}") for name in names]


def _is_kept(owner: Any, holders: list[Any], depth: int = 0) -> bool:
    """Tell whether a record keeps a container: its entries, a pair in its list, its holder's `__dict__`."""
    if type(owner) not in (dict, list, tuple):
        return False
    if any(isinstance(one, Record) or (isinstance(one, Content) and vars(one) is owner) for one in holders):
        return True
    if type(owner) is not tuple or depth == MOST_PAIRS:
        return False
    known_by = referrers(containers(holders))
    return any(_is_kept(one, known_by.get(id(one), []), depth + 1) for one in holders)
