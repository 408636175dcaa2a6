"""What Python code writes to is seen as it happens, whatever holds it and however deep; what a call makes for itself is not."""

from __future__ import annotations

import array
import collections
import contextvars
import copy
import csv
import ctypes
import datetime
import email.message
import enum
import functools
import gc
import heapq
import io
import itertools
import json
import operator
import os
import queue
import random
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autoptd.errors import TraceError
from autoptd.trace.watched import Watched, check_changes
from autoptd.trace.writes import Writes

COUNTS: dict[str, Any] = {"n": 0}
DEEP: Any = [[[[[[[{"n": 0}]]]]]]]
LONG, WORDS, TEXT = [0] * 5000, bytearray(8), io.StringIO()
BOX, PACKED = np.zeros(4), array.array("l", [0])
NUMBERS = random.Random(0)
VARIABLE: contextvars.ContextVar[int] = contextvars.ContextVar("calls", default=0)
LOCAL = threading.local()
STEPS = 0


class Key:
    """Hashed by its place, and known by a weak reference."""


KEY = Key()
WEAK: weakref.WeakKeyDictionary[Key, int] = weakref.WeakKeyDictionary()


class Structure(ctypes.Structure):
    _fields_ = (("calls", ctypes.c_int),)


class Days(datetime.timedelta):
    """Has attributes, and a value that is none of them."""


class Colour(enum.Enum):
    RED = 1


class Helper:
    """Counts in all the places that an object has."""

    calls = 0
    registry: ClassVar[dict[str, int]] = {}
    __slots__ = ("__dict__", "slot")

    def __init__(self) -> None:
        self.slot, self.own, self.inner = 0, 0, types.SimpleNamespace(a=types.SimpleNamespace(b={"n": 0}))

    def in_its_class(self) -> None:
        Helper.calls += 1

    def in_a_dict_of_its_class(self) -> None:
        self.registry["calls"] = self.registry.get("calls", 0) + 1

    @classmethod
    def by_its_class(cls) -> None:
        cls.calls += 1

    @property
    def counted(self) -> int:
        self.own += 1
        return self.own

    def __getitem__(self, key: str) -> int:
        self.own += 1
        return self.own

    def __iadd__(self, other: int) -> Helper:
        self.own += other
        return self

    def __contains__(self, key: str) -> bool:
        self.own += 1
        return False

    def __enter__(self) -> None:
        self.own += 1

    def __exit__(self, *_: object) -> None:
        pass

    def __iter__(self) -> Iterator[int]:
        self.own += 1
        return iter(())

    def __next__(self) -> int:
        self.own += 1
        return self.own

    def __call__(self) -> None:
        COUNTS["n"] += 1


HELPER = Helper()


def in_a_global() -> None:
    global STEPS
    STEPS += 1


def five(depth: int = 9) -> None:
    COUNTS["n"] += 1 if not depth else 0
    if depth:
        five(depth - 1)


def in_a_default(calls: list[int] = [0]) -> None:  # noqa: B006
    calls[0] += 1


def three_deep() -> None:
    (lambda: (lambda: in_a_default())())()


def in_a_keyword_default(*, calls: Any = np.zeros(1)) -> None:  # noqa: B008
    calls += 1


def in_a_cell() -> Callable[[], None]:
    calls = 0

    def count() -> None:
        nonlocal calls
        calls += 1

    return count


def of_a_generator() -> Callable[[], Any]:
    return (n for n in itertools.count()).__next__


def for_of(numbers: Iterator[Any]) -> None:
    for _ in numbers:
        break


def in_place(held: Any, added: Any) -> None:
    held += added


def by_a_view() -> None:
    part = BOX[1:3]
    part[0] += 1


def by_memory() -> None:
    memoryview(WORDS)[0] += 1


def in_an_attribute_of_a_function() -> None:
    in_an_attribute_of_a_function.calls = 1  # type: ignore[attr-defined]


def by_its_dict() -> None:
    HELPER.__dict__["own"] += 1


