"""The run of `autoptd doctor`: under torchrun on all its ranks, alone on one rank and on threads.

In: what is asked. Out: a `DoctorReport`, on every rank the same; rank 0 prints it, and if it cannot, one of
the others does.

    run_launched(Request(timeout=30.0))     # on every rank of torchrun: the status with which it is to end
    run_alone(Request())
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from autoptd.compat import new_group
from autoptd.errors import AutoptdError, PlanError, RuntimeFault
from autoptd.ir.activity import activity
from autoptd.ir.machine_files import machine_of_device
from autoptd.ir.mesh import USUAL_DEGREES, Mesh
from autoptd.runtime.world.processes import DistributedGroup, DistributedWorld
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, on_device
from autoptd.wings.doctor.arrival import MARGIN, Lobby, number_of
from autoptd.wings.doctor.calls import Checks, check_group, settle
from autoptd.wings.doctor.examine import COUNTS, MeshReport, examine
from autoptd.wings.doctor.facts import Facts, Verdict, judge, own_facts
from autoptd.wings.doctor.meshes import asked_mesh, meshes_for
from autoptd.wings.doctor.report import DoctorReport
from autoptd.wings.doctor.traffic import all_orders, communicators_of_orders
from autoptd.wings.doctor.watch import PATIENCE, watch, watching_store
from autoptd.wings.planner.auto import CPU
from autoptd.wings.planner.cluster import Cluster, find_cluster

# Ranks as threads, where no mesh is asked for: the smallest with several ranks along every axis.
THREADS = Mesh.of(dict.fromkeys(USUAL_DEGREES, 2))
MAX_THREADS = 64
# Elements of the tensors that threads are checked with.
SMALL_COUNTS = (1, 1021, 1 << 16)


@dataclass(frozen=True)
class Request:
    """What is asked: a mesh (or a part of one), a device and a backend.

    `degrees` of mesh axes by keyword, as far as they are given; `timeout` in seconds; a file for the report
    as JSON.
    """

    degrees: Mapping[str, int] = field(default_factory=dict)
    device: str | None = None
    backend: str | None = None
    timeout: float = 30.0
    cluster: str | None = None
    json: str | None = None

    def __str__(self) -> str:
        """What all ranks must be asked alike."""
        values = {**self.degrees, "backend": self.backend, "timeout": self.timeout}
        return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def run_launched(asked: Request) -> int:
    """Meet the other ranks, check everything, print; return the status with which to end."""
    size = number_of("WORLD_SIZE")
    # A mesh that does not fit is refused before any rank waits for another.
    asked_mesh(size, asked.degrees)
    # torchrun with one process: there is nobody to meet.
    if size == 1:
        return run_alone(asked)
    # `end` reads these when it is called: also from another thread, while the main one is stuck.
    lobby = Lobby(asked.timeout)
    verdict: Verdict | None = None
    meshes: list[MeshReport] = []

    def end(fault: str) -> int:
        status = _end(
            asked, lobby, DoctorReport(verdict, tuple(meshes), _cluster(asked, lobby, verdict), fault)
        )
        if fault and verdict is not None and verdict.backend == "nccl":
            # An ordinary end would wait for kernels that never finish.
            os._exit(status)
        return status

    def end_at_once(error: RuntimeFault) -> None:
        """End a process that is stuck; called by another thread."""
        os._exit(end(_error_line(error)))

    try:
        with watching_store(lobby, asked.timeout + PATIENCE, end_at_once):
            verdict = lobby.agree(own_facts(lobby.rank, str(asked), asked.device, asked.backend))
            if not verdict.stops:
                _look_at_all(asked, lobby, verdict, meshes, end_at_once)
    # RuntimeError and OSError are torch's own: no connection, no such host.
    except (AutoptdError, RuntimeError, OSError) as error:
        return end(_error_line(error))
    return end("")


def _error_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


def _end(asked: Request, lobby: Lobby, report: DoctorReport) -> int:
    """Print the report if it is this rank's to print, rank 0's or the first one's that misses it.

    Return the status.
    """
    if lobby.rank == 0:
        _print(asked, report)
        lobby.report_printed()
        return report.status
    who = lobby.wait_for_report()
    if who == "mine":
        # Rank 0 writes the file of --json, another rank only prints.
        _print(Request(), report)
    # Rank 0 may have printed all, or be gone.
    elif who == "lost":
        print("\n".join(report.wrong), file=sys.stderr, flush=True)
    return report.status


def _look_at_all(
    asked: Request,
    lobby: Lobby,
    verdict: Verdict,
    found: list[MeshReport],
    on_fault: Callable[[RuntimeFault], None],
) -> None:
    """Look at one mesh after the other; what is found is added as it comes, as the next mesh may hang."""
    # NCCL's watchdog would end the process before our own timeout names who is missing.
    margin = MARGIN if verdict.backend == "nccl" else 0.0
    limit = timedelta(seconds=asked.timeout + margin)
    # The lobby's store, in which all ranks have met, instead of a second one.
    store = dist.PrefixStore("default", lobby.store)
    store.set_timeout(limit)
    dist.init_process_group(
        verdict.backend, store=store, rank=lobby.rank, world_size=lobby.size, timeout=limit
    )
    asked_alone = asked_mesh(lobby.size, asked.degrees)
    for mesh in [asked_alone] if asked_alone else meshes_for(lobby.size, verdict.per_node):
        orders = all_orders(mesh.pipeline_ranks)
        communicators = communicators_of_orders(mesh.pipeline_ranks, orders.values())
        world = DistributedWorld(mesh, communicators, asked.device, asked.timeout, verdict.backend)
        try:
            with activity(f"trying {mesh}"), on_device(world.device), watch(world, on_fault):
                settle(world, "doctor: creation of groups")
                found.append(examine(world, orders, verdict.hosts))
        except BaseException as error:
            world.report_fault(error)
            raise
        world.close()
    dist.destroy_process_group()


def run_alone(asked: Request) -> int:
    """Check this process's backend, and ranks as threads; print."""
    return _print(asked, _alone(asked, 0))


