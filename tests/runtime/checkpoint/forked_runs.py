"""Runs of several processes over gloo that are killed, signalled, or restarted on another mesh; results as JSON on stdout.

Ranks are forked here: torch is imported once, and a mesh compiled once. What a run does:

    python forked_runs.py kills '{"t": 2, "p": 2, "d": 2}' 8           # so many kill -9 at random times, a save every step
    python forked_runs.py signals '{"t": 2, "p": 2}' forward write     # SIGTERM to one rank in each of these phases
    python forked_runs.py meshes '[{"t": 2, "p": 2, "d": 2}, {"t": 2, "p": 2}]'      # one mesh after the other
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import autoptd
from autoptd.compiler.driver import compile_program
from autoptd.model.parallel_model import ParallelModel
from autoptd.options import Options, make_options
from autoptd.program.program import Program
from autoptd.runtime.checkpoint import commit, save
from tests.forks import fork_rank
from tests.parity.models import VOCAB, batch, gpt
from tests.ports import free_port
from tests.waits import wait_until

ROWS, TIMEOUT = 8, 30.0
Made = tuple[Program, Options]


class Texts:
    """A dataset of 40 rows."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.ids = torch.randint(0, VOCAB, (40, batch(1)[0].shape[1]), generator=generator)

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, row: int) -> tuple[Tensor, Tensor]:
        return self.ids[row], self.ids[row].roll(-1)


def compiled(mesh: dict[str, Any], timeout: float = TIMEOUT) -> Made:
    options = make_options(**mesh, num_microbatches=2, backend="gloo", timeout=timeout)
    share = batch(ROWS // mesh.get("d", 1))
    return compile_program(gpt(2).double(), options, share, {}, replicas=1, check=False), options


def start(made: Made) -> tuple[ParallelModel, torch.optim.Optimizer]:
    program, options = made
    pm = ParallelModel(program, options, gpt(2).double().state_dict())
    return pm, pm.optimizer(torch.optim.AdamW, lr=1e-2)


def train(
    made: Made, folder: Path, steps: int, every: int = 1, say: Callable[..., None] = lambda **_: None
) -> None:
    """Train to `steps` from where the folder's last checkpoint is, on `Batches`; at the end rank 0 leaves the state there."""
    pm, opt = start(made)
    data = Texts()
    batches = autoptd.Batches(data, ROWS, 1, pm=pm)
    with pm.checkpointer(folder / "ckpts", opt, every=every, keep=3) as ckpt:
        ckpt.resume()
        say(resumed=pm.steps)
        losses, rows = [], []
        while pm.steps < steps:
            mine = batches.rows_of(pm.steps)
            rows.append(mine)
            loss = pm.step(
                *(torch.stack(column) for column in zip(*(data[row] for row in mine), strict=True))
            )
            pm.clip_grad_norm_(1.0)
            opt.step()
            opt.zero_grad()
            losses.append(float(loss))
            if not ckpt.step(loss):
                break
        say(steps=pm.steps, losses=losses, rows=rows, replica=pm.share[0])
    state = pm.state_dict()
    if state:
        torch.save(state, folder / "final.pt")
    pm.close()


def fork(rank: int, size: int, port: int, folder: Path, work: Callable[[Callable[..., None]], None]) -> int:
    """Run `work` in a process; what it says is added to the file `folder / rank`."""

    def say(**facts: Any) -> None:
        with (folder / str(rank)).open("a") as file:
            file.write(json.dumps(facts) + "\n")

    def run() -> None:
        os.chdir(folder)
        work(say)

    # The last life, of up to 300 steps beside other work, is not killed.
    return fork_rank(rank, size, port, run, 400, lambda error: say(error=error) if error else None)


def said(folder: Path, rank: int) -> list[dict[str, Any]]:
    """What a rank said, of all its lives."""
    file = folder / str(rank)
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def fork_all(size: int, folder: Path, work: Callable[[Callable[..., None]], None]) -> list[int]:
    folder.mkdir(exist_ok=True)
    port = free_port()
    return [fork(rank, size, port, folder, work) for rank in range(size)]


def ends(pids: list[int]) -> list[int]:
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]