def of_the_environment() -> None:
    os.environ["AUTOPTD_TEST_CALLS"] = os.environ.get("AUTOPTD_TEST_CALLS", "") + "1"


def in_a_file() -> None:
    with open(os.path.join("/tmp", f"autoptd_calls_{os.getpid()}"), "a"):
        pass


def of_a_named_global() -> None:
    globals()["STEPS"] = STEPS + 1


def by_unpacking(numbers: Iterator[int]) -> None:
    _first, _second = numbers


def in_a_local() -> None:
    LOCAL.calls = getattr(LOCAL, "calls", 0) + 1


def in_a_parameter() -> None:
    WEIGHT.calls = getattr(WEIGHT, "calls", 0) + 1  # type: ignore[attr-defined]


def taken_away() -> None:
    del COUNTS["n"]


def in_its_kind() -> None:
    KEY.__class__ = type("OtherKey", (Key,), {})  # type: ignore[assignment]


def in_its_defaults() -> None:
    in_a_default.__defaults__ = ([1],)


def in_shared_bytes() -> None:
    ctypes.c_uint8.from_buffer(WORDS).value += 1


def thread_of(call: Callable[[], None]) -> None:
    thread = threading.Thread(target=call)
    thread.start()
    thread.join()


class Cached:
    """Makes a value once."""

    @functools.cached_property
    def value(self) -> list[int]:
        return [1]


@functools.cache
def cached(n: int) -> int:
    return n


WEIGHT = nn.Parameter(torch.ones(2))
OVER_A_TENSOR = torch.zeros(2).numpy()
QUEUE: queue.SimpleQueue[int] = queue.SimpleQueue()
HIDDEN = [nn.ReLU()]
DEFAULTS: collections.defaultdict[str, list[int]] = collections.defaultdict(list)
ORDER = collections.OrderedDict.fromkeys("ab")
CALLS: collections.Counter[str] = collections.Counter()
ROW = collections.deque([0, 1])
CHAIN = collections.ChainMap({"n": 0})
DRAWN = np.random.default_rng(0)

