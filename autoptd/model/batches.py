"""Which rows of a dataset a step trains on: a function of the step's number, so that there is no position to
save.

In: a dataset with a length, the rows of the global batch, a seed; a `ParallelModel`, whose `steps` are the
position. Out: a `batch_sampler` of torch's DataLoader. Global batch k is the same for every number of
replicas and of workers, and in every run; a process reads its replica's rows of it.

    batches = autoptd.Batches(dataset, batch=256, seed=0, pm=pm)
    loader = DataLoader(dataset, batch_sampler=batches, num_workers=4, worker_init_fn=autoptd.ignore_signals)
    while pm.steps < total:
        for x, y in loader:                          # to the end of the epoch in which pm.steps is
            loss = pm.step(x, y)

An *epoch* is one permutation of the rows, another one for each epoch; rows that do not fill a batch are
dropped. The permutation is computed row by row (a Feistel cipher), however long the dataset is: nothing of
its length is held.
"""

from __future__ import annotations

import hashlib
import operator
import os
import signal
from collections.abc import Iterator, Sized
from threading import Thread
from typing import Any, Protocol

import numpy as np

from autoptd.errors import PlanError, a_type

SITE = "autoptd.Batches"
# Of the cipher: with 4 a pair of rows would already be as good as independent.
ROUNDS = 6
# splitmix64's.
GOLDEN, SILVER = np.uint64(0x9E3779B97F4A7C15), np.uint64(0xBF58476D1CE4E5B9)


class Clock(Protocol):
    """How often the number of the next step was set."""

    jumps: int


class Run(Protocol):
    """The part of a `ParallelModel` that determines the rows of a step."""

    @property
    def steps(self) -> int: ...
    @property
    def share(self) -> tuple[int, int]: ...
    @property
    def clock(self) -> Clock: ...


class Batches:
    """The rows of each step: see the module's docstring.

    `batch`: rows of the global batch. Without `pm` these are all of them, and the first step is number
    `start`: for one device, or with `pm.local_batch`. `shuffle=False` takes rows in their order.
    """

    def __init__(
        self,
        dataset: Sized,
        batch: int,
        seed: int = 0,
        *,
        pm: Run | None = None,
        start: int = 0,
        shuffle: bool = True,
    ) -> None:
        if not hasattr(dataset, "__len__"):
            fact = f"{a_type(dataset)} has no length, and rows that cannot be asked for by number"
            remedy = "a dataset with __len__ and __getitem__; or a loader that keeps its position, by extra= of pm.checkpointer"
            raise PlanError(SITE, fact, remedy)
        numbers = {"batch": batch, "seed": seed, "start": start}
        for name, value in numbers.items():
            # A seed of 1.0 would be another one than 1, and NumPy's integers are integers.
            if not hasattr(value, "__index__") or isinstance(value, bool) or (name == "start" and value < 0):
                fact = "must be a" + (" non-negative" if name == "start" else "n") + " integer"
                raise PlanError(f"{SITE}: {name}={value!r}", fact, f"for example {name}=1")
        batch, seed, start = (operator.index(value) for value in numbers.values())
        if not 1 <= batch <= len(dataset):
            fact = f"a dataset of {len(dataset)} rows has no batch of that size"
            raise PlanError(f"{SITE}: batch={batch!r}", fact, f"1 to {len(dataset)}")
        self.rows, self.batch, self.seed = len(dataset), batch, seed
        self.start, self.shuffle = start, shuffle
        self._pm = pm
        replicas = 1 if pm is None else pm.share[1]
        if batch % replicas:
            fact = f"does not divide over {replicas} replicas"
            raise PlanError(f"{SITE}: batch={batch}", fact, f"a multiple of {replicas}")

    def __len__(self) -> int:
        """Return the number of batches of an epoch."""
        return self.rows // self.batch

    def __iter__(self) -> Iterator[list[int]]:
        """Yield the batches from that of the next step to the end of its epoch."""
        return self._from(self.step, self.jumps)

    def _from(self, first: int, jumps: int) -> Iterator[list[int]]:
        for number in range(first, (first // len(self) + 1) * len(self)):
            # A loader with workers asks for some before their steps come.
            now, is_set = self.step, self.jumps != jumps
            if self._pm is not None and (is_set or not first <= now <= number):
                how = "was set to" if is_set else "is"
                fact = f"began at step {first} and gave batches up to {number - 1}, and pm.steps {how} {now}"
                remedy = "begin to iterate after resume() and whatever else sets pm.steps; a batch a step"
                raise PlanError(SITE, fact, remedy)
            yield self.rows_of(number)

    @property
    def step(self) -> int:
        """The number of the next step: how many came before it."""
        return self.start if self._pm is None else self._pm.steps

    @property
    def jumps(self) -> int:
        """How often the number of the next step was set: a loader with workers is ahead by more than some
        jumps.
        """
        return 0 if self._pm is None else self._pm.clock.jumps

    def rows_of(self, step: int) -> list[int]:
        """Return the rows that this process reads for step number `step` (from 0)."""
        epoch, number = divmod(step, len(self))
        replica, replicas = (0, 1) if self._pm is None else self._pm.share
        share = self.batch // replicas
        first = number * self.batch + replica * share
        places = np.arange(first, first + share, dtype=np.uint64)
        if self.shuffle:
            places = permuted(places, self.rows, f"{self.seed} {epoch}")
        return places.tolist()  # type: ignore[no-any-return]


def permuted(places: np.ndarray[Any, Any], size: int, key: str) -> np.ndarray[Any, Any]:
    """Return where a permutation of 0, 1, ..., size - 1, which follows from `key`, takes some places
    (uint64).

    A Feistel cipher permutes the numbers of an even count of bits: of halves (a, b) each round makes (b, a ^
    mix(b)). What lies beyond `size` is enciphered again until it does not, which leaves a permutation of the
    others.
    """
    half = np.uint64(max(1, ((size - 1).bit_length() + 1) // 2))
    mask = np.uint64((1 << int(half)) - 1)
    digest = hashlib.blake2b(key.encode(), digest_size=8 * ROUNDS).digest()
    keys = np.frombuffer(digest, dtype="<u8").astype(np.uint64)
    places = places.copy()
    beyond = np.ones(len(places), dtype=bool)
    while beyond.any():
        left, right = places[beyond] >> half, places[beyond] & mask
        for round_key in keys:
            left, right = right, left ^ (_mix(right, round_key) & mask)
        places[beyond] = left << half | right
        beyond = places >= size
    return places


def _mix(x: np.ndarray[Any, Any], key: np.uint64) -> np.ndarray[Any, Any]:
    """Return 64 bits in which all bits of `x` and `key` are spread; unsigned integers of numpy wrap around."""
    x = (x + key) * GOLDEN
    x = (x ^ (x >> np.uint64(29))) * SILVER
    return x ^ (x >> np.uint64(32))


def ignore_signals(worker: int = 0) -> None:
    """Keep a DataLoader worker running when the whole job is sent SIGTERM or SIGUSR1: give it as
    `worker_init_fn`.

    Launchers signal all processes, and a loader whose worker is gone raises before its rank can save. What
    the rank itself sends, to end the worker, ends it, unless it comes while another's still waits to be
    taken: the system then drops it.
    """
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    # macOS does not tell who sent a signal.
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        Thread(target=_end_with, args=(os.getppid(),), name="signals", daemon=True).start()


def _end_with(parent: int) -> None:
    """End this process when `parent` sends SIGTERM; others' go by."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent:
        pass
    os._exit(0)
