"""Find the place of this process in a Slurm step, where torchrun has not set it: `srun python train.py`.

In: the SLURM_* variables that srun gives to each task. Out: torchrun's variables, which this project and torch
read. Those that are set already stay.

    join_slurm_step(os.environ)          # sets RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR, MASTER_PORT
    list(hosts("gpu[003-004,12],x7"))    # ["gpu003", "gpu004", "gpu12", "x7"]

A process that is not one of several tasks is left alone: a batch script, a shell of `salloc`, a step of one task.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, MutableMapping

from autoptd.errors import PlanError

# Below the ports that Linux and macOS use for outgoing connections.
FIRST_PORT, PORTS = 10_007, 20_011
# Between the ports of consecutive jobs are those of their steps.
PORTS_OF_JOB = 37
# Commas between hosts, but not those in brackets.
BETWEEN_HOSTS = re.compile(r",(?![^\[]*\])")
BY_HAND = "set it to the host of task 0"


def join_slurm_step(environ: MutableMapping[str, str]) -> None:
    """Set torchrun's variables in the environment of a task of a Slurm step, where they are missing."""
    # srun sets the id of the step for its tasks; a batch script has a SLURM_PROCID as well, but no step.
    if "SLURM_STEP_ID" not in environ or "SLURM_PROCID" not in environ:
        return
    counted = next((name for name in ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS") if name in environ), None)
    size = 1 if counted is None else _number(environ, counted)
    if size == 1:
        return
    given = environ.get("WORLD_SIZE")
    if "RANK" in environ and given is None:
        # All tasks may have inherited the same one.
        remedy = "unset RANK, which is then SLURM_PROCID, or set WORLD_SIZE as well"
        raise PlanError("RANK", "is set and WORLD_SIZE is not, in a Slurm step of several tasks", remedy)
    if "RANK" not in environ and given not in (None, str(size)):
        fact = f"is {given}, and the Slurm step has {size} tasks ({counted})"
        raise PlanError("WORLD_SIZE", fact, "unset WORLD_SIZE, or start that many tasks")
    found = {"RANK": str(_number(environ, "SLURM_PROCID")), "WORLD_SIZE": str(size)}
    if "SLURM_LOCALID" in environ:
        found["LOCAL_RANK"] = environ["SLURM_LOCALID"]
    if "MASTER_ADDR" not in environ:
        found["MASTER_ADDR"] = _first_host(environ)
    if "MASTER_PORT" not in environ:
        job, step = _number(environ, "SLURM_JOB_ID"), _number(environ, "SLURM_STEP_ID")
        found["MASTER_PORT"] = str(FIRST_PORT + (PORTS_OF_JOB * job + step) % PORTS)
    environ.update({name: value for name, value in found.items() if name not in environ})


def _first_host(environ: Mapping[str, str]) -> str:
    """Return the host of task 0; PlanError where the variables do not tell."""
    # Each component of a heterogeneous job has its own list.
    if environ.get("SLURM_HET_SIZE", "1") != "1":
        raise PlanError("MASTER_ADDR", "is not set, in a heterogeneous job of Slurm", BY_HAND)
    names = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    listed = next((name for name in names if environ.get(name)), None)
    if listed is None:
        raise PlanError("MASTER_ADDR", f"is not set, nor is {names[0]}", BY_HAND)
    try:
        return next(hosts(environ[listed]))
    except ValueError:
        raise PlanError(listed, f"{environ[listed]!r} is not a list of hosts", "set MASTER_ADDR") from None


def _number(environ: Mapping[str, str], name: str) -> int:
    if not environ.get(name, "").isdecimal():
        raise PlanError(name, f"is {environ.get(name)!r} in a Slurm step", "start the process with srun")
    return int(environ[name])


def hosts(listed: str) -> Iterator[str]:
    """Yield the hosts of a list as Slurm writes it; a name may have several brackets, "r[1-2]n[01-16]"."""
    for part in BETWEEN_HOSTS.split(listed):
        before, bracket, rest = part.partition("[")
        inside, end, after = rest.partition("]")
        if bracket and not end:
            raise ValueError(part)
        for number in _numbers(inside) if bracket else ("",):
            yield from (f"{before}{number}{tail}" for tail in (hosts(after) if after else ("",)))


def _numbers(listed: str) -> Iterator[str]:
    """Yield the numbers of a list, with the zeros in front that are part of a name."""
    for item in listed.split(","):
        low, _, high = item.partition("-")
        yield from (f"{number:0{len(low)}}" for number in range(int(low), int(high or low) + 1))
