"""What `autoptd doctor` found, as text and as plain data.

In: the verdict on the launch, a `MeshReport` per mesh, and what stopped it, if something did. Out:
`DoctorReport`; its text is a table of every collective and channel, and a line for everything that is wrong
or slow.

    report = DoctorReport(verdict, (mesh_report,), find_cluster("dgx-h100"))
    print(report)
    report.status           # 0: all right (slow is only said), 1: something is wrong
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from autoptd.ir.mesh import Mesh
from autoptd.wings.doctor.calls import Wrong
from autoptd.wings.doctor.examine import MeshReport
from autoptd.wings.doctor.facts import Verdict
from autoptd.wings.doctor.slow import SMALL, Slow, Timed
from autoptd.wings.doctor.words import bandwidth_text, ranks_text, seconds_text
from autoptd.wings.planner.cluster import Cluster
from autoptd.wings.planner.network import Network
from autoptd.wings.viz.words import bytes_text

MAX_LINES = 12
# How many calls a line names.
MAX_CALLS = 4
HEAD = ("over", "call", "groups", "latency", "bandwidth", "of the link", "slowest", "on ranks")


@dataclass(frozen=True)
class DoctorReport:
    """See the module's docstring.

    `verdict`: None where ranks did not meet; `cluster` says what the links should give (None: unknown);
    `fault` ended it early.
    """

    verdict: Verdict | None
    meshes: tuple[MeshReport, ...] = ()
    cluster: Cluster | None = None
    fault: str = ""
    notes: tuple[str, ...] = ()

    @property
    def wrong(self) -> list[str]:
        """What has to be put right."""
        found = list(self.verdict.stops) if self.verdict else []
        for mesh in self.meshes:
            found += _wrong_lines(mesh.mesh, mesh.wrong)
        if self.fault:
            found.append(self.fault)
        return found

    @property
    def warnings(self) -> list[str]:
        """What may be slow."""
        lines = list(self.verdict.warnings) if self.verdict else []
        for mesh in self.meshes:
            lines += [_slow_line(mesh.mesh, slow) for slow in mesh.slow]
        return lines

    @property
    def status(self) -> int:
        return 1 if self.wrong else 0

    def record(self) -> dict[str, Any]:
        """Return everything as plain data."""
        cluster = None if self.cluster is None else self.cluster.name
        return {
            "status": self.status,
            "wrong": self.wrong,
            "warnings": self.warnings,
            "launch": asdict(self.verdict) if self.verdict else None,
            "cluster": cluster,
            "meshes": [
                {**asdict(mesh), "times": list(map(_time_record, mesh.times))} for mesh in self.meshes
            ],
        }

    def __str__(self) -> str:
        return "\n".join(_lines(self))


def _time_record(timed: Timed) -> dict[str, Any]:
    return {**asdict(timed), "bytes_per_second": timed.bandwidth}


def _lines(report: DoctorReport) -> Iterator[str]:
    if report.verdict is not None:
        yield _launch_line(report.verdict)
    for mesh in report.meshes:
        yield ""
        right = "are right" if not mesh.wrong else "looked at, not all of them right"
        yield f"{mesh.mesh}: {mesh.checks} results {right}; schedules: {', '.join(mesh.schedules)}"
        if mesh.times:
            yield from _table(mesh, report)
    if report.cluster is not None and any(mesh.times for mesh in report.meshes):
        yield ""
        yield f"The link is that of {report.cluster.name}, as the planner has it (--cluster)."
    if report.notes:
        yield from ("", *report.notes)
    # What is wrong comes last, where a terminal stands still.
    yield from _list_of("Slow, or not alike", report.warnings)
    yield from _list_of("Wrong", report.wrong)
    yield ""
    if report.wrong:
        yield "Something is wrong."
    else:
        yield "All right, but see above." if report.warnings else "All right."


def _list_of(title: str, lines: Sequence[str]) -> Iterator[str]:
    """Yield a title and the first lines of a list, nothing for an empty one."""
    if not lines:
        return
    yield from ("", f"{title}:")
    for line in lines[:MAX_LINES]:
        yield f"  {line}"
    if len(lines) > MAX_LINES:
        yield f"  ... and {len(lines) - MAX_LINES} more: --json FILE has all"


def _launch_line(verdict: Verdict) -> str:
    size, hosts = len(verdict.hosts), verdict.host_names
    where = hosts[0] if len(hosts) == 1 else f"{len(hosts)} hosts, {hosts[0]} to {hosts[-1]}"
    versions = ", ".join(f"{name} {text}" for name, text in verdict.versions.items())
    free = bytes_text(verdict.least_free)
    if bytes_text(verdict.most_free) != free:
        free += f" to {bytes_text(verdict.most_free)}"
    ranks = f"{size} rank{'s' * (size != 1)}"
    device = f": {verdict.backend}, {verdict.device_name}, {free} free" if verdict.device_name else ""
    return f"{ranks} on {where}{device}; {versions}"


def _table(mesh: MeshReport, report: DoctorReport) -> Iterator[str]:
    """Yield a row for every call along every axis: of all its groups the median, and the slowest."""
    rows: list[tuple[str, ...]] = [HEAD]
    is_one_host = report.verdict is None or len(report.verdict.host_names) == 1
    # Groups within a machine and over several are different links: a row each.
    alike: dict[tuple[str, str, int], list[Timed]] = defaultdict(list)
    for timed in mesh.times:
        alike[timed.axis, timed.kind, timed.hosts].append(timed)
    for (axis, kind, hosts), some in alike.items():
        small = [timed for timed in some if timed.nbytes <= SMALL]
        # The latency is that of small calls, the bandwidth that of large ones.
        large = [timed for timed in some if timed.nbytes > SMALL] or small
        slowest = min(large, key=lambda timed: timed.bandwidth)
        usual = median(timed.bandwidth for timed in large)
        over = axis if is_one_host else f"{axis}, {hosts} host{'s' * (hosts > 1)}"
        groups = f"{len(large)} pairs" if kind == "message" else f"{len(large)} of {len(slowest.ranks)}"
        latency = seconds_text(median(timed.seconds for timed in small)) if small else ""
        share = _share_of_link(usual, slowest, report.cluster)
        # Of a single group, the median is the slowest.
        worst = (bandwidth_text(slowest.bandwidth), _ranks(slowest)) if len(large) > 1 else ("", "")
        rows.append((over, kind, groups, latency, bandwidth_text(usual), share, *worst))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [text.ljust(width) for text, width in zip(row, widths, strict=True)]
        yield "  " + "  ".join(cells).rstrip()


def _share_of_link(bandwidth: float, timed: Timed, cluster: Cluster | None) -> str:
    if cluster is None:
        return "?"
    # Ranks of the group on each of its machines, on average.
    local = max(len(timed.ranks) // timed.hosts, 1)
    return f"{bandwidth / float(Network(cluster).bandwidth(local, timed.hosts)):.0%}"


def _ranks(timed: Timed | Slow) -> str:
    return f"{timed.ranks[0]} > {timed.ranks[1]}" if timed.kind == "message" else ranks_text(timed.ranks)


def _wrong_lines(mesh: Mesh, wrong: Sequence[Wrong]) -> list[str]:
    """Return one line for each group, channel and rank whose part is wrong, with all calls and dtypes in
    which it was.
    """
    alike: dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[Wrong]] = defaultdict(list)
    for fault in wrong:
        alike[fault.over, fault.ranks, fault.sources].append(fault)
    return [_wrong_line(mesh, over, ranks, sources, some) for (over, ranks, sources), some in alike.items()]


def _wrong_line(
    mesh: Mesh, over: str, ranks: Sequence[int], sources: Sequence[int], some: Sequence[Wrong]
) -> str:
    seen, dtypes = ranks_text([fault.seen_by for fault in some]), dict.fromkeys(fault.dtype for fault in some)
    if some[0].what.startswith("message"):
        place, whose = f"from rank {ranks[0]} to rank {ranks[1]}", "what arrives is wrong"
    else:
        place = f"over {over} of ranks {ranks_text(ranks)}"
        whose = f"wrong on rank {seen}"
        # Empty where it cannot be told whose part it is: then the sum is wrong as a whole.
        if sources:
            whose = f"the part of rank {ranks_text(sources)} is {whose}"
    first = some[0]
    what = f"{_calls_text(some)} of {', '.join(dtypes)}"
    return f"{place} ({mesh}): {whose}: {what} ({first.what} of {first.dtype}: {first.text})"


def _calls_text(some: Sequence[Wrong]) -> str:
    """Name what was called alone, and in which schedules: `all_reduce, all_gather, also in 1f1b`."""
    # "all_reduce" was called by itself, "all_reduce in 1f1b" while a schedule was played.
    alone = [fault.what for fault in some if " in " not in fault.what]
    inside = [fault.what.partition(" in ") for fault in some if " in " in fault.what]
    calls = list(dict.fromkeys(alone or [what for what, _, _ in inside]))
    schedules = ", ".join(dict.fromkeys(name for _, _, name in inside))
    text = ", ".join(calls[:MAX_CALLS])
    if len(calls) > MAX_CALLS:
        text += ", ..."
    if not alone:
        return f"{text} with others under way, in {schedules},"
    return f"{text}, also in {schedules}," if schedules else text


def _slow_line(mesh: Mesh, slow: Slow) -> str:
    size, took, usual = bytes_text(slow.nbytes), seconds_text(slow.seconds), seconds_text(slow.usual)
    beside = f"the median of {slow.others} other{'s' * (slow.others != 1)} is {usual}"
    if slow.kind == "message":
        return f"from rank {slow.ranks[0]} to rank {slow.ranks[1]} ({mesh}): {size} take {took}, {beside}"
    advice = ""
    # Which link of the group is slow: along pp, neighbours exchange messages one by one.
    if len(slow.ranks) > 2:
        advice = f"; --p {len(slow.ranks)} times its links one by one, where ranks are neighbours"
    place = f"over {slow.axis} of ranks {ranks_text(slow.ranks)} ({mesh})"
    return f"{place}: {slow.kind} of {size} takes {took}, {beside}{advice}"


__all__ = ["DoctorReport"]
