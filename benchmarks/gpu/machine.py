"""What is known of the card, the machine and the software: into every file of results, so that a number can be judged.

Nothing is changed: clocks and power are read. `others` says what else is on the card.
"""

from __future__ import annotations

import importlib.metadata
import os
import shutil
import subprocess
from typing import Any

import torch

from benchmarks.lib.report import machine as basics

QUERIED = {
    "name": "name",
    "driver": "driver_version",
    "SM clock, MHz": "clocks.sm",
    "largest SM clock, MHz": "clocks.max.sm",
    "memory clock, MHz": "clocks.mem",
    "power, W": "power.draw",
    "power limit, W": "power.limit",
    "temperature, C": "temperature.gpu",
    "used, MiB": "memory.used",
    "total, MiB": "memory.total",
}
PACKAGES = ("torch", "triton", "transformers", "numpy")
IDLE_MIB = 1500  # that a card shows as used by nobody but a driver and one context


def about() -> dict[str, Any]:
    """Machine, versions, and the card as it is now."""
    found = basics() | {"versions": versions()}
    return found | ({"card": card()} if torch.cuda.is_available() else {})


def versions() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "not installed"
    if torch.version.cuda:
        found["CUDA"] = torch.version.cuda
    if torch.cuda.is_available() and torch.distributed.is_nccl_available():
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    return found


def card() -> dict[str, str]:
    """Clocks, power and memory by nvidia-smi; what torch knows where it is missing. Of the first visible device."""
    told = _smi([f"--query-gpu={','.join(QUERIED.values())}", *_which()])
    if told:
        return dict(zip(QUERIED, (one.strip() for one in told[0].split(",")), strict=False))
    properties = torch.cuda.get_device_properties(0)
    return {"name": properties.name, "total, MiB": str(properties.total_memory >> 20)}


def others() -> str:
    """What else is on the card, in words; "" for nothing. Asked before this process allocates."""
    told = _smi(["--query-compute-apps=pid,process_name,used_memory", *_which()])
    processes = [
        line for line in told if line.split(",")[0].strip() not in (str(os.getpid()), str(os.getppid()))
    ]
    if processes:
        return (
            f"{len(processes)} other process(es) on the card: {'; '.join(line.strip() for line in processes)}"
        )
    used = card().get("used, MiB", "")
    if used.isdigit() and int(used) > IDLE_MIB:
        return f"{used} MiB of the card are in use, by processes that cannot be seen from here"
    return ""


def _which() -> list[str]:
    """The first of the visible devices, for nvidia-smi, which numbers all of them."""
    first = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")[0].strip()
    return ["-i", first or "0"]


def _smi(arguments: list[str]) -> list[str]:
    path = shutil.which("nvidia-smi")
    if path is None:
        return []
    try:
        done = subprocess.run(
            [path, *arguments, "--format=csv,noheader,nounits"], capture_output=True, text=True, timeout=20
        )
    except subprocess.TimeoutExpired:
        return []
    return [line for line in done.stdout.splitlines() if line.strip()] if done.returncode == 0 else []
