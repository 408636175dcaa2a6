"""Ranks as threads: right results are found right, and what is wrong or slow is named with its ranks."""

from __future__ import annotations

import inspect

import pytest
import torch

from autoptd.ir.mesh import Mesh
from autoptd.runtime.world.threads import ThreadWorld
from autoptd.runtime.world.world import Group
from autoptd.wings.doctor.checks import (
    COLLECTIVES,
    MAX_ADDENDS,
    METHODS,
    PERIOD,
    Checks,
    Part,
    Result,
    Timed,
    message,
    slow_ones,
)
from autoptd.wings.doctor.report import DoctorReport
from tests.wings.doctor.broken import (
    SlowChannel,
    SlowGroup,
    WrongChannel,
    WrongGather,
    WrongScatter,
    WrongSum,
    examined,
)

CPU = torch.device("cpu")
MIB = 1 << 20


def wrong_lines(*args: object, **keys: object) -> list[str]:
    return DoctorReport(None, (examined(*args, **keys),)).wrong  # type: ignore[arg-type]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(t=3), Mesh(p=3), Mesh(t=2, p=2, d=2), Mesh(p=5), Mesh(t=2, d=2, c=2)], ids=str
)
def test_all_is_right(mesh: Mesh) -> None:
    report = examined(mesh)
    assert report.wrong == () and report.times == ()
    assert report.checks >= (100 if mesh.size > 1 else 0)


def test_every_method_of_a_group_is_checked() -> None:
    methods = {name for name, _ in inspect.getmembers(Group, inspect.isfunction) if not name.startswith("__")}
    assert methods == {name.split()[0] for name in METHODS}


class Ranks(Group):
    """A group without any calls."""

    def __init__(self, index: int, size: int) -> None:
        super().__init__(tuple(range(size)), index)


Ranks.__abstractmethods__ = frozenset()


@pytest.mark.parametrize("size", [1, 2, 7, 64, 300])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sums_are_exact_in_any_order_and_name_whose_part_is_wrong(size: int, dtype: torch.dtype) -> None:
    parts = [Part(Ranks(index, size), 2000, dtype, CPU, "") for index in range(size)]
    for order in (range(size), torch.randperm(size).tolist()):
        added, largest = torch.zeros(2000, dtype=dtype), torch.full((2000,), -100).to(dtype)
        for index in order:
            added += parts[index].share()
            largest = torch.maximum(largest, parts[index].share())
        assert torch.equal(added, parts[0].total()) and torch.equal(largest, parts[0].total(op="max"))
    checks = Checks(ThreadWorld(Mesh()).worlds[0])
    right, spoiled = parts[0].total(), parts[size - 1].share()
    checks.compare("sum", "tp", range(size), Result((right + spoiled)[700:], right[700:], offset=700))
    assert [wrong.sources for wrong in checks.wrong] == [(size - 1,)]


def test_sums_stay_exact_in_bfloat16_whatever_the_size() -> None:
    part = Part(Ranks(0, 8 * MAX_ADDENDS), PERIOD, torch.float32, CPU, "")
    assert part.total().abs().max() < 256


def test_messages_differ_by_ends_and_number() -> None:
    ends = [(0, 1, 0), (1, 0, 0), (0, 1, 1), (0, 2, 0), (251, 1, 0), (3000, 3008, 0)]
    for dtype in (torch.bfloat16, torch.bool):
        made = [message(source, target, 3000, dtype, CPU, number) for source, target, number in ends]
        for place, sent in enumerate(made):
            assert not any(torch.equal(sent, other) for other in made[place + 1 :])
            assert not torch.equal(sent[:1024], sent[1024:2048]), "a piece that lands elsewhere does not fit"


def test_another_shape_or_dtype_is_wrong() -> None:
    checks, x = Checks(ThreadWorld(Mesh()).worlds[0]), torch.arange(5.0)
    for what, got in (("right", x), ("dtype", x.double()), ("shape", x[1:]), ("value", x * torch.nan)):
        checks.compare(what, "tp", (0,), Result(got, x.clone()))
    assert [wrong.what for wrong in checks.wrong] == ["dtype", "shape", "value"]


def test_every_group_and_channel_is_timed() -> None:
    mesh, sizes = Mesh(t=2, p=3), (4096, 1 << 14)
    times = examined(mesh, sizes=sizes).times
    expected = set()
    for axis in ("tp", "pp"):
        expected |= {
            (kind, ranks, n) for kind in COLLECTIVES for ranks in mesh.groups((axis,)) for n in sizes
        }
    # In a ring, as in looped schedules.
    links = {(0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1)}
    links |= {(target, source) for source, target in links}
    expected |= {("message", link, size) for link in links for size in sizes}
    assert {(timed.kind, timed.ranks, timed.nbytes) for timed in times} == expected
    assert len(times) == len(expected) and all(timed.bandwidth > 0 for timed in times)


def test_a_wrong_channel_is_named_with_its_direction() -> None:
    (line,) = wrong_lines(Mesh(t=2, p=2), channels={(3, 1): WrongChannel})
    assert line.startswith("from rank 3 to rank 1 (t=2 p=2 d=1): wrong on rank 1: message of bfloat16 (")