WRITES: dict[str, Callable[[], Any]] = {
    # Those that the reachable values did not show.
    "a class of a helper": HELPER.in_its_class,
    "a dict of a class": HELPER.in_a_dict_of_its_class,
    "a class method": HELPER.by_its_class,
    "a global, in a method of an object": HELPER,
    "a chain of calls": five,
    "a default, three calls deep": three_deep,
    "a keyword's default": in_a_keyword_default,
    "numpy, an item": lambda: BOX.__setitem__(0, 1.0 + BOX[0]),
    "numpy, in place": lambda: in_place(BOX, 1),
    "numpy, a view": by_a_view,
    "numpy, out=": lambda: np.add(BOX, 1, out=BOX),
    "numpy over a tensor": lambda: in_place(OVER_A_TENSOR, 1),
    "numpy, a method": lambda: BOX.fill(BOX[0] + 1),
    "numpy, an attribute": lambda: BOX.flat.__setitem__(0, BOX[0] + 1),
    "numpy, at": lambda: np.add.at(BOX, 0, 1),
    "an array": lambda: PACKED.append(1),
    "an array's item": lambda: operator.setitem(PACKED, 0, PACKED[0] + 1),
    "bytes": lambda: WORDS.extend(b"1"),
    "bytes, by a view": by_memory,
    "an iterator of a list": functools.partial(next, iter([1] * 400)),
    "an iterator of a range": functools.partial(next, iter(range(400))),
    "itertools.cycle": functools.partial(next, itertools.cycle([1])),
    "itertools.chain": functools.partial(next, itertools.chain([1] * 400)),
    "map": functools.partial(next, map(int, [1] * 400)),
    "a method of an iterator": iter([1] * 400).__next__,
    "a generator": of_a_generator(),
    "enumerate, in a loop": functools.partial(for_of, enumerate([1] * 400)),
    "an iterator, by islice": functools.partial(lambda it: list(itertools.islice(it, 1)), iter([1] * 400)),
    "an iterator, by zip": functools.partial(lambda it: list(zip(it, [1], strict=False)), iter([1] * 400)),
    "an iterator, unpacked": functools.partial(by_unpacking, iter([1, 2])),
    "an iterator, in": functools.partial(lambda it: 1 in it, iter([1] * 400)),
    "an iterator, starred": functools.partial(lambda it: [*it], iter([1, 2])),
    "a module in a list": lambda: setattr(HIDDEN[0], "calls", 1),
    "containers, eight deep": lambda: DEEP[0][0][0][0][0][0][0].update(n=DEEP[0][0][0][0][0][0][0]["n"] + 1),
    "objects, deep": lambda: HELPER.inner.a.b.__setitem__("n", HELPER.inner.a.b["n"] + 1),
    "a long list": lambda: operator.setitem(LONG, 4999, LONG[4999] + 1),
    "a queue": lambda: QUEUE.put(1),
    "the environment": of_the_environment,
    "a file": in_a_file,
    # Others.
    "a global": in_a_global,
    "a global, by its name": of_a_named_global,
    "a cell": in_a_cell(),
    "an attribute of a function": in_an_attribute_of_a_function,
    "an attribute by its dict": by_its_dict,
    "an attribute by vars": lambda: vars(HELPER).update(own=HELPER.own + 1),
    "an attribute by setattr": lambda: setattr(HELPER, "own", HELPER.own + 1),
    "an attribute by object": lambda: object.__setattr__(HELPER, "own", HELPER.own + 1),
    "a slot": lambda: setattr(HELPER, "slot", HELPER.slot + 1),
    "a property": lambda: HELPER.counted,
    "a subscript": lambda: HELPER["x"],
    "an operator": lambda: in_place(HELPER, 1),
    "a membership": lambda: "x" in HELPER,
    "a context": lambda: HELPER.__enter__(),
    "a loop's begin": lambda: list(HELPER),
    "a user's iterator": lambda: next(HELPER),
    "a defaultdict that is read": lambda: DEFAULTS[str(len(DEFAULTS))],
    "the order of a dict": lambda: ORDER.move_to_end(next(iter(ORDER))),
    "a Counter": lambda: CALLS.update("a"),
    "a deque": lambda: ROW.rotate(1),
    "a ChainMap": lambda: CHAIN.update(n=CHAIN["n"] + 1),
    "a heap": lambda: heapq.heappush(LONG, -len(LONG)),
    "a method kept": functools.partial(LONG.append, 1),
    "a methodcaller": lambda: operator.methodcaller("append", 1)(LONG),
    "map over a method": lambda: list(map(LONG.append, [1])),
    "sorted in place": lambda: (LONG.insert(0, 7 + len(LONG)), LONG.sort(reverse=len(LONG) % 2 == 0)),
    "text": lambda: TEXT.write("x"),
    "random numbers of one's own": NUMBERS.random,
    "random numbers shuffled": lambda: NUMBERS.shuffle([1, 2]),
    "random numbers of numpy": lambda: DRAWN.random(),
    "a context variable": lambda: VARIABLE.set(VARIABLE.get() + 1),
    "of this thread": in_a_local,
    "a weak dict": lambda: WEAK.__setitem__(KEY, WEAK.get(KEY, 0) + 1),
    "a parameter's attribute": in_a_parameter,
    "a structure of C": lambda: setattr(STRUCTURE, "calls", STRUCTURE.calls + 1),
    "an array of C": lambda: operator.setitem(NUMBERS_OF_C, 0, NUMBERS_OF_C[0] + 1),
    "an enumeration": lambda: setattr(Colour.RED, "calls", getattr(Colour.RED, "calls", 0) + 1),
    "a set, in place": lambda: operator.ior(SEEN, {len(SEEN)}),
    "taken away": taken_away,
    # Objects that their attributes do not tell apart.
    "an error's arguments": lambda: LAST.__setitem__(0, ValueError(len(LAST[0].args[:1]), LAST[0])),
    "a date of one's own class": lambda: DAYS.__setitem__(0, Days(DAYS[0].days + 1)),
    # What functions of C and of Python's library write to.
    "printed to a text": lambda: print("x", file=TEXT),
    "printed to bytes": lambda: print("x", file=ENCODED),
    "printed by a library": lambda: json.dump([1], TEXT),
    "written as rows": lambda: csv.DictWriter(TEXT, ["a"]).writerow({"a": 1}),
    "a class, by type": lambda: type.__setattr__(Helper, "calls", Helper.calls + 1),
    "a slot, by its descriptor": lambda: Helper.slot.__set__(HELPER, HELPER.slot + 1),  # type: ignore[attr-defined]
    "an attribute by getattr": lambda: getattr(HELPER, "__dict__").update(own=HELPER.own + 1),  # noqa: B009
    "a class of an object": in_its_kind,
    "the defaults of a function": in_its_defaults,
    "a value that a pointer is of": lambda: operator.setitem(POINTER, 0, POINTER[0] + 1),
    "bytes, by a value of C": in_shared_bytes,
    "by exec": lambda: exec("COUNTS['n'] += 1", globals()),
    "a thread": lambda: thread_of(five),
    "an event": lambda: EVENT.clear() if EVENT.is_set() else EVENT.set(),
    "a message": lambda: MESSAGE.__setitem__("a", "b"),
    "a cached property": lambda: Cached().value and CACHED.value,
    "a cache's size": lambda: cached.cache_info().currsize + cached(1),
    "a seed of torch": lambda: torch.manual_seed(0),
    "a generator's seed": lambda: torch.default_generator.manual_seed(0),
}
LAST, DAYS = [ValueError()], [Days(0)]
STRUCTURE, NUMBERS_OF_C, SEEN = Structure(), (ctypes.c_int * 2)(), set[int]()
POINTER, ENCODED = ctypes.pointer(ctypes.c_int(0)), io.TextIOWrapper(io.BytesIO())
EVENT, MESSAGE, CACHED = threading.Event(), email.message.Message(), Cached()


