"""The ranks meet in the store before any communicator is made, so that a rank that does not arrive is named.

In: the environment that torchrun sets. Out: a `Lobby`, where every rank hands in its facts and rank 0 judges them.

    lobby = Lobby(timeout=30.0)
    verdict = lobby.agree(own_facts(...))       # RuntimeFault: ... waited 30 s for rank 3, not arrived

Each rank makes a few requests and one wait, however many ranks there are; rank 0 alone reads all facts.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from autoptd.errors import PlanError, RuntimeFault
from autoptd.wings.doctor.facts import Facts, Verdict, judge, ranks_text

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Seconds that the other ranks wait for rank 0's report: torchrun ends all ranks once one has failed.
LINGER = 5.0


class Lobby:
    """One rank's connection to the store of a launch; waits for the store's host for `timeout` seconds at most."""

    def __init__(self, timeout: float) -> None:
        missing = [name for name in NEEDED if not os.environ.get(name)]
        if missing:
            raise PlanError("torch.distributed", f"{', '.join(missing)} not set", "start with torchrun")
        self.rank, self.size = int_from_env("RANK"), int_from_env("WORLD_SIZE")
        self.timeout = timeout
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # torchrun's agent keeps its store over restarts, and the keys of the failed attempt with it.
        self.store = dist.PrefixStore(f"autoptd doctor {attempt}", self._connect())

    def _connect(self) -> dist.Store:
        """Connect to the store of torchrun's agent or of rank 0; unlike torch's default, do not wait for all ranks."""
        is_hosted = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        address, port = os.environ["MASTER_ADDR"], int_from_env("MASTER_PORT")
        is_host, limit = self.rank == 0 and not is_hosted, timedelta(seconds=self.timeout)
        try:
            return dist.TCPStore(
                address, port, self.size, is_host, limit, wait_for_workers=False, multi_tenant=True
            )
        except RuntimeError as error:
            host = "torchrun's agent" if is_hosted else "rank 0"
            reason = str(error).splitlines()[0][:200]
            raise RuntimeFault(
                f"rank {self.rank} at start",
                f"the store of {host} at {address}:{port} does not answer for {self.timeout:g} s ({reason})",
                "check that it is running, that MASTER_ADDR and MASTER_PORT are right, and that no firewall blocks it",
            ) from error

    def agree(self, facts: Facts) -> Verdict:
        """Hand in this rank's facts, wait for all ranks, and return rank 0's verdict on them."""
        self.store.set(f"facts {self.rank}", facts.text())
        # The last rank to arrive says so: no rank has to ask for every other one.
        if self.store.add("arrived", 1) == self.size:
            self.store.set("all arrived", "yes")
        self._await("all arrived", self._who_is_absent)
        if self.rank == 0:
            texts = self.store.multi_get([f"facts {rank}" for rank in range(self.size)])
            self.store.set("verdict", judge([Facts.parse(text) for text in texts]).text())
        self._await("verdict", lambda: "waited for rank 0, which compares what the ranks have handed in")
        return Verdict.parse(self.store.get("verdict"))

    def report_printed(self) -> None:
        """Announce, on rank 0, that the report is printed."""
        with suppress(RuntimeError):
            self.store.set("printed", "yes")

    def wait_for_report(self) -> None:
        """Wait until rank 0 has printed the report, for a while."""
        # In a thread that may never end: torch's own timeout does not help where the store's host is stopped.
        waiting = threading.Thread(target=self._await_report, daemon=True)
        waiting.start()
        waiting.join(2 * LINGER)

    def _await_report(self) -> None:
        with suppress(RuntimeError):
            self.store.wait(["printed"], timedelta(seconds=LINGER))

    def _await(self, key: str, reason: Callable[[], str]) -> None:
        try:
            self.store.wait([key], timedelta(seconds=self.timeout))
        except RuntimeError as error:
            remedy = "look at their own output, and at the machines they were started on"
            raise RuntimeFault(f"rank {self.rank} at start", reason(), remedy) from error

    def _who_is_absent(self) -> str:
        absent = [rank for rank in range(self.size) if not self.store.check([f"facts {rank}"])]
        here = f"{self.size - len(absent)} of {self.size} are here"
        return f"waited {self.timeout:g} s for rank {ranks_text(absent)}, not arrived ({here})"


def int_from_env(name: str) -> int:
    """Return the number that an environment variable holds; PlanError where it holds something else."""
    try:
        return int(os.environ[name])
    except ValueError:
        raise PlanError(f"{name}={os.environ[name]!r}", "is not a number", "start with torchrun") from None


__all__ = ["Lobby", "int_from_env"]
