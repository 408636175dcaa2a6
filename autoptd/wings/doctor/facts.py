"""What a rank says of itself before any communicator is made, and what is wrong with what all of them say.

In: the environment. Out: a `Facts` per rank, small enough that thousands go through the store; and a
`Verdict`, by the rank that has read all of them. What stops a launch, or makes it end in a riddle: versions
that differ, two ranks on one GPU (NCCL refuses them), fewer GPUs than processes, commands that differ. What
may slow it down: less memory than elsewhere, another process.

    mine = own_facts(rank, asked="t=2 p=2", device=None, backend=None)
    judge([mine, ...]).stops        # [] : go on
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import autoptd
from autoptd.runtime.world.devices import process_device
from autoptd.runtime.world.rendezvous import default_backend
from autoptd.wings.doctor.words import ranks_text
from autoptd.wings.viz.words import bytes_text

SETTINGS = (
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "TP_SOCKET_IFNAME",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOC_CONF",
)
# Bytes that CUDA and its libraries take in this process at most: more in use is another process's.
OWN_CONTEXT = 1.5e9
# Seconds that nvidia-smi may take.
PATIENCE = 10.0


@dataclass(frozen=True)
class Facts:
    """One rank: where it runs, on what, and with which software.

    `error`: why it has no device. Bytes are of its device.
    """

    rank: int
    host: str
    backend: str
    device: str
    name: str = ""
    uuid: str = ""
    free: float = 0.0
    total: float = 0.0
    # Bytes that others use, before this rank has allocated anything.
    in_use: float = 0.0
    # Other processes on its card, as far as they can be seen.
    processes: tuple[str, ...] = ()
    versions: dict[str, str] = field(default_factory=dict)
    settings: dict[str, str] = field(default_factory=dict)
    asked: str = ""
    error: str = ""

    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> Facts:
        found = json.loads(text)
        return Facts(**{**found, "processes": tuple(found["processes"])})


@dataclass(frozen=True)
class Verdict:
    """What all ranks go by: `hosts` numbers the machine of every rank.

    With `stops` there is no use in going on.
    """

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
        """Ranks of the machine that has fewest."""
        return min(self.hosts.count(host) for host in set(self.hosts))

    def text(self) -> str:
        return json.dumps(asdict(self), separators=(",", ":"))

    @staticmethod
    def parse(text: str) -> Verdict:
        found = json.loads(text)
        values: dict[str, Any] = {}
        for name, value in found.items():
            # JSON has no tuples.
            values[name] = tuple(value) if isinstance(value, list) else value
        return Verdict(**values)


def own_facts(rank: int, asked: str, device: str | None, backend: str | None) -> Facts:
    """Say what can be said of this process; never raises."""
    host = socket.gethostname()
    settings = {name: os.environ[name] for name in sorted(os.environ) if _is_setting(name)}
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


def _version_of(package: str, rank: Facts) -> str:
    return rank.versions.get(package, "none")


def _is_setting(name: str) -> bool:
    return name.startswith(SETTINGS)


def _versions() -> dict[str, str]:
    found = {"autoptd": f"{_own_version()} ({_hash_of_source()})", "torch": torch.__version__}
    found["python"] = ".".join(map(str, sys.version_info[:2]))
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        with suppress(Exception):
            found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def _own_version() -> str:
    try:
        return version("autoptd")
    except PackageNotFoundError:
        return "checkout"


@cache
def _hash_of_source() -> str:
    """Of this package's files: two checkouts may have one version."""
    found, root = hashlib.sha256(), Path(autoptd.__file__).parent
    for file in sorted(root.rglob("*.py")):
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:8]


def _of_cuda(device: torch.device) -> dict[str, object]:
    count = torch.cuda.device_count()
    if device.index is None or device.index >= count:
        raise RuntimeError(f"{device} is asked for, and {count} are visible")
    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    # Without a UUID, the visible devices and the index name a card, on one machine.
    uuid = str(getattr(properties, "uuid", "")) or f"{os.environ.get('CUDA_VISIBLE_DEVICES', '')} {device}"
    in_use = max(total - free - OWN_CONTEXT, 0.0)
    found = {
        "name": properties.name,
        "uuid": uuid,
        "free": float(free),
        "total": float(total),
        "in_use": in_use,
    }
    return {**found, "processes": _processes_on(uuid) if in_use else ()}


