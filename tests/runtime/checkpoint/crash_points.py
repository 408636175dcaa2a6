"""A process that saves again and again, each time ending at the next operation on the disk: `python -m ... folder`.

It prints, as JSON, a row for every operation at which a save ended: what it was, and what is in the folder then.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from autoptd.runtime.checkpoint.commit import begin, find, new_token, siblings
from autoptd.runtime.checkpoint.extra import merged, own_state
from autoptd.runtime.checkpoint.manifest import Staged
from autoptd.runtime.checkpoint.read import open_checkpoint, verify_files
from autoptd.runtime.checkpoint.save import Contents, commit, stage_rank, write_share
from autoptd.runtime.checkpoint.stage import copied
from tests.runtime.checkpoint.models import running, train

# All that a save does to the disk.
OPERATIONS = ("open", "write", "fsync", "rename", "unlink", "mkdir", "rmdir")


class Saved(NamedTuple):
    """What all ranks of a run have to write after some steps."""

    shares: list[Staged]
    contents: Contents
    extra: bytes


class Operation(NamedTuple):
    """One operation on the disk: its name in `os`, and the path that it is about."""

    name: str
    path: str


@contextmanager
def watched(see: Callable[[Operation], None]) -> Iterator[None]:
    """Call `see` before each operation."""
    own = {name: getattr(os, name) for name in OPERATIONS}

    def replace(name: str) -> None:
        def call(*args: Any, **keywords: Any) -> Any:
            what = args[0]
            path = os.readlink(f"/proc/self/fd/{what}") if isinstance(what, int) else str(what)
            see(Operation(name, path))
            return own[name](*args, **keywords)

        setattr(os, name, call)

    for name in OPERATIONS:
        replace(name)
    try:
        yield
    finally:
        for name, function in own.items():
            setattr(os, name, function)


def saves(steps: tuple[int, ...]) -> list[Saved]:
    """What a run has to write after each of these numbers of steps."""
    pm, optimizer = running(t=2)
    found = []
    for count in steps:
        train(pm, optimizer, count - pm.steps)
        contents = pm.checkpoints.contents(pm.checkpoints.own(optimizer, "pm.save"))
        shares = [stage_rank(rank.params, contents, copied) for rank in pm.run.ranks.here]
        found.append(Saved(shares, contents, merged([own_state({}, torch.device("cpu"))], [0])))
    pm.close()
    return found


def save(folder: Path, saved: Saved) -> None:
    """All that the ranks of a save do, one after the other."""
    part = begin(folder, new_token())
    for share in saved.shares:
        write_share(part, share, saved.contents)
    commit(part, folder, range(len(saved.shares)), saved.contents, saved.extra)


def operations(folder: Path, saved: Saved) -> list[Operation]:
    """The operations of a whole save, in order."""
    found: list[Operation] = []
    with watched(found.append):
        save(folder, saved)
    return found


def end_at(folder: Path, saved: Saved, number: int) -> None:
    """Let a process save, and end before its operation `number`, as if it were killed."""
    child = os.fork()
    if child:
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 9
        return
    left = number

    def see(operation: Operation) -> None:
        nonlocal left
        if left == 0:
            os._exit(9)
        left -= 1

    with watched(see):
        save(folder, saved)
    os._exit(1)


def main(folder: Path, step: int, is_first: bool) -> list[dict[str, Any]]:
    before, after = saves((1, 2))
    rows = []
    if not is_first:
        save(folder / "counted", before)
    every = operations(folder / "counted", after)
    for number in range(0, len(every), step):
        target = folder / f"at-{number}"
        if not is_first:
            save(target, before)
        end_at(target, after, number)
        row: dict[str, Any] = {"number": number, "operation": every[number].name}
        if not is_first or target.exists():
            checkpoint = open_checkpoint(target)
            row |= {"steps": checkpoint.manifest.about["steps"], "findings": verify_files(target)}
            row["is_beside"] = find(target) != target
        # The run is started again, and saves: nothing is left of what ended.
        save(target, after)
        row["left"] = [path.name for mark in (".part-", ".old-") for path in siblings(target, mark)]
        row["then"] = open_checkpoint(target).manifest.about["steps"]
        rows.append(row)
    return rows


if __name__ == "__main__":
    print(json.dumps(main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:] == ["first"])))
