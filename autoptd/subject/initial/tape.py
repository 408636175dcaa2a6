"""The operators of a constructor in order, where their random draws start, and how they are replayed on the CPU.

A tensor is a *place*: a storage, by number, and how the tensor lies in it. So views need no operator, and
`weight[:3].normal_()` is an operator that writes to the storage of `weight`.

    tape.steps[3]                     # uniform_ on Place(storage=0, ...)
    tape.makers([0])                  # [3]: it overwrites everything, so the allocation before it is not needed

While operators are recorded, nothing is drawn, and generators do not advance; what the constructor itself does to
them (`torch.manual_seed`, `fork_rng`, a separate generator) shows in their state. So `Streams` really draws one
number after each recorded draw: this puts the generator into a state that no other draw has left, by which the next
draw is known to follow. A state that no draw has left was set by the constructor: a new *stream* begins there.
Stream 0 begins with the seed.

    streams = Streams(seed=0)                     # torch's generator is seeded, as by torch.manual_seed(0)
    first = streams.draw(3, generator)            # operator 3 draws: Draw(root=0, before=None)
    second = streams.draw(7, generator)           # Draw(root=0, before=3)
    streams.close()                               # every generator is where its stream began

A replay runs the steps that a tensor needs, and no others. A draw starts from the state given by its key or, in a
stream, from the state after the draw before it; then draws that no tensor uses are made too, and discarded. torch's
own generator is used and restored: only one thread at a time may replay.

    replay = Replay(tape, keys={3: "0 0 head.weight"})
    (weight,) = replay.make([place])
"""

from __future__ import annotations

import bisect
import hashlib
import heapq
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoptd.compat import tree_leaves, tree_map, without_modes
from autoptd.errors import InternalError, PlanError

aten = torch.ops.aten
CPU = torch.device("cpu")
# They leave memory uninitialized; ranks must agree, so it is set to zeros.
UNINITIALIZED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# The position of the Mersenne twister's words in the state of torch's CPU generator, in 64 bits each, and
# their number.
MERSENNE_START, MERSENNE_WORDS = 24, 624
Storages = dict[int, torch.UntypedStorage]


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor: its storage, by number, and how it lies there."""

    storage: int
    dtype: torch.dtype
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    is_conj: bool = False
    is_neg: bool = False


@dataclass(frozen=True, slots=True)
class Constant:
    """The values of a tensor when an operator read it."""

    value: Tensor


@dataclass(frozen=True, slots=True)
class Step:
    """One operator: its operands with places for tensors, and the storages that it reads and writes.

    `covered` are the storages that it overwrites completely. `default` is torch's default dtype at the time.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[Place, ...]
    reads: frozenset[int]
    writes: frozenset[int]
    covered: frozenset[int]
    default: torch.dtype
    draw: Draw | None = None


class Tape:
    """The recording of a constructor under a seed. With `order`, all draws follow one another as in torch."""

    def __init__(self, seed: int, order: bool) -> None:
        self.seed, self.order = seed, order
        self.steps: list[Step] = []
        # By storage: its bytes, and the steps that write to it, ascending.
        self.sizes: list[int] = []
        self.writers: list[list[int]] = []
        # The states in which streams of draws begin.
        self.roots: list[Tensor] = []
        # Draws whose values the constructor read, numbered: they need a seed before tensors have names.
        self.asked: dict[int, int] = {}

    def add(self, step: Step) -> None:
        for storage in step.writes:
            self.writers[storage].append(len(self.steps))
        self.steps.append(step)

    def is_named(self, number: int) -> bool:
        """Tell whether a step draws with a separate seed, instead of from a stream."""
        draw = self.steps[number].draw
        return draw is not None and draw.root == 0 and not self.order

    def draws_down_to(self, number: int | None, known: Container[int]) -> list[int]:
        """Return the draws of a stream up to step `number`, in order, from the first one that is not `known`."""
        found: list[int] = []
        while number is not None and number not in known:
            found.append(number)
            draw = self.steps[number].draw
            assert draw is not None
            number = draw.before
        return found[::-1]

    def makers(self, storages: Iterable[int], before: int | None = None) -> list[int]:
        """Return the steps, ascending, that make what the storages hold (before step `before` runs)."""
        chosen: list[int] = []
        needed = set(storages)
        # The last writer of each needed storage before the steps that were visited, the greatest first.
        waiting: list[int] = []

        def follow(storage: int, end: int) -> None:
            place = bisect.bisect_left(self.writers[storage], end)
            if place:
                heapq.heappush(waiting, -self.writers[storage][place - 1])

        for storage in needed:
            follow(storage, len(self.steps) if before is None else before)
        while waiting:
            number = -heapq.heappop(waiting)
            while waiting and waiting[0] == -number:
                heapq.heappop(waiting)
            chosen.append(number)
            step = self.steps[number]
            for storage in step.writes & needed:
                if storage in step.covered:
                    needed.discard(storage)
                else:
                    follow(storage, number)
            for storage in step.reads - needed:
                needed.add(storage)
                follow(storage, number)
        return chosen[::-1]