@pytest.fixture(autouse=True)
def counted() -> None:
    COUNTS["n"] = 0


def called(write: Callable[[], Any]) -> None:
    """Call as a model would: a frame that runs already is not looked at."""
    write()


@pytest.mark.parametrize("kind", WRITES)
def test_a_write_is_seen(kind: str) -> None:
    with Writes.recorded() as writes:
        called(WRITES[kind])
    found = writes.changes(dict)
    assert found and all(change.refuse() for change in found)
    assert any(change.line.rpartition(":")[2].isdigit() for change in found)


@pytest.mark.parametrize("kind", ["a context variable", "an array of C"])
def test_a_write_is_seen_of_what_was_frozen(kind: str) -> None:
    gc.freeze()
    try:
        test_a_write_is_seen(kind)
    finally:
        gc.unfreeze()


def test_python_looks_for_garbage_between_blocks() -> None:
    """A block that put it off for what is there would keep every compiled model until the process ends."""
    ring: Any = Key()
    ring.itself = ring
    is_alive, full = weakref.ref(ring), gc.get_count()[2]
    del ring
    with Writes.recorded():
        assert is_alive() is None and not gc.isenabled()
    assert gc.isenabled() and gc.get_count()[2] >= full


def local_containers() -> None:
    held: dict[str, Any] = {}
    held["a"] = [1]
    held["a"].append(2)
    made = Helper()
    made.own += 1
    made.inner.a.b["n"] = 2
    numbers = iter([1, 2])
    next(numbers)
    array = np.zeros(2)
    array += 1


def local_cycle() -> None:
    memo: dict[int, int] = {}
    held = Helper()
    held.own = held  # type: ignore[assignment]

    def factorial(n: int) -> int:
        memo[n] = n * factorial(n - 1) if n else 1
        return memo[n]

    factorial(4)


def a_switch_put_back() -> None:
    kept, HELPER.own = HELPER.own, 77
    HELPER.own = kept
    LONG.append(1)
    LONG.pop()


def an_import() -> None:
    import colorsys  # noqa: F401


