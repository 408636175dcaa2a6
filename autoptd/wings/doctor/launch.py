"""Let the ranks meet in the store before any communicator is made, compare their facts, and name missing ranks.

In: the environment that torchrun sets. Out: a `Lobby`, where every rank submits its `Facts`, and the `Verdict` of rank 0
on all of them. Ranks that do not arrive are named. A launch is stopped by anything that would end in a hang or an obscure
error: versions or commands that differ, two ranks on one GPU (NCCL refuses them), fewer GPUs than processes. Less memory
than elsewhere is a warning.

    lobby = Lobby(timeout=30.0)
    verdict = lobby.agree(own_facts(rank, requested, device=None, backend=None))
    verdict.stops               # []; RuntimeFault if a rank is missing: ... waited 30 s for rank 3, not arrived

Each rank makes a few requests and one wait, independent of the number of ranks; only rank 0 reads all facts.
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autoptd.errors import PlanError, RuntimeFault
from autoptd.runtime.world.devices import process_device
from autoptd.runtime.world.rendezvous import connect, default_backend, int_from_env
from autoptd.wings.words import bytes_text

NEEDED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Seconds that other ranks wait for rank 0's report, as torchrun ends all ranks when one has failed.
LINGER = 5.0
# Environment variables that are compared.
SETTINGS = (
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "TP_SOCKET_IFNAME",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOC_CONF",
)
# The most bytes that CUDA and its libraries use in a process: the rest belongs to other processes.
OWN_CONTEXT = 1.5e9
MAX_RANGES = 8


class Lobby:
    """One rank's connection to the store of a launch, with `timeout` in seconds."""

    def __init__(self, timeout: float) -> None:
        missing = [name for name in NEEDED if not os.environ.get(name)]
        if missing:
            raise PlanError("torch.distributed", f"{', '.join(missing)} not set", "start with torchrun")
        self.rank, self.size = int_from_env("RANK"), int_from_env("WORLD_SIZE")
        self.timeout = timeout
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        # torchrun's agent keeps its store, with the keys of a failed attempt, over restarts.
        self.store = dist.PrefixStore(f"autoptd doctor {attempt}", connect(timeout))

    def agree(self, facts: Facts) -> Verdict:
        """Submit this rank's facts, wait for all ranks, and return rank 0's verdict on them."""
        self.store.set(f"facts {self.rank}", facts.text())
        # Set by the last rank, so that no rank has to query all others.
        if self.store.add("arrived", 1) == self.size:
            self.store.set("all arrived", "yes")
        self._await("all arrived", self._who_is_absent)
        if self.rank == 0:
            texts = self.store.multi_get([f"facts {rank}" for rank in range(self.size)])
            self.store.set("verdict", judge([Facts.parse(text) for text in texts]).text())
        self._await("verdict", lambda: "waited for rank 0, which compares what the ranks have handed in")
        return Verdict.parse(self.store.get("verdict"))

    def report_printed(self, has_fault: bool) -> None:
        """Announce that rank 0 has printed the report; with a fault, stay until the others have found theirs.

        They ask the store who is gone, and this process may host it.
        """
        deadline = time.monotonic() + LINGER
        with suppress(RuntimeError):
            self.store.set("printed", "yes")
            while has_fault and self.store.add("faults", 0) < self.size - 1 and time.monotonic() < deadline:
                time.sleep(0.1)

    def wait_for_report(self, has_fault: bool) -> None:
        """Wait for a while until rank 0 has printed the report; tell it before that a fault was found."""
        # In a thread, as torch's timeout does not work if the host of the store is stopped.
        waiting = threading.Thread(target=self._await_report, args=(has_fault,), daemon=True)
        waiting.start()
        waiting.join(2 * LINGER)

    def _await_report(self, has_fault: bool) -> None:
        with suppress(RuntimeError):
            self.store.add("faults", int(has_fault))
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


@dataclass(frozen=True)
class Facts:
    """Facts of one rank: host, device, software, bytes of the device; `error`: why it has no device."""

    rank: int
    host: str
    backend: str
    device: str
    name: str = ""
    uuid: str = ""
    free: float = 0.0
    total: float = 0.0
    # Bytes that other processes use.
    in_use: float = 0.0
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    asked: str = ""
    error: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str | bytes) -> Facts:
        return Facts(**json.loads(text))


@dataclass(frozen=True)
class Verdict:
    """The common result for all ranks: `hosts` numbers the machine of every rank; with `stops` nothing is checked."""

    hosts: tuple[int, ...]
    host_names: tuple[str, ...]
    backend: str
    device_name: str
    versions: dict[str, str]
    least_free: float
    most_free: float
    stops: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    @property
    def per_node(self) -> int:
        """The least number of ranks on a machine."""
        return min(self.hosts.count(host) for host in set(self.hosts))

    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str | bytes) -> Verdict:
        values: dict[str, Any] = {}
        for name, value in json.loads(text).items():
            # JSON has no tuples.
            values[name] = tuple(value) if isinstance(value, list) else value
        return Verdict(**values)


def own_facts(rank: int, asked: str, device: str | None, backend: str | None) -> Facts:
    """Return the facts of this process; never raises."""
    host = socket.gethostname()
    settings = {name: os.environ[name] for name in sorted(os.environ) if name.startswith(SETTINGS)}
    common = {"rank": rank, "host": host, "asked": asked, "versions": _versions(), "settings": settings}
    try:
        target = process_device(device, backend)
        chosen = backend or default_backend(target)
        if chosen == "nccl" and target.type != "cuda":
            raise RuntimeError(f"backend nccl needs a CUDA device, and this rank's is {target}")
        measured = _of_cuda(target) if target.type == "cuda" else _of_cpu()
        return Facts(**common, backend=chosen, device=str(target), **measured)  # type: ignore[arg-type]
    except Exception as error:
        fact = f"{type(error).__name__}: {error}"
        return Facts(**common, backend=backend or "?", device=device or "?", error=fact)  # type: ignore[arg-type]