@dataclass(frozen=True)
class Draw:
    """The start of a draw: in stream `root`, after the draw of operator `before`."""

    root: int
    before: int | None


class Streams:
    """The generators that a constructor draws from, from its start to its end."""

    def __init__(self, seed: int) -> None:
        self.roots: list[torch.Tensor] = []
        self._outside = torch.default_generator.get_state()
        self._generators: list[torch.Generator] = []
        # By digest of a state.
        self._known: dict[bytes, Draw] = {}
        self.rewound: set[int] = set()
        self._followed: set[Draw] = set()
        torch.default_generator.manual_seed(seed)
        self._root_of(torch.default_generator.get_state())

    def draw(self, number: int, generator: torch.Generator | None) -> Draw:
        """Record that operator `number` draws from `generator` (None: torch's own), and return the start of
        the draw.
        """
        generator = generator or torch.default_generator
        if generator.device.type != "cpu":
            fact = f"a constructor draws from a generator of {generator.device}, but is replayed on the CPU"
            raise PlanError("autoptd.deferred", fact, "a torch.Generator of the CPU")
        if generator is not torch.default_generator and generator not in self._generators:
            self._generators.append(generator)
        state = generator.get_state()
        draw = self._known.get(_digest(state)) or self._root_of(state)
        if draw in self._followed:
            self.rewound.add(number)
        self._followed.add(draw)
        torch.rand((), generator=generator, device="cpu")
        self._known[_digest(generator.get_state())] = Draw(draw.root, number)
        return draw

    def close(self) -> None:
        """Restore torch's generator, and set others to where their streams began."""
        for generator in self._generators:
            draw = self._known.get(_digest(generator.get_state()))
            if draw is not None:
                generator.set_state(self.roots[draw.root])
        torch.default_generator.set_state(self._outside)

    def _root_of(self, state: torch.Tensor) -> Draw:
        draw = self._known[_digest(state)] = Draw(len(self.roots), None)
        self.roots.append(state)
        return draw


def _digest(state: torch.Tensor) -> bytes:
    return hashlib.blake2b(state.numpy().tobytes(), digest_size=16).digest()


