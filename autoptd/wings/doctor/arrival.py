"""The ranks meet in the store before any communicator is made, so that a rank that does not come is named.

In: the environment that torchrun sets. Out: a `Lobby`, in which every rank hands in its facts and rank 0 says
what they mean.

    lobby = Lobby(timeout=30.0)
    verdict = lobby.agree(own_facts(...))       # RuntimeFault: ... waited 30 s for rank 3, not arrived
    lobby.report_printed()                      # rank 0: the report is out
    lobby.wait_for_report()                     # the others end after that: a launcher ends all ranks with the first one

Every rank makes a few requests and one wait, however many ranks there are; rank 0 alone reads all facts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from queue import Empty, SimpleQueue
from typing import TypeVar

import torch.distributed as dist

from autoptd.errors import PlanError, RuntimeFault
from autoptd.wings.doctor.facts import Facts, Verdict, judge
from autoptd.wings.doctor.words import ranks_text

Answer = TypeVar("Answer")
NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Attempts to connect to the store, each as long as the timeout.
ATTEMPTS = 4
# Seconds that rank 0 has to print the report, before another rank does.
LINGER = 5.0
# Seconds by which timeouts of the store and of NCCL are longer than ours, so that ours comes first and names
# the rank.
MARGIN = 25.0


class Lobby:
    """One rank's connection to the store of a launch.

    Making it waits for the store's host, for `timeout` seconds at most.
    """

    def __init__(self, timeout: float) -> None:
        missing = [name for name in NEEDED if not os.environ.get(name)]
        if missing:
            raise PlanError("torch.distributed", f"{', '.join(missing)} not set", "start with torchrun")
        self.rank, self.size = (number_of(name) for name in ("RANK", "WORLD_SIZE"))
        self.timeout = timeout
        self._place = f"{os.environ['MASTER_ADDR']}:{os.environ['MASTER_PORT']}"
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # A restart by torchrun keeps its agent's store: the keys of the failed attempt are still there.
        self.store = dist.PrefixStore(f"autoptd doctor {attempt}", self._connect())

    def _connect(self) -> dist.Store:
        """Connect to the store of torchrun's agent, or rank 0's, without waiting for the other ranks as torch
        would.
        """
        by_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        port = number_of("MASTER_PORT")

        def connect() -> dist.Store:
            return dist.TCPStore(
                os.environ["MASTER_ADDR"],
                port,
                self.size,
                is_master=self.rank == 0 and not by_agent,
                timeout=timedelta(seconds=self.timeout),
                wait_for_workers=False,
                multi_tenant=True,
            )

        try:
            return patiently(connect, ATTEMPTS * self.timeout)
        except RuntimeError as error:
            host = "torchrun's agent" if by_agent else "rank 0"
            raise RuntimeFault(
                f"rank {self.rank} at start",
                f"the store of {host} at {self._place} does not answer for {self.timeout:g} s ({_first_line(error)})",
                "see whether it runs, whether MASTER_ADDR and MASTER_PORT are right, and whether a firewall is between",
            ) from error

    def agree(self, facts: Facts) -> Verdict:
        """Hand in this rank's facts, wait for everybody's, and return what rank 0 makes of them."""
        self.store.set(f"facts {self.rank}", facts.text())
        # The last one to arrive opens the door: no rank has to ask for every other.
        if self.store.add("arrived", 1) == self.size:
            self.store.set("all are here", "yes")
        self._await("all are here", self._who_is_absent)
        if self.rank == 0:
            texts = self.store.multi_get([f"facts {rank}" for rank in range(self.size)])
            verdict = judge([Facts.parse(bytes(text).decode()) for text in texts])
            self.store.set("verdict", verdict.text())
            return verdict
        self._await("verdict", lambda: "waited for rank 0, which reads what the ranks say of themselves")
        return Verdict.parse(self.store.get("verdict").decode())

    def lost(self) -> RuntimeFault:
        """Return what to raise where the store has not answered for some time."""
        return RuntimeFault(
            f"rank {self.rank}",
            f"the store at {self._place} does not answer: rank 0, or what else hosts it, is stopped or gone",
            "look at that machine and at rank 0's own output",
        )

    def report_printed(self) -> None:
        """Say, on rank 0, that the report is printed."""
        with suppress(RuntimeError):
            patiently(lambda: self.store.set("told", "yes"), LINGER)

    def wait_for_report(self) -> str:
        """Wait for rank 0 to print the report: "told" by it or another, else "mine" to tell, or "lost":
        nobody can be asked.
        """
        try:
            return patiently(self._who_reports, 2 * LINGER)
        except RuntimeError:
            return "lost"

    def _who_reports(self) -> str:
        with suppress(RuntimeError):
            self.store.wait(["told"], timedelta(seconds=LINGER))
            return "told"
        # Rank 0 is silent: the first one that notices prints instead, and the counter makes it one.
        return "mine" if int(self.store.add("tellers", 1)) == 1 else "told"

    def _await(self, key: str, why: Callable[[], str]) -> None:
        try:
            self.store.wait([key], timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise RuntimeFault(
                f"rank {self.rank} at start",
                why(),
                "look at their own output, and at the machines they were to run on",
            ) from error

    def _who_is_absent(self) -> str:
        deadline = time.monotonic() + LINGER
        absent = self._absent(0, self.size, deadline)
        here = f"{self.size - len(absent)} of {self.size} are here"
        return f"waited {self.timeout:g} s for rank {ranks_text(absent)}, not arrived ({here})"

    def _absent(self, first: int, end: int, deadline: float) -> list[int]:
        """The ranks of a range that have handed in nothing: halves in which all have are not looked at one by
        one.
        """
        if time.monotonic() > deadline or self.store.check([f"facts {rank}" for rank in range(first, end)]):
            return []
        if end - first == 1:
            return [first]
        middle = (first + end) // 2
        return self._absent(first, middle, deadline) + self._absent(middle, end, deadline)


def patiently(request: Callable[[], Answer], seconds: float) -> Answer:
    """Make a request to a store.

    RuntimeError if it takes too long: whatever its timeout, a stopped host never answers.
    """
    answers: SimpleQueue[tuple[Answer | None, BaseException | None]] = SimpleQueue()

    def serve() -> None:
        try:
            answers.put((request(), None))
        # Raised again below, in the thread that asked.
        except BaseException as error:
            answers.put((None, error))

    # Left behind if it never ends: it is a daemon, and the process is about to end with a fault.
    threading.Thread(target=serve, name="request", daemon=True).start()
    try:
        answer, error = answers.get(timeout=seconds)
    except Empty:
        raise RuntimeError(f"no answer for {seconds:g} s") from None
    if error is not None:
        raise error
    return answer  # type: ignore[return-value]


def number_of(name: str) -> int:
    """Return the number that a variable of the environment is set to; PlanError where it is not one."""
    try:
        return int(os.environ[name])
    except ValueError:
        raise PlanError(f"{name}={os.environ[name]!r}", "is not a number", "start with torchrun") from None


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__


__all__ = ["MARGIN", "Lobby", "number_of", "patiently"]
