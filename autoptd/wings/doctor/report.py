"""Present the findings of `autoptd doctor`, as text and as plain data.

In: the verdict on the launch, a `MeshReport` per mesh, and the fault that ended the run, if there was one. Out: a table
of all collectives and channels, and a line for each finding.

    report = DoctorReport(verdict, (mesh_report,), find_cluster("dgx-h100"))
    print(report)
    report.status           # 0: all right (slow links are only reported), 1: something is wrong
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from autoptd.ir.mesh import Mesh
from autoptd.wings.doctor.checks import SMALL, Timed, Wrong, slow_ones
from autoptd.wings.doctor.launch import Verdict, ranks_text
from autoptd.wings.planner.cluster import Cluster
from autoptd.wings.planner.terms import Network
from autoptd.wings.words import aligned, bytes_text, count_text, plural, seconds_text

MAX_LINES = 12
# Calls that a line names.
MAX_CALLS = 4
HEAD = ("over", "call", "groups", "latency", "bandwidth", "of the link", "slowest", "on ranks")


@dataclass(frozen=True)
class MeshReport:
    """The findings of all ranks on one mesh: the number of `checks`, wrong results and times."""

    mesh: Mesh
    checks: int
    wrong: tuple[Wrong, ...]
    times: tuple[Timed, ...]


@dataclass(frozen=True)
class DoctorReport:
    """All findings; `cluster` has the expected link speeds, if known; `fault` ended the run early."""

    verdict: Verdict | None
    meshes: tuple[MeshReport, ...] = ()
    cluster: Cluster | None = None
    fault: str = ""
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> list[str]:
        """Findings that must be fixed."""
        found = list(self.verdict.stops) if self.verdict else []
        for mesh in self.meshes:
            found += _wrong_lines(mesh)
        return [*found, self.fault] if self.fault else found

    @property
    def warnings(self) -> list[str]:
        """Findings that may be slow."""
        found = list(self.verdict.warnings) if self.verdict else []
        for mesh in self.meshes:
            found += [_slow_line(mesh.mesh, timed, usual) for timed, usual in slow_ones(mesh.times)]
        return found

    @property
    def status(self) -> int:
        return 1 if self.wrong else 0

    def record(self) -> dict[str, Any]:
        """Return everything as plain data."""
        meshes = []
        for mesh in self.meshes:
            times = [{**asdict(timed), "bytes_per_second": timed.bandwidth} for timed in mesh.times]
            meshes.append({**asdict(mesh), "times": times})
        return {
            "status": self.status,
            "wrong": self.wrong,
            "warnings": self.warnings,
            "launch": self.verdict and asdict(self.verdict),
            "cluster": self.cluster and self.cluster.name,
            "meshes": meshes,
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _lines(report: DoctorReport) -> Iterator[str]:
    if report.verdict is not None:
        yield _launch_line(report.verdict)
    for mesh in report.meshes:
        wrong = f"{len(mesh.wrong)} wrong" if mesh.wrong else "all right"
        yield from ("", f"{mesh.mesh}: {mesh.checks} results compared, {wrong}")
        if mesh.times:
            yield from _table(mesh, report)
    if report.cluster is not None and any(mesh.times for mesh in report.meshes):
        yield from ("", f"'of the link' compares with {report.cluster.name} (--cluster).")
    if report.notes:
        yield from ("", *report.notes)
    # Errors come last, where they are visible in a terminal.
    yield from _list_of("Slow, or not alike", report.warnings)
    yield from _list_of("Wrong", report.wrong)
    is_right = "All right, but see above." if report.warnings else "All right."
    yield from ("", "Something is wrong." if report.wrong else is_right)


def _list_of(title: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield a title and the first lines of a list; an empty list has no title."""
    if lines:
        yield from ("", f"{title}:", *(f"  {line}" for line in lines[:MAX_LINES]))
    if len(lines) > MAX_LINES:
        yield f"  ... and {len(lines) - MAX_LINES} more (all of them with --json FILE)"


def _launch_line(verdict: Verdict) -> str:
    hosts = verdict.host_names
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts, {hosts[0]} to {hosts[-1]}"
    versions = ", ".join(f"{name} {text}" for name, text in verdict.versions.items())
    free = " to ".join(dict.fromkeys((bytes_text(verdict.least_free), bytes_text(verdict.most_free))))
    device = f": {verdict.backend}, {verdict.device_name}, {free} free" if verdict.device_name else ""
    return f"{plural(len(verdict.hosts), 'rank')} on {where}{device}; {versions}"


