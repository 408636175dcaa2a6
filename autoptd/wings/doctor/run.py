"""Run `autoptd doctor` on all ranks of torchrun, or with threads of this process as ranks.

In: a `Request`. Out: the exit status. Every rank has the same `DoctorReport`; rank 0 prints it.

    run_launched(Request(timeout=30.0))     # on every rank of torchrun
    run_alone(Request())
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path

import torch.distributed as dist

from autoptd.errors import AutoptdError, PlanError
from autoptd.ir.machine import machine_of_device
from autoptd.ir.mesh import DEGREES, USUAL_DEGREES, Mesh
from autoptd.ir.scopes import activity
from autoptd.runtime.world.device_watch import WATCHDOG_MARGIN
from autoptd.runtime.world.processes import DistributedWorld
from autoptd.runtime.world.rendezvous import int_from_env
from autoptd.runtime.world.threads import ThreadWorld, run_ranks
from autoptd.runtime.world.world import Communicators, World, on_device
from autoptd.wings.doctor.checks import Checks, check_world, sizes_on, time_world
from autoptd.wings.doctor.launch import Lobby, Verdict, judge, own_facts
from autoptd.wings.doctor.report import DoctorReport, MeshReport
from autoptd.wings.planner.cluster import CPU, Cluster, find_cluster

# The default mesh of threads: several ranks along every axis.
THREADS = Mesh.of(dict.fromkeys(USUAL_DEGREES, 2))
MAX_THREADS = 64
# Elements of the tensors that are checked, with processes and with threads.
COUNTS, SMALL_COUNTS = (1, 1021, 1 << 20), (1, 1021)


@dataclass(frozen=True)
class Request:
    """The checks: degrees of mesh axes that are given, device, backend, `timeout` in seconds, a file for JSON."""

    degrees: Mapping[str, int] = field(default_factory=dict)
    device: str | None = None
    backend: str | None = None
    timeout: float = 30.0
    cluster: str | None = None
    json: str | None = None

    def __str__(self) -> str:
        """The values that must be the same on all ranks."""
        values = {**self.degrees, "backend": self.backend, "timeout": self.timeout}
        return " ".join(f"{name}={value}" for name, value in values.items() if value is not None)


def run_launched(request: Request) -> int:
    """Meet the other ranks, check everything, print; return the exit status."""
    size = int_from_env("WORLD_SIZE")
    # Raises before any rank waits for another.
    requested_mesh(size, request.degrees)
    if size == 1:
        return run_alone(request)
    lobby = Lobby(request.timeout)
    verdict, meshes, fault = None, list[MeshReport](), ""
    try:
        verdict = lobby.agree(own_facts(lobby.rank, str(request), request.device, request.backend))
        if not verdict.stops:
            _examine_all(request, lobby, verdict, meshes)
    # RuntimeError and OSError are torch's: no connection, no such host.
    except (AutoptdError, RuntimeError, OSError) as error:
        fault = f"{type(error).__name__}: {error}"
    if lobby.rank == 0:
        report = DoctorReport(verdict, tuple(meshes), _cluster(request, verdict), fault)
        _print(request, report)
        lobby.report_printed(has_fault=bool(fault))
    else:
        report = DoctorReport(verdict, tuple(meshes), fault=fault)
        if fault:
            # Rank 0 may be the one that failed.
            print(fault, file=sys.stderr, flush=True)
        lobby.wait_for_report(has_fault=bool(fault))
    if fault:
        # A normal exit would wait for threads and kernels that never finish.
        os._exit(report.status)
    return report.status


def _examine_all(request: Request, lobby: Lobby, verdict: Verdict, found: list[MeshReport]) -> None:
    """Check one mesh after the other, and add each result to `found`, since the next mesh may hang."""
    # Otherwise NCCL's watchdog would end the process before our timeout names missing ranks.
    limit = timedelta(seconds=request.timeout + (WATCHDOG_MARGIN if verdict.backend == "nccl" else 0.0))
    # The lobby's store instead of a second one.
    store = dist.PrefixStore("default", lobby.store)
    store.set_timeout(limit)
    dist.init_process_group(
        verdict.backend, store=store, timeout=limit, rank=lobby.rank, world_size=lobby.size
    )
    requested = requested_mesh(lobby.size, request.degrees)
    for mesh in [requested] if requested else usual_meshes(lobby.size, verdict.per_node):
        links = links_of(mesh.pipeline_ranks)
        communicators = Communicators(links=links)
        world = DistributedWorld(mesh, communicators, request.device, request.timeout, verdict.backend)
        try:
            with activity(f"trying {mesh}"), on_device(world.device):
                found.append(examine(world, links, verdict.hosts, COUNTS, sizes_on(world.device)))
        except BaseException as error:
            world.report_fault(error)
            raise
        world.close()
    dist.destroy_process_group()


def examine(
    world: World,
    links: Sequence[tuple[int, int]],
    hosts: Sequence[int],
    counts: Sequence[int],
    sizes: Sequence[int],
) -> MeshReport:
    """Check results, then time calls of `sizes` bytes."""
    checks = Checks(world)
    check_world(checks, links, counts)
    world.at = "doctor: times"
    times = time_world(world, links, hosts, sizes) if sizes else []
    world.at = "doctor: findings"
    found = world.everyone().gather_objects((checks.count, checks.wrong), "doctor: findings")
    wrong = [one for _, some in found for one in some]
    return MeshReport(world.mesh, sum(count for count, _ in found), tuple(wrong), tuple(times))


def run_alone(request: Request) -> int:
    """Check this process's device, and threads as ranks; print, return the exit status."""
    mesh = Mesh.of(request.degrees) if request.degrees else THREADS
    if mesh.size > MAX_THREADS:
        flags = " ".join(f"--{name} {degree}" for name, degree in mesh.degrees.items())
        command = f"torchrun --nproc-per-node {mesh.size} -m -- autoptd doctor {flags}"
        raise PlanError(f"{mesh}", f"{mesh.size} ranks, and this process is alone", command)
    facts = own_facts(0, str(request), request.device, request.backend)
    verdict = judge([facts])
    if verdict.stops:
        return _print(request, DoctorReport(verdict))
    links = links_of(mesh.pipeline_ranks)
    shared = ThreadWorld(mesh, Communicators(links=links), facts.device, request.timeout)
    hosts = [0] * mesh.size
    with activity(f"trying {mesh} with ranks as threads"):
        # Nothing is sent between threads, so nothing is timed.
        report = run_ranks(shared, lambda world: examine(world, links, hosts, SMALL_COUNTS, ()))[0]
    notes = (
        "Only threads of this process were checked as ranks. To check processes and the links between them:",
        f"  torchrun --nproc-per-node {mesh.size} -m -- autoptd doctor",
    )
    return _print(request, DoctorReport(verdict, (report,), notes=notes))


