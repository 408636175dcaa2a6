"""What a rank knows about itself before any communicator is made, and what is wrong with all of these together.

In: the environment. Out: `Facts` of a rank, small enough that thousands go through the store; and the `Verdict` of the rank
that has read all of them. A launch is stopped by what would end in a hang or a riddle: versions or commands that differ, two
ranks on one GPU (NCCL refuses them), fewer GPUs than processes. Less memory than elsewhere is a warning.

    mine = own_facts(rank, asked="t=2 p=2", device=None, backend=None)
    judge([mine, ...]).stops        # []: go on
"""

from __future__ import annotations

import hashlib
import json
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

import autoptd
from autoptd.runtime.world.devices import process_device
from autoptd.runtime.world.rendezvous import default_backend
from autoptd.wings.words import bytes_text

SETTINGS = (
    "NCCL_",
    "TORCH_NCCL_",
    "GLOO_",
    "TP_SOCKET_IFNAME",
    "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOC_CONF",
)
# Bytes that CUDA and its libraries use in this process, at most: the rest belongs to other processes.
OWN_CONTEXT = 1.5e9
MAX_RANGES = 8


@dataclass(frozen=True)
class Facts:
    """One rank: its host, device and software; bytes are those of its device, and `error` says why it has none."""

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
    """What all ranks act on: `hosts` numbers the machine of every rank; with `stops` nothing else is tried."""

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
        """The number of ranks on the machine with the fewest."""
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
    """Return a hash of this package's files: two checkouts may have one version."""
    found, root = hashlib.sha256(), Path(autoptd.__file__).parent
    for file in sorted(root.rglob("*.py")):
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes())
    return found.hexdigest()[:8]


def _of_cuda(device: torch.device) -> dict[str, object]:
    count = torch.cuda.device_count()
    if device.index is None or device.index >= count:
        raise RuntimeError(f"{device} was requested, and {count} are visible")
    free, total = torch.cuda.mem_get_info(device)
    properties = torch.cuda.get_device_properties(device)
    # Without a UUID, the visible devices and the index name a card, on one machine.
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
    """Find what is wrong with the facts of all ranks, which are in order."""
    # Machines in the order of ranks: rank 0's is number 0.
    names = tuple(dict.fromkeys(rank.host for rank in ranks))
    broken = [rank for rank in ranks if rank.error]
    # The first few: on a machine without a driver every rank says the same.
    stops = [f"rank {rank.rank} on {rank.host} has no device: {rank.error}" for rank in broken[:5]]
    working = [rank for rank in ranks if not rank.error]
    warnings: list[str] = []
    for package in sorted({name for rank in ranks for name in rank.versions}):
        # Ranks with another torch, NCCL or copy of this package may make other calls, and hang.
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
    """Return one line where the values of ranks differ: that of most ranks first."""
    ranks_by_value: dict[str, list[int]] = defaultdict(list)
    for rank, value in values.items():
        ranks_by_value[value or "none"].append(rank)
    if len(ranks_by_value) < 2:
        return []
    usual = sorted(ranks_by_value, key=lambda value: (-len(ranks_by_value[value]), value))
    texts = [f"{value} on rank {ranks_text(ranks_by_value[value])}" for value in usual[:4]]
    return [f"{what} is not the same on all ranks: {'; '.join(texts)}{'; ...' if len(usual) > 4 else ''}"]


def _shared_devices(ranks: Sequence[Facts]) -> list[str]:
    """Name ranks that share a device, before NCCL refuses them."""
    # By machine as well: without UUIDs, the cards of two machines have the same names.
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
    """Name devices on which other processes hold memory."""
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
    """List ranks, three and more in a row as a range (`0-3, 7`); only the first ranges where there are many."""
    spans: list[list[int]] = []
    for rank in sorted(set(ranks)):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    texts = []
    for span in spans[:MAX_RANGES]:
        # Two in a row are not shorter as a range.
        texts.append(f"{span[0]}-{span[-1]}" if len(span) > 2 else ", ".join(map(str, span)))
    return ", ".join(texts) + (", ..." if len(spans) > MAX_RANGES else "")


__all__ = ["Facts", "Verdict", "judge", "own_facts", "ranks_text"]