def kills(mesh: dict[str, Any], count: int, root: Path) -> dict[str, Any]:
    """Kill a random rank, or all, at random times, and start anew, until the run has come to its end."""
    made, steps, draw = compiled(mesh), 10 * count, random.Random(0)
    size = made[0].mesh.size
    plain, killed = root / "plain", root / "killed"
    codes = ends(fork_all(size, plain, lambda say: train(made, plain, steps, steps + 1)))
    last, found = -1, []
    for attempt in range(count + 1):
        pids = fork_all(size, killed, lambda say: train(made, killed, steps, 1, say))
        if attempt == count:
            codes += ends(pids)
            break
        # Not before it has begun, which takes the most time; every other time, not before it has saved something.
        wait_until(lambda attempt=attempt: len(said(killed, 0)) > attempt)
        if attempt % 2:
            wait_until(lambda last=last: last_step(killed) > max(last, 0) or last == steps)
        time.sleep(draw.uniform(0.0, 0.6))
        victims = [draw.choice(pids)] if draw.random() < 0.7 else pids
        for pid in victims:
            os.kill(pid, signal.SIGKILL)
        # As a launcher does, which sees it a little later.
        time.sleep(draw.uniform(0.0, 0.2))
        last = last_step(killed)
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        ends(pids)
        found.append(last)
    resumed = [line["resumed"] for line in said(killed, 0) if "resumed" in line]
    one, other = (torch.load(folder / "final.pt") for folder in (plain, killed))
    equal = one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    names = sorted(path.name for path in (killed / "ckpts").iterdir())
    return {
        "codes": codes,
        "equal": equal,
        "committed": found,
        "resumed": resumed,
        "names": names,
        "steps": steps,
    }


def last_step(folder: Path) -> int:
    """The step of the last complete checkpoint; 0 before there is one."""
    complete = commit.checkpoints(folder / "ckpts")
    return commit.step_of(complete[0]) if complete else 0


def signals(mesh: dict[str, Any], phases: list[str], root: Path) -> list[dict[str, Any]]:
    """Send SIGTERM to the last rank, by itself, in a phase of the third step."""
    made, results = compiled(mesh), []
    size = made[0].mesh.size
    for phase in phases:
        folder = root / phase

        def work(say: Callable[..., None], phase: str = phase, folder: Path = folder) -> None:
            signalled(made, phase, folder, say)

        codes = ends(fork_all(size, folder, work))
        lines = [said(folder, rank)[-1] for rank in range(size)]
        names = sorted(path.name for path in (folder / "ckpts").iterdir() if path.name != commit.LOCK)
        results.append({"phase": phase, "codes": codes, "said": lines, "names": names})
    return results


def signalled(made: Made, phase: str, folder: Path, say: Callable[..., None]) -> None:
    if phase == "compile":
        mesh = {name: getattr(made[1], name) for name in ("t", "p", "d")}
        pm = autoptd.parallelize(
            gpt(2).double(), **mesh, example_inputs=batch(ROWS), backend="gloo", timeout=TIMEOUT
        )
        opt = pm.optimizer(torch.optim.AdamW, lr=1e-2)
    else:
        pm, opt = start(made)
    once = iter([True])

    last = made[0].mesh.coordinate(made[0].mesh.size - 1)

    def ask(*_: Any) -> None:
        # The thread that writes is behind.
        is_time = pm.steps == 3 or phase == "write"
        if is_time and pm.coordinate == last and next(once, False):
            os.kill(os.getpid(), signal.SIGTERM)

    def before(right: Callable[..., Any]) -> Callable[..., Any]:
        def asked(*args: Any, **keywords: Any) -> Any:
            ask()
            return right(*args, **keywords)

        return asked

    executor = pm.run.ranks.here[0].executor  # type: ignore[union-attr]
    if phase == "forward":
        executor._do = {kind: before(act) for kind, act in executor._do.items()}
    if phase == "optimizer":
        opt.register_step_pre_hook(ask)
    if phase == "write":
        save.write_share = before(save.write_share)  # type: ignore[assignment]
    if phase == "compile":
        pm.sizes._compiler.for_evaluation = before(pm.sizes._compiler.for_evaluation)  # type: ignore[union-attr, method-assign]
    share = pm.local_batch(*batch(ROWS))
    with pm.checkpointer(folder / "ckpts", opt, every=3 if phase == "write" else 100) as ckpt:
        while True:
            loss = pm.step(*share)
            opt.step()
            opt.zero_grad()
            if pm.steps == 3 and phase in ("evaluation", "compile"):
                if phase == "evaluation":
                    ask()
                pm.eval_step(*share)
            if not ckpt.step(loss):
                break
            if pm.steps == 10:
                raise RuntimeError("nobody was asked to end")
    say(steps=pm.steps)
    pm.close()


def meshes(each: list[dict[str, Any]], root: Path) -> list[list[Any]]:
    """Four more steps on one mesh after the other; what each rank said of them."""
    results = []
    for number, mesh in enumerate(each):
        made = compiled(mesh)
        own = root / str(number)

        def work(say: Callable[..., None], made: Made = made, until: int = 4 * (number + 1)) -> None:
            train(made, root, until, 2, say)

        codes = ends(fork_all(made[0].mesh.size, own, work))
        results.append([codes, [said(own, rank) for rank in range(made[0].mesh.size)]])
    return results


def main(what: str, mesh: str, *rest: str) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as root:
        if what == "kills":
            result: Any = kills(json.loads(mesh), int(rest[0]), Path(root))
        elif what == "signals":
            result = signals(json.loads(mesh), list(rest), Path(root))
        else:
            result = meshes(json.loads(mesh), Path(root))
    print(json.dumps(result))


if __name__ == "__main__":
    main(*sys.argv[1:])