class Replay:
    """Makes tensors of a tape; `keys` has the keys of draws by the number of their step."""

    def __init__(self, tape: Tape, keys: Mapping[int, str]) -> None:
        self.tape, self.keys = tape, keys
        # States of torch's generator after draws of a stream.
        self._states: dict[int, Tensor] = {}
        # The last call, since `x.tolist()` of a fake tensor asks for each number separately.
        self._called: tuple[object, Storages] = None, {}

    def make(self, places: Sequence[Place]) -> list[Tensor]:
        """Return tensors; those that share a storage on the tape share one."""
        storages = {place.storage for place in places}
        with _surroundings(self.tape):
            held = self._run(self.tape.makers(storages), storages)
            return [self._tensor(place, held) for place in places]

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Call a function on recorded operands, at the end of the tape."""
        storages = {x.storage for x in tree_leaves((args, kwargs)) if isinstance(x, Place)}
        with _surroundings(self.tape):
            key = [(storage, len(self.tape.writers[storage])) for storage in sorted(storages)]
            if self._called[0] != key:
                self._called = key, self._run(self.tape.makers(storages), storages)
            held = self._called[1]
            return function(*self._real(args, held), **self._real(kwargs, held))

    def _run(self, numbers: Sequence[int], keep: set[int] | frozenset[int]) -> Storages:
        """Run steps; return the storages in `keep`. Others are freed as soon as no later step needs them."""
        held: Storages = {}
        last: dict[int, int] = {}
        for number in numbers:
            step = self.tape.steps[number]
            last |= dict.fromkeys(step.reads | step.writes, number)
        for number in numbers:
            self._step(number, held)
            step = self.tape.steps[number]
            for storage in step.reads | step.writes:
                if last[storage] == number and storage not in keep:
                    held.pop(storage, None)
        return held

    def _step(self, number: int, held: Storages) -> None:
        step = self.tape.steps[number]
        if step.default is not torch.get_default_dtype():
            torch.set_default_dtype(step.default)
        args, kwargs = self._real(step.args, held), self._real(step.kwargs, held)
        if step.draw is not None:
            self._seed(number, step.draw)
        sizes = {storage: held[storage].nbytes() for storage in step.writes if storage in held}
        results = [x for x in tree_leaves(step.function(*args, **kwargs)) if isinstance(x, Tensor)]
        if step.draw is not None and not self.tape.is_named(number):
            self._states[number] = torch.default_generator.get_state()
        if step.function in UNINITIALIZED:
            results[0].zero_()
        if step.function is aten.resize_.default:
            for storage, size in sizes.items():
                _bytes(held[storage])[size:] = 0
        known = {held[storage].data_ptr() for storage in step.reads if storage in held}
        for place, x in zip(step.results, results, strict=True):
            if place.storage not in held:
                held[place.storage] = self._storage(place, x, known)

    def _seed(self, number: int, draw: Draw) -> None:
        """Set torch's generator to the start of a draw."""
        if not self.tape.is_named(number):
            torch.default_generator.set_state(self._start(draw))
        elif number in self.tape.asked:
            torch.default_generator.set_state(state_of(f"{self.tape.seed} asked {self.tape.asked[number]}"))
        else:
            torch.default_generator.set_state(state_of(self.keys[number]))

    def _start(self, draw: Draw) -> Tensor:
        """Return the state in which a draw of a stream begins, after making all earlier draws."""
        for number in self.tape.draws_down_to(draw.before, self._states):
            reads = self.tape.steps[number].reads
            self._step(number, self._run(self.tape.makers(reads, before=number), reads))
        return self.tape.roots[draw.root] if draw.before is None else self._states[draw.before]

    def _real(self, operands: Any, held: Storages) -> Any:
        def real(x: Any) -> Any:
            if isinstance(x, Place):
                return self._tensor(x, held)
            if isinstance(x, Constant):
                # The step may write to it.
                return x.value.to(CPU, copy=True)
            return CPU if isinstance(x, torch.device) else x

        made = tree_map(real, operands)
        if isinstance(made, dict) and "pin_memory" in made:
            made["pin_memory"] = False
        return made

    def _tensor(self, place: Place, held: Storages) -> Tensor:
        storage = held.get(place.storage)
        if storage is None:
            # It is about to be overwritten, and the step that made it was left out.
            empty = torch.zeros(self.tape.sizes[place.storage], dtype=torch.uint8)
            storage = held[place.storage] = empty.untyped_storage()
        x = torch.empty(0, dtype=place.dtype).set_(storage, place.offset, place.size, place.stride)  # type: ignore[call-overload]
        x = x.conj() if place.is_conj else x
        return torch._neg_view(x) if place.is_neg else x

    def _storage(self, place: Place, x: Tensor, known: set[int]) -> torch.UntypedStorage:
        """Return the storage of a result, in the layout that was recorded."""
        if x.dtype != place.dtype or tuple(x.shape) != place.size:
            fact = f"the replay made {x.dtype} of shape {tuple(x.shape)}, not {place.dtype} of {place.size}"
            raise InternalError("autoptd.deferred", fact)
        storage = x.untyped_storage()
        is_as_recorded = tuple(x.stride()) == place.stride and x.storage_offset() == place.offset
        # A kernel may return its operand where the recorded one made a copy.
        if is_as_recorded and storage.data_ptr() not in known and not (x.is_conj() or x.is_neg()):
            return storage
        held: Storages = {}
        self._tensor(place, held).copy_(x)
        return held[place.storage]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload,no-any-return]


@contextmanager
def _surroundings(tape: Tape) -> Iterator[None]:
    """Isolate a replay from modes, grad, threads, the default dtype and torch's generator, and restore them."""
    default, state = torch.get_default_dtype(), torch.default_generator.get_state()
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        for context in (without_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False)):
            stack.enter_context(context)
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.no_grad())
        # The rounding of sums depends on the number of threads; with `order`, it is that of the usual
        # constructor.
        if not tape.order and threads > 1:
            torch.set_num_threads(1)
            stack.callback(torch.set_num_threads, threads)
        stack.callback(torch.default_generator.set_state, state)
        stack.callback(torch.set_default_dtype, default)
        yield


def key_of(seed: int, name: str, number: int) -> str:
    """Return the key of a tensor's n-th draw."""
    return f"{seed} {number} {name}"


def state_of(key: str) -> Tensor:
    """Return the state of torch's generator for a key, which determines all 19,968 bits.

    `manual_seed` uses 32 bits of a seed: among 100,000 tensors, two would probably have the same numbers.
    """
    state = torch.Generator().manual_seed(0).get_state()
    words = np.frombuffer(hashlib.shake_256(key.encode()).digest(4 * MERSENNE_WORDS), dtype="<u4")
    state.numpy()[MERSENNE_START : MERSENNE_START + 8 * MERSENNE_WORDS].view(np.uint64)[:] = words
    return state