def _table(mesh: MeshReport, report: DoctorReport) -> Iterator[str]:
    """Yield a row per axis and call: the median of all groups, and the slowest one."""
    rows: list[tuple[str, ...]] = [HEAD]
    is_one_host = report.verdict is None or len(report.verdict.host_names) == 1
    # Groups within a machine and over several use different links.
    alike: dict[tuple[str, str, int], list[Timed]] = defaultdict(list)
    for timed in mesh.times:
        alike[timed.axis, timed.kind, timed.hosts].append(timed)
    for (axis, kind, hosts), some in alike.items():
        small = [timed for timed in some if timed.nbytes <= SMALL]
        large = [timed for timed in some if timed.nbytes > SMALL] or small
        slowest = min(large, key=lambda timed: timed.bandwidth)
        usual = median(timed.bandwidth for timed in large)
        over = axis if is_one_host else f"{axis}, {plural(hosts, 'host')}"
        groups = f"{len(large)} pairs" if kind == "message" else f"{len(large)} of {len(slowest.ranks)}"
        latency = seconds_text(median(timed.seconds for timed in small)) if small else ""
        worst = (bandwidth_text(slowest.bandwidth), _ranks(slowest)) if len(large) > 1 else ("", "")
        share = _share_of_link(usual, slowest, report.cluster)
        rows.append((over, kind, groups, latency, bandwidth_text(usual), share, *worst))
    yield from (f"  {line}" for line in aligned(rows))


def _share_of_link(bandwidth: float, timed: Timed, cluster: Cluster | None) -> str:
    if cluster is None:
        return "?"
    # Ranks of the group on each of its machines, on average.
    local = max(len(timed.ranks) // timed.hosts, 1)
    return f"{bandwidth / float(Network(cluster).bandwidth(local, timed.hosts)):.0%}"


def _ranks(timed: Timed) -> str:
    return f"{timed.ranks[0]} > {timed.ranks[1]}" if timed.kind == "message" else ranks_text(timed.ranks)


def _wrong_lines(report: MeshReport) -> Iterator[str]:
    """Yield a line for each group or channel and rank with a wrong part, with all its calls and dtypes."""
    alike: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[Wrong]] = defaultdict(list)
    for wrong in report.wrong:
        alike[wrong.over, wrong.ranks, wrong.sources].append(wrong)
    for (over, ranks, sources), some in alike.items():
        place, whose = f"over {over} of ranks {ranks_text(ranks)}", ""
        if some[0].what == "message":
            place = f"from rank {ranks[0]} to rank {ranks[1]}"
        elif sources:
            whose = f"the part of rank {ranks_text(sources)} is "
        seen = ranks_text(wrong.seen_by for wrong in some)
        calls, dtypes = (
            dict.fromkeys(wrong.what for wrong in some),
            dict.fromkeys(wrong.dtype for wrong in some),
        )
        what = ", ".join([*calls][:MAX_CALLS]) + (", ..." if len(calls) > MAX_CALLS else "")
        first = f"{some[0].what} of {some[0].dtype}: {some[0].text}"
        yield f"{place} ({report.mesh}): {whose}wrong on rank {seen}: {what} of {', '.join(dtypes)} ({first})"


def _slow_line(mesh: Mesh, timed: Timed, usual: float) -> str:
    took = (
        f"{bytes_text(timed.nbytes)} took {seconds_text(timed.seconds)}, the median is {seconds_text(usual)}"
    )
    if timed.kind == "message":
        return f"from rank {timed.ranks[0]} to rank {timed.ranks[1]} ({mesh}): {took}"
    # Neighbors along pp exchange messages one by one.
    advice = f"; --p {len(timed.ranks)} times its links one by one" if len(timed.ranks) > 2 else ""
    return f"over {timed.axis} of ranks {ranks_text(timed.ranks)} ({mesh}): {timed.kind} of {took}{advice}"


def bandwidth_text(bandwidth: float) -> str:
    """Format bytes/s with a decimal unit: `1.2 GB/s`."""
    return count_text(bandwidth, "B/s")