def requested_mesh(size: int, degrees: Mapping[str, int | None]) -> Mesh | None:
    """Return the mesh with some degrees, None without any; a degree that is not given takes the remaining ranks.

    PlanError if they do not fit.
    """
    given = {name: degree for name in DEGREES if (degree := degrees.get(name)) is not None}
    if not given:
        return None
    known, is_full = math.prod(given.values()), given.keys() >= set(USUAL_DEGREES)
    if size % known or (is_full and known != size):
        site = " ".join(f"{name}={degree}" for name, degree in given.items())
        fact = f"{size} ranks are not divisible by {known}"
        if is_full:
            fact = f"{'*'.join(given)} is {known}, and there are {size} ranks"
        names = ", ".join(given if is_full else USUAL_DEGREES)
        raise PlanError(site, fact, f"{names} whose product is {size}, or omit them")
    # Preferably more replicas, then more stages, then more parts of a layer.
    left_out = [name for name in ("d", "p", "t") if name not in given]
    return Mesh.of({**given, left_out[0]: size // known} if left_out else given)


def usual_meshes(size: int, per_node: int) -> list[Mesh]:
    """Return the default meshes, with `per_node` ranks on a machine: tensor ranks on each machine and replicas over
    machines; and a stage on each machine (two on a single one, if they divide its ranks) with replicas.
    """
    local = math.gcd(size, per_node)
    nodes = size // local
    stages = nodes
    if nodes == 1:
        stages = next((factor for factor in range(2, size) if size % factor == 0), size)
    meshes = [Mesh.of({"t": local, "d": nodes}), Mesh.of({"p": stages, "d": size // stages})]
    return list(dict.fromkeys(meshes))


def links_of(stages: int) -> tuple[tuple[int, int], ...]:
    """Return the (source, target) pipeline ranks of neighbors in a ring, both ways, as looped schedules use them."""
    ahead = {(stage, (stage + 1) % stages) for stage in range(stages)} if stages > 1 else set()
    return tuple(sorted(ahead | {(target, source) for source, target in ahead}))


def _cluster(request: Request, verdict: Verdict | None) -> Cluster | None:
    """Return the cluster with the expected link speeds, as requested or by the device."""
    if verdict is None:
        return None
    name = request.cluster or (
        CPU if verdict.device_name == "CPU" else machine_of_device(verdict.device_name)
    )
    return None if name is None else find_cluster(name)


def _print(request: Request, report: DoctorReport) -> int:
    print(report, flush=True)
    if request.json:
        Path(request.json).write_text(json.dumps(report.record(), indent=1) + "\n")
    return report.status
