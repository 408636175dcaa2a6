"""Make tensors by the steps of a tape, on the CPU.

In: a tape, and the keys of its draws. Out: tensors with values, in the layout in which they were recorded.

    replay = Replay(tape, keys={3: "0 0 head.weight"})
    (weight,) = replay.make([place])          # runs the steps that this tensor takes, and no other

A draw starts from the state that its key gives or, in a stream, from where the draw before it has left the generator:
those that no tensor takes are then made too, and thrown away. torch's own generator is used, and put back: one thread at
a time may replay.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoptd.compat import tree_leaves, tree_map, without_modes
from autoptd.errors import InternalError
from autoptd.subject.initial.streams import Draw
from autoptd.subject.initial.tape import Constant, Place, Tape

aten = torch.ops.aten
CPU = torch.device("cpu")
# What they leave in memory is anything, and ranks must agree: zeros.
UNINITIALIZED = {
    aten.empty.memory_format,
    aten.empty_like.default,
    aten.empty_permuted.default,
    aten.empty_strided.default,
    aten.new_empty.default,
    aten.new_empty_strided.default,
}
# Where the state of torch's generator on the CPU has the numbers of its Mersenne twister, in 64 bits each, and how many.
MERSENNE_START, MERSENNE_WORDS = 24, 624
Storages = dict[int, torch.UntypedStorage]


class Replay:
    """Makes tensors of a tape; `keys` has those of draws by the number of their step."""

    def __init__(self, tape: Tape, keys: Mapping[int, str]) -> None:
        self.tape, self.keys = tape, keys
        # Of torch's generator, after a draw of a stream.
        self._states: dict[int, Tensor] = {}
        # The last call: `x.tolist()` of a fake tensor asks for each of its numbers.
        self._called: tuple[object, Storages] = None, {}

    def make(self, places: Sequence[Place]) -> list[Tensor]:
        """Return tensors; those that share a storage on the tape share theirs."""
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
        """Set torch's generator to where a draw starts."""
        if not self.tape.is_named(number):
            torch.default_generator.set_state(self._start(draw))
        elif number in self.tape.asked:
            torch.default_generator.set_state(state_of(f"{self.tape.seed} asked {self.tape.asked[number]}"))
        else:
            torch.default_generator.set_state(state_of(self.keys[number]))

    def _start(self, draw: Draw) -> Tensor:
        """Return the state in which a draw of a stream begins; make the draws before it that were not made yet."""
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
            # It is about to be overwritten: the step that made it was left out.
            empty = torch.zeros(self.tape.sizes[place.storage], dtype=torch.uint8)
            storage = held[place.storage] = empty.untyped_storage()
        x = torch.empty(0, dtype=place.dtype).set_(storage, place.offset, place.size, place.stride)  # type: ignore[call-overload]
        x = x.conj() if place.is_conj else x
        return torch._neg_view(x) if place.is_neg else x

    def _storage(self, place: Place, x: Tensor, known: set[int]) -> torch.UntypedStorage:
        """Return the storage of a result, in the layout that was recorded."""
        if x.dtype != place.dtype or tuple(x.shape) != place.size:
            fact = f"replayed, it is {x.dtype} of shape {tuple(x.shape)}, not {place.dtype} of {place.size}"
            raise InternalError("autoptd.deferred", fact)
        storage = x.untyped_storage()
        is_as_recorded = tuple(x.stride()) == place.stride and x.storage_offset() == place.offset
        # A kernel may hand out its operand where the recorded one made a copy.
        if is_as_recorded and storage.data_ptr() not in known and not (x.is_conj() or x.is_neg()):
            return storage
        held: Storages = {}
        self._tensor(place, held).copy_(x)
        return held[place.storage]


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload,no-any-return]


@contextmanager
def _surroundings(tape: Tape) -> Iterator[None]:
    """What a replay must not feel, and not change: modes, grad, threads, default dtype and torch's generator."""
    default, state = torch.get_default_dtype(), torch.default_generator.get_state()
    threads = torch.get_num_threads()
    with ExitStack() as stack:
        for context in (without_modes(), torch._C.DisableTorchFunction(), torch.inference_mode(False)):
            stack.enter_context(context)
        stack.enter_context(torch.autocast("cpu", enabled=False))
        stack.enter_context(torch.no_grad())
        # Sums over several threads are rounded otherwise; in order, they are those of the usual constructor.
        if not tape.order and threads > 1:
            torch.set_num_threads(1)
            stack.callback(torch.set_num_threads, threads)
        stack.callback(torch.default_generator.set_state, state)
        stack.callback(torch.set_default_dtype, default)
        yield


def key_of(seed: int, name: str, number: int) -> str:
    """Return what tells a tensor's n-th draw from all others."""
    return f"{seed} {number} {name}"


def state_of(key: str) -> Tensor:
    """Return the state of torch's generator in which a draw starts: all 19,968 bits of it come from the key.

    `manual_seed` takes 32 bits of a seed: among 100,000 tensors, two would have the same numbers.
    """
    state = torch.Generator().manual_seed(0).get_state()
    words = np.frombuffer(hashlib.shake_256(key.encode()).digest(4 * MERSENNE_WORDS), dtype="<u4")
    state.numpy()[MERSENNE_START : MERSENNE_START + 8 * MERSENNE_WORDS].view(np.uint64)[:] = words
    return state


__all__ = ["Replay", "key_of", "state_of"]