def _processes_on(uuid: str) -> tuple[str, ...]:
    """Other processes that nvidia-smi sees on a card; in a container it sees none."""
    query = [
        "nvidia-smi",
        "--query-compute-apps=gpu_uuid,pid,process_name,used_memory",
        "--format=csv,noheader",
    ]
    try:
        output = subprocess.run(query, capture_output=True, text=True, timeout=PATIENCE).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    found = []
    for line in output.splitlines():
        row = list(map(str.strip, line.split(",")))
        is_here = len(row) >= 4 and row[0].removeprefix("GPU-") == uuid.removeprefix("GPU-")
        if is_here and row[1] != str(os.getpid()):
            found.append(f"pid {row[1]} {Path(row[2]).name} {row[3]}")
    return tuple(found[:3])


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
    """Find what is wrong with what the ranks say; ranks are in order."""
    # Machines in the order in which ranks name them: rank 0's is number 0.
    names = tuple(dict.fromkeys(rank.host for rank in ranks))
    # The first few: without a driver on a machine, every rank there says the same.
    broken = [rank for rank in ranks if rank.error]
    stops = [f"rank {rank.rank} on {rank.host} has no device: {rank.error}" for rank in broken[:5]]
    working = [rank for rank in ranks if not rank.error]
    warnings: list[str] = []
    for what in sorted({name for rank in ranks for name in rank.versions}):
        # Ranks with another torch, NCCL or copy of this package may make other calls, and hang.
        version = partial(_version_of, what)
        lines = _differences(ranks, f"version of {what}", version)
        (warnings if what == "python" else stops).extend(lines)
    stops += _differences(ranks, "command", lambda rank: rank.asked)
    stops += _differences(working, "backend", lambda rank: rank.backend)
    stops += _shared_devices(working)
    warnings += _differences(working, "device", lambda rank: rank.name)
    for name in sorted({name for rank in ranks for name in rank.settings}):
        warnings += _differences(ranks, name, lambda rank, name=name: rank.settings.get(name, "not set"))  # type: ignore[misc]
    warnings += _taken_memory(working)
    free = [rank.free for rank in working] or [0.0]
    first = working[0] if working else ranks[0]
    return Verdict(
        tuple(names.index(rank.host) for rank in ranks),
        names,
        first.backend,
        first.name,
        first.versions,
        min(free),
        max(free),
        tuple(stops),
        tuple(warnings),
    )


def _differences(ranks: Sequence[Facts], what: str, of: Callable[[Facts], str]) -> list[str]:
    """Return one line where ranks say different things: who says what, most ranks first."""
    ranks_by_value: dict[str, list[int]] = defaultdict(list)
    for rank in ranks:
        ranks_by_value[of(rank)].append(rank.rank)
    if len(ranks_by_value) < 2:
        return []
    texts = []
    for value, some in sorted(ranks_by_value.items(), key=_by_count):
        # Most ranks first: the few that differ stand behind what is usual.
        texts.append(f"{value or 'none'} on rank {ranks_text(some)}")
    more = "; ..." if len(texts) > 4 else ""
    return [f"{what} is not the same on all ranks: {'; '.join(texts[:4])}{more}"]


def _by_count(item: tuple[str, list[int]]) -> tuple[int, str]:
    return -len(item[1]), item[0]


def _shared_devices(ranks: Sequence[Facts]) -> list[str]:
    """Name ranks that share a device, before NCCL refuses them."""
    on: dict[tuple[str, str], list[Facts]] = defaultdict(list)
    for rank in ranks:
        if rank.device.startswith("cuda") and rank.backend == "nccl":
            # By machine as well: without UUIDs, cards of two machines have the same names.
            on[rank.host, rank.uuid].append(rank)
    lines = []
    for (host, _), sharing in on.items():
        if len(sharing) > 1:
            ranks_of_device = ranks_text([rank.rank for rank in sharing])
            lines.append(
                f"rank {ranks_of_device} share {sharing[0].device} of {host} ({sharing[0].name}): NCCL refuses two ranks "
                "on one device; start as many processes as there are GPUs, and look at CUDA_VISIBLE_DEVICES"
            )
    return lines


def _taken_memory(ranks: Sequence[Facts]) -> list[str]:
    """Name devices on which others have memory."""
    taken = [rank for rank in ranks if rank.in_use > 0]
    lines = []
    for rank in taken[:5]:
        processes = f" ({'; '.join(rank.processes)})" if rank.processes else ""
        used = f"{bytes_text(rank.in_use)} of {rank.device} on {rank.host} are in use by another process{processes}"
        lines.append(
            f"rank {rank.rank}: {used}; {bytes_text(rank.free)} of {bytes_text(rank.total)} are free"
        )
    if len(taken) > 5:
        lines.append(f"... and {len(taken) - 5} ranks more")
    return lines


__all__ = ["Facts", "Verdict", "judge", "own_facts"]
