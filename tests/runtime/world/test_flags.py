"""A request to stop: one rank's, known to all behind the same step, and beside the same loss."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch

from autoptd.runtime.world.flags import Flags, FlagWatch, Signals
from tests.model.test_parallel_model import parallel
from tests.runtime.tied_model import Case, make_batch


@pytest.mark.parametrize(
    "case, asked",
    [
        (Case(t=2), 1),
        (Case(t=2, p=2, d=2, v=2, m=2, schedule="interleaved"), 7),
        (Case(d=2), 1),
        (Case(p=2, m=2), 0),
        (Case(), 0),
    ],
    ids=str,
)
def test_all_ranks_learn_of_it_in_the_same_step(case: Any, asked: int) -> None:
    batch = make_batch()
    with parallel(case) as pm:
        losses = [pm.step(*batch), pm.eval_step(*batch)]
    with parallel(case) as pm:
        signals = [Signals(()) for _ in range(pm.program.mesh.size)]
        watch(pm, signals)
        assert torch.equal(pm.step(*batch), losses[0])
        assert known(pm) == {False}
        signals[asked].seen = signal.SIGTERM
        assert torch.equal(pm.eval_step(*batch), losses[1])
        assert known(pm) == {True}
        pm.step(*batch)
        assert known(pm) == {True}


def test_where_the_host_runs_ahead_it_is_known_one_step_later() -> None:
    with parallel(Case(t=2)) as pm:
        signals = [Signals(()), Signals(())]
        watch(pm, signals)
        for rank in pm.run.ranks.here:
            rank.world.flags.is_late = True
        signals[1].seen = signal.SIGTERM
        pm.step(*make_batch())
        assert known(pm) == {False}
        pm.step(*make_batch())
        assert known(pm) == {True}


def watch(pm: Any, signals: list[Signals]) -> None:
    """Each rank has signals of its own."""
    for rank, own in zip(pm.run.ranks.here, signals, strict=True):
        read = lambda own=own: Flags(stop=own.seen is not None)  # noqa: E731
        rank.world.flags = FlagWatch(read, rank.world.device)


def known(pm: Any) -> set[bool]:
    return {rank.world.flags.known.stop for rank in pm.run.ranks.here}


def test_flags_are_told_apart_in_their_sum() -> None:
    told = [Flags(stop=True), Flags(), Flags(busy=True), Flags(stop=True, busy=True)]
    cpu = torch.device("cpu")
    watches = [FlagWatch(lambda one=one: one, cpu) for one in told]  # type: ignore[misc]
    watches[0].look(sum(one.mine() for one in watches))  # type: ignore[arg-type]
    assert watches[0].known == Flags(stop=True, failed=False, busy=True)
    first = FlagWatch(lambda: Flags(True, True, True, due=True), cpu)
    others = 100_000.0 * int(FlagWatch(lambda: Flags(True, True, True), cpu).mine())
    first.look(first.mine() + others)
    assert first.known == Flags(True, True, True, True)
    # As many ranks as have ever trained together, and more.
    watches[0].look(
        torch.tensor(100_000.0 * int(FlagWatch(lambda: Flags(failed=True), cpu).mine()), dtype=torch.float64)
    )
    assert watches[0].known == Flags(failed=True)


def test_the_handler_only_notes_the_signal_and_gives_back_what_was_there() -> None:
    before = signal.getsignal(signal.SIGUSR1)
    signals = Signals((signal.SIGUSR1, signal.SIGTERM))
    signals.open()
    assert signals.is_open and signals.seen is None
    for number in (signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    assert signals.seen == signal.SIGTERM
    signals.close()
    assert not signals.is_open and signal.getsignal(signal.SIGUSR1) == before


def test_another_thread_takes_no_signals() -> None:
    signals = Signals((signal.SIGUSR1,))
    thread = threading.Thread(target=signals.open)
    thread.start()
    thread.join()
    assert not signals.is_open