def only_read() -> None:
    assert COUNTS.get("n") == 0 and len(LONG) and sum(LONG) is not None and BOX.sum() is not None
    assert [*LONG] and dict(COUNTS) and sorted(LONG) and isinstance(iter(LONG), object)
    assert DEFAULTS.get("x") is None and str(COUNTS) and TEXT.getvalue() is not None
    assert cached(1) == 1 and CACHED_BEFORE.value == [1] and json.dumps([1]) and copy.copy(LONG)
    print(end="", file=sys.stderr)
    assert sys.stderr.write("") == 0 and random.Random(0).random() and random.SystemRandom().random() < 1


def a_constant_iterator() -> None:
    next(ONES)


ONES, CACHED_BEFORE = itertools.repeat(1), Cached()
assert CACHED_BEFORE.value


@pytest.mark.parametrize(
    "call", [local_containers, local_cycle, a_switch_put_back, an_import, only_read, a_constant_iterator]
)
def test_what_is_no_state(call: Callable[[], None]) -> None:
    with Writes.recorded() as writes:
        call()
    assert writes.changes(dict) == []


def test_all_is_put_back() -> None:
    class Several(nn.Module):
        def forward(self) -> None:
            self.new, HELPER.own, HELPER.slot = [1], 5, 6
            self.register_buffer("table", torch.ones(1))
            COUNTS.update(m=1)
            LONG[0] = 9
            BOX[:] = 3
            ROW.append(4)
            SEEN.add(99)
            del Helper.registry

    model = Several()
    before = (dict(COUNTS), list(LONG), BOX.copy(), list(ROW), set(SEEN), HELPER.own, HELPER.slot)
    with Writes.recorded() as writes:
        model()
    assert {"new", "table"} <= {
        change.path for change in writes.changes(lambda: {id(vars(model)): "", **registered(model)})
    }
    writes.undo()
    after = (dict(COUNTS), list(LONG), BOX.copy(), list(ROW), set(SEEN), HELPER.own, HELPER.slot)
    assert all(np.array_equal(*pair) for pair in zip(before, after, strict=True))
    assert "new" not in vars(model) and "table" not in model._buffers and isinstance(Helper.registry, dict)


def registered(model: nn.Module) -> dict[int, str]:
    return {id(model._buffers): ""}


def test_what_torch_does_in_a_call_is_passed_over() -> None:
    with Writes.recorded() as writes:
        writes.pause()
        in_a_global()
        writes.resume()
        HELPER.__enter__()
    assert [change.path.rpartition(".")[2] for change in writes.changes(dict)] == ["own"]


class Remembers(nn.Module):
    """Keeps what a call has made, new at every call: no later call reads it."""

    def forward(self) -> None:
        self.sizes: dict[str, int] = {}
        self.sizes["rows"] = 2
        self.rows = [1]
        self.rows.append(2)
        self.error = ValueError("rows", 2)


def test_what_every_call_makes_alike_is_no_change() -> None:
    model = Remembers()
    model()
    with Writes.recorded() as writes:
        model()
    assert writes.changes(dict) == []


class Scaled(nn.Module):
    def __init__(self, factor: Callable[[], float]) -> None:
        super().__init__()
        self.layer, self.factor = nn.Linear(2, 2), factor

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x).sum() * self.factor()


def test_a_helper_of_a_model_is_refused_with_its_line() -> None:
    def factor() -> float:
        HELPER.in_its_class()
        return 2.0 if Helper.calls > 30 else 1.0

    watched = Watched(Scaled(factor), None)
    watched(torch.ones(2, 2))
    with pytest.raises(TraceError, match=r"Helper.calls \(test_writes.py:\d+\): is changed .*\(\d+ before"):
        check_changes(watched, (torch.ones(2, 2),), {})


@pytest.mark.parametrize(
    "factor", [functools.partial(next, iter([1.0])), [1.0].pop], ids=["an iterator", "a list"]
)
def test_what_a_second_call_fails_without_is_state(factor: Callable[[], float]) -> None:
    watched = Watched(Scaled(factor), None)
    watched(torch.ones(2, 2))
    with pytest.raises(TraceError, match="the forward"):
        check_changes(watched, (torch.ones(2, 2),), {})