def _versions() -> dict[str, str]:
    found = {
        "autoptd": f"{sys.modules['autoptd'].__version__} ({_hash_of_source()})",
        "torch": torch.__version__,
    }
    found["python"] = ".".join(map(str, sys.version_info[:2]))
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        with suppress(Exception):
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


@cache
def _hash_of_source() -> str:
    """Return a hash of this package's files, as two checkouts may have the same version."""
    found, root = hashlib.sha256(), Path(__file__).parents[2]
    for file in sorted(root.rglob("*.py")):
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:8]


def _of_cuda(device: torch.device) -> dict[str, object]:
    count = torch.cuda.device_count()
    if device.index is None or device.index >= count:
        raise RuntimeError(f"{device} was requested, and {count} are visible")
    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    # Without a UUID, the visible devices and the index identify a card of a machine.
    uuid = str(getattr(properties, "uuid", "")) or f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device}"
    sizes = {"free": float(free), "total": float(total), "in_use": max(total - free - OWN_CONTEXT, 0.0)}
    return {"name": properties.name, "uuid": uuid, **sizes}


def _of_cpu() -> dict[str, object]:
    page = os.sysconf("SC_PAGE_SIZE")
    total = float(page * os.sysconf("SC_PHYS_PAGES"))
    # macOS does not have it.
    known = "SC_AVPHYS_PAGES" in os.sysconf_names
    return {
        "name": "CPU",
        "free": float(page * os.sysconf("SC_AVPHYS_PAGES")) if known else total,
        "total": total,
    }


def judge(ranks: Sequence[Facts]) -> Verdict:
    """Return the verdict on the facts of all ranks, which are in order."""
    # Machines in the order of ranks: rank 0's is number 0.
    names = tuple(dict.fromkeys(rank.host for rank in ranks))
    broken = [rank for rank in ranks if rank.error]
    # The first few, as without a driver all ranks fail alike.
    stops = [f"rank {rank.rank} on {rank.host} has no device: {rank.error}" for rank in broken[:5]]
    working = [rank for rank in ranks if not rank.error]
    warnings: list[str] = []
    for package in sorted({name for rank in ranks for name in rank.versions}):
        # Ranks with another torch, NCCL or copy of this package may make different calls, and hang.
        versions = {rank.rank: rank.versions.get(package, "none") for rank in ranks}
        (warnings if package == "python" else stops).extend(_differences(f"version of {package}", versions))
    stops += _differences("command", {rank.rank: rank.asked for rank in ranks})
    stops += _differences("backend", {rank.rank: rank.backend for rank in working})
    stops += _shared_devices(working)
    warnings += _differences("device", {rank.rank: rank.name for rank in working})
    for name in sorted({name for rank in ranks for name in rank.settings}):
        warnings += _differences(name, {rank.rank: rank.settings.get(name, "not set") for rank in ranks})
    warnings += _taken_memory(working)
    free, first = [rank.free for rank in working] or [0.0], (working or ranks)[0]
    hosts = tuple(names.index(rank.host) for rank in ranks)
    about = first.backend, first.name, first.versions, min(free), max(free)
    return Verdict(hosts, names, *about, tuple(stops), tuple(warnings))


def _differences(what: str, values: Mapping[int, str]) -> list[str]:
    """Return a line if the values of ranks differ, the most frequent one first."""
    ranks_by_value: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks_by_value[value or "none"].append(rank)
    if len(ranks_by_value) < 2:
        return []
    usual = sorted(ranks_by_value, key=lambda value: (-len(ranks_by_value[value]), value))
    texts = [f"{value} on rank {ranks_text(ranks_by_value[value])}" for value in usual[:4]]
    return [f"{what} is not the same on all ranks: {'; '.join(texts)}{'; ...' if len(usual) > 4 else ''}"]


def _shared_devices(ranks: Sequence[Facts]) -> list[str]:
    """Describe ranks that share a device, which NCCL refuses."""
    # By host, as without UUIDs the cards of two machines have the same names.
    on: dict[tuple[str, str], list[Facts]] = defaultdict(list)
    for rank in ranks:
        if rank.device.startswith("cuda") and rank.backend == "nccl":
            on[rank.host, rank.uuid].append(rank)
    lines = []
    for (host, _), some in on.items():
        if len(some) > 1:
            ranks_on_it = ranks_text(rank.rank for rank in some)
            lines.append(
                f"rank {ranks_on_it} share {some[0].device} of {host} ({some[0].name}): NCCL refuses two ranks on one "
                "device; start as many processes as there are GPUs, and check CUDA_VISIBLE_DEVICES"
            )
    return lines


def _taken_memory(ranks: Sequence[Facts]) -> list[str]:
    """Describe devices with memory of other processes."""
    taken = [rank for rank in ranks if rank.in_use > 0]
    lines = []
    for rank in taken[:5]:
        used = f"{bytes_text(rank.in_use)} of {rank.device} on {rank.host} are in use by another process"
        free = f"{bytes_text(rank.free)} of {bytes_text(rank.total)} are free"
        lines.append(f"rank {rank.rank}: {used}; {free}")
    if len(taken) > 5:
        lines.append(f"... and {len(taken) - 5} more ranks")
    return lines


def ranks_text(ranks: Iterable[int]) -> str:
    """List ranks, three and more in a row as a range (`0-3, 7`), and only the first ranges of many."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = []
    for span in spans[:MAX_RANGES]:
        texts.append(f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)))
    return ", ".join(texts) + (", ..." if len(spans) > MAX_RANGES else "")