def _alone(asked: Request, rank: int) -> DoctorReport:
    mesh = _mesh_of_threads(asked)
    facts = own_facts(rank, str(asked), asked.device, asked.backend)
    verdict = judge([facts])
    if verdict.stops:
        return DoctorReport(verdict)
    with activity(f"trying one rank over {facts.backend}"):
        alone = check_backend(facts, asked.timeout)
    with activity(f"trying {mesh} with ranks as threads"):
        threads = check_threads(mesh, facts.device, asked.timeout)
    count = max(torch.cuda.device_count() if facts.device.startswith("cuda") else 4, 2)
    notes = (
        f"Checked: a group of one over {facts.backend} ({alone.checks} results), and ranks that are threads of this process.",
        "Several processes, their links and what these give:",
        f"  torchrun --nproc-per-node {count} -m -- autoptd doctor",
    )
    faults = [
        f"a group of one rank over {facts.backend}: {wrong.what}: {wrong.text}" for wrong in alone.wrong[:1]
    ]
    return DoctorReport(verdict, (threads,), fault="".join(faults), notes=notes)


def _mesh_of_threads(asked: Request) -> Mesh:
    if not asked.degrees:
        return THREADS
    mesh = Mesh.of(asked.degrees)
    if mesh.size > MAX_THREADS:
        flags = " ".join(f"--{name} {degree}" for name, degree in mesh.degrees.items())
        command = f"torchrun --nproc-per-node {mesh.size} -m -- autoptd doctor {flags}"
        raise PlanError(f"{mesh}", f"{mesh.size} ranks, and this process is alone", command)
    return mesh


def check_backend(facts: Facts, timeout: float) -> MeshReport:
    """Check every collective of a group of this one process, over its backend."""
    if dist.is_initialized():
        raise PlanError("torch.distributed", "has a default process group already", "a process of its own")
    limit = timedelta(seconds=timeout + MARGIN)
    store = dist.TCPStore("127.0.0.1", 0, 1, is_master=True, timeout=limit)
    dist.init_process_group(facts.backend, store=store, rank=0, world_size=1, timeout=limit)
    try:
        world = DistributedWorld(Mesh(), Communicators(), facts.device, timeout, facts.backend)
        # A world of one rank has no groups: made by hand, so that the backend itself runs.
        handle = new_group("autoptd doctor", (0,), facts.backend, limit, None, "autoptd doctor")
        checks = Checks(world)
        if handle is not None:
            with on_device(world.device):
                check_group(checks, "one rank", DistributedGroup(world, handle, (0,)), COUNTS)
        world.close()
    finally:
        dist.destroy_process_group()
    return MeshReport(Mesh(), (), checks.count, tuple(checks.wrong), (), ())


def check_threads(mesh: Mesh, device: str, timeout: float) -> MeshReport:
    """Check everything between ranks that are threads, on one device.

    Nothing is timed, as nothing is sent.
    """
    orders = all_orders(mesh.pipeline_ranks)
    shared = ThreadWorld(mesh, communicators_of_orders(mesh.pipeline_ranks, orders.values()), device, timeout)
    hosts = [0] * mesh.size
    return run_ranks(shared, lambda world: examine(world, orders, hosts, counts=SMALL_COUNTS, sizes=()))[0]


def _cluster(asked: Request, lobby: Lobby, verdict: Verdict | None) -> Cluster | None:
    """Return what the links should give: as asked for, or a known device's. Only rank 0 needs the file."""
    if lobby.rank != 0 or verdict is None:
        return None
    if asked.cluster is not None:
        return find_cluster(asked.cluster)
    if verdict.device_name == "CPU":
        return find_cluster(CPU)
    name = machine_of_device(verdict.device_name)
    return None if name is None else find_cluster(name)


def _print(asked: Request, report: DoctorReport) -> int:
    print(report, flush=True)
    if asked.json:
        Path(asked.json).write_text(json.dumps(report.record(), indent=1) + "\n")
    return report.status


__all__ = ["Request", "check_backend", "check_threads", "run_alone", "run_launched"]
