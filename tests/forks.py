"""Processes that are forked from one that has imported torch and the compiler already, which takes seconds.

Functions run there, and scripts, one process a rank:

    process = CONTEXT.Process(target=work, args=(rank, out))
    results = finish(start(HERE / "lengths.py", 4, "more"), timeout=100)
"""

from __future__ import annotations

import json
import multiprocessing
import os
import runpy
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

from tests.ports import free_port

ROOT = Path(__file__).parent.parent
CONTEXT = multiprocessing.get_context("forkserver")
# What tests' processes import: all of it once. A name that is wrong would be left out without a word.
PRELOAD = (
    "pytest",
    "torch.export",
    "torch._dynamo",
    "torch.distributed",
    "autoptd.api",
    "autoptd.wings.doctor.run",
    "autoptd.wings.cli.commands",
)
CONTEXT.set_forkserver_preload([*PRELOAD, "tests.processes.launches", "tests.processes.preload"])


@dataclass(frozen=True)
class Script:
    """A script that runs as one rank, and where its output goes."""

    process: ForkServerProcess
    folder: Path
    rank: int

    def said(self, stream: str) -> str:
        return (self.folder / f"{self.rank}.{stream}").read_text()


def start(
    script: Path, world_size: int, *arguments: str, launch: dict[int, dict[str, object]] | None = None
) -> list[Script]:
    """Run a script in one process per rank, with the environment that torchrun would give them, or that of `launch`."""
    folder, port = Path(tempfile.mkdtemp()), free_port()
    env = {"WORLD_SIZE": world_size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    started = []
    for rank in range(world_size):
        place = {**env, "RANK": rank, "LOCAL_RANK": rank} if launch is None else launch[rank]
        own = {**place, "PYTHONPATH": ROOT}
        process = CONTEXT.Process(target=_run, args=(script, arguments, own, folder, rank))
        process.start()
        started.append(Script(process, folder, rank))
    return started


def _run(script: Path, arguments: tuple[str, ...], env: dict[str, object], folder: Path, rank: int) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ.update({key: str(value) for key, value in env.items()})
    os.chdir(ROOT)
    for stream, name in ((1, "out"), (2, "err")):
        file = os.open(folder / f"{rank}.{name}", os.O_CREAT | os.O_WRONLY)
        os.dup2(file, stream)
    sys.argv, sys.path[0:0] = [str(script), *arguments], [str(script.parent)]
    try:
        runpy.run_path(str(script), run_name="__main__")
    finally:
        sys.stdout.flush()


def told(script: Path, ranks: int, *arguments: str, timeout: float = 240) -> list[Any]:
    """Run a script, every rank of which must end well; return what each printed last, a line of JSON."""
    results = finish(start(script, ranks, *arguments), timeout)
    assert [code for code, _, _ in results] == [0] * ranks, "\n".join(err[-2000:] for _, _, err in results)
    return [json.loads(out.splitlines()[-1]) for _, out, _ in results]


def finish(started: list[Script], timeout: float) -> list[tuple[int, str, str]]:
    """(exit code, stdout, stderr) of every rank; whatever is left after `timeout` seconds is killed and fails the test."""
    deadline = time.monotonic() + timeout
    try:
        for one in started:
            one.process.join(max(deadline - time.monotonic(), 1.0))
        hung = [one.rank for one in started if one.process.is_alive()]
        assert not hung, f"ranks {hung} hung: {started[hung[0]].said('err')[-2000:]}"
        return [(one.process.exitcode or 0, one.said("out"), one.said("err")) for one in started]
    finally:
        for one in started:
            one.process.kill()
        shutil.rmtree(started[0].folder)


def fork_rank(
    rank: int, size: int, port: int, work: Callable[[], None], limit: int, ends: Callable[[str], None] = str
) -> int:
    """Fork a rank from this process, with the environment that torchrun would give it; return its process id.

    It is killed after `limit` seconds, which its code tells; `ends` is called with what `work` raised, "" for nothing.
    """
    if pid := os.fork():
        return pid
    signal.alarm(limit)
    env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in env.items()}, MASTER_ADDR="127.0.0.1")
    error = ""
    try:
        work()
    except BaseException as exc:
        error = f"{type(exc).__name__}: {exc}"
    ends(error)
    os._exit(bool(error))