def test_whose_part_of_a_sum_is_wrong_is_named() -> None:
    """Rank 2 hands in wrong numbers: all of its group see it, and know whose they are."""
    (line,) = wrong_lines(Mesh(t=4), groups={(2, "tp"): WrongSum})
    assert line.startswith(
        "over tp of ranks 0-3 (t=4 p=1 d=1): the part of rank 2 is wrong on rank 0-3: all_reduce"
    )
    assert "of float32 (" in line


def test_sums_over_other_tokens_and_samples_at_once_are_checked() -> None:
    (line,) = wrong_lines(Mesh(c=2, d=2), groups={(2, "dp x cp"): WrongSum})
    assert line.startswith(
        "over dp x cp of ranks 0-3 (t=1 p=1 d=2 c=2): the part of rank 2 is wrong on rank 0-3: "
    )


def test_who_gets_a_part_wrong_is_named() -> None:
    (line,) = wrong_lines(Mesh(t=3, d=2), groups={(4, "tp"): WrongGather})
    assert line.startswith(
        "over tp of ranks 3-5 (t=3 p=1 d=2): the part of rank 3 is wrong on rank 4: all_gather of "
    )
    assert "bool" in line and "int64" in line


def test_of_a_sum_that_is_all_wrong_nobody_is_accused() -> None:
    (line,) = wrong_lines(Mesh(t=4), groups={(1, "tp"): WrongScatter})
    assert line.startswith("over tp of ranks 0-3 (t=4 p=1 d=1): wrong on rank 1: reduce_scatter of float32")


def test_a_slow_channel_is_named() -> None:
    report = examined(Mesh(t=2, p=2), channels={(2, 0): SlowChannel}, sizes=(4096, 1 << 18), counts=(1,))
    assert report.wrong == ()
    found = DoctorReport(None, (report,))
    assert found.status == 0, "slow is not an error"
    line = next(line for line in found.warnings if line.startswith("from rank 2 to rank 0"))
    assert "256 KiB took " in line and ", the median is " in line
    assert "All right, but see above." in str(found)


def test_a_slow_group_is_named() -> None:
    report = examined(Mesh(t=2, d=3), groups={(2, "tp"): SlowGroup}, sizes=(1 << 14,), counts=())
    assert ("tp", (2, 3)) in {(timed.axis, timed.ranks) for timed, _ in slow_ones(report.times)}


def link(source: int, target: int, seconds: float, hosts: int = 1) -> Timed:
    return Timed("message", "pp", (source, target), MIB, seconds, hosts)


def group(kind: str, ranks: tuple[int, ...], seconds: float) -> Timed:
    return Timed(kind, "tp", ranks, MIB, seconds, 1)


def test_slow_is_twice_the_median_of_its_kind() -> None:
    times = [link(rank, rank + 4, 0.010 + 0.001 * rank) for rank in range(4)] + [link(4, 0, 0.05)]
    times += [link(rank, rank + 8, 0.2, hosts=2) for rank in range(4)]
    assert [(timed.ranks, usual) for timed, usual in slow_ones(times)] == [((4, 0), 0.012)]
    assert [timed.ranks for timed, _ in slow_ones([link(0, 1, 0.01), link(1, 0, 0.03)])] == [(1, 0)]
    assert slow_ones([link(0, 1, 0.01), link(1, 0, 0.015)]) == slow_ones([link(0, 1, 0.01)]) == []


def test_a_group_is_slow_in_most_of_its_calls_or_not_at_all() -> None:
    usual = [group(kind, ranks, 0.01) for kind in COLLECTIVES for ranks in ((0, 1), (2, 3))]
    one_hiccup = [group(kind, (4, 5), 0.5 if kind == "broadcast" else 0.01) for kind in COLLECTIVES]
    assert slow_ones([*usual, *one_hiccup]) == []
    ((slow, seconds),) = slow_ones([*usual, *(group(kind, (4, 5), 0.03) for kind in COLLECTIVES)])
    assert slow.ranks == (4, 5) and slow.seconds == 3 * seconds


def test_bandwidth_is_what_a_rank_sends() -> None:
    assert link(0, 1, 0.5).bandwidth == 2 * MIB
    assert group("all_reduce", (0, 1, 2, 3), 1.0).bandwidth == 2 * MIB * 3 / 4
    assert group("all_gather", (0, 1, 2, 3), 1.0).bandwidth == MIB * 3 / 4
    assert group("all_to_all", (0, 1, 2, 3), 1.0).bandwidth == MIB * 3 / 4


def test_a_group_that_is_all_wrong_hides_nothing_else() -> None:
    lines = wrong_lines(
        Mesh(t=2, p=2), groups={(0, "tp"): WrongSum, (1, "tp"): WrongScatter}, channels={(3, 1): WrongChannel}
    )
    assert [line.partition(" (t=2")[0] for line in lines] == [
        "over tp of ranks 0, 1",
        "over tp of ranks 0, 1",
        "from rank 3 to rank 1",
    ]
