"""Ranks as threads: what is right is found right, and whatever is wrong or slow is named with its ranks."""

from __future__ import annotations

import pytest
import torch

from autoptd.errors import RuntimeFault
from autoptd.ir.mesh import Mesh
from autoptd.runtime.world.threads import ThreadWorld
from autoptd.wings.doctor.calls import wait_until
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


def wrong_lines(*args: object, **keys: object) -> list[str]:
    return DoctorReport(None, (examined(*args, **keys),)).wrong  # type: ignore[arg-type]


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "mesh",
    [Mesh(), Mesh(t=3), Mesh(p=3), Mesh(d=2), Mesh(t=2, p=2, d=2), Mesh(p=5), Mesh(t=2, d=2, c=2)],
    ids=str,
)
def test_all_is_right(mesh: Mesh) -> None:
    report = examined(mesh)
    assert report.wrong == () and report.slow == () and report.times == ()
    assert report.checks >= (100 if mesh.size > 1 else 0)
    assert set(report.schedules) == ({"1f1b", "interleaved", "looped_bfs", "zbv"} if mesh.p > 1 else {"1f1b"})


def test_every_group_and_channel_is_timed() -> None:
    mesh, sizes = Mesh(t=2, p=3), (4096, 1 << 14)
    times = examined(mesh, sizes=sizes).times
    collectives = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast")
    expected = {
        (kind, ranks, size) for kind in collectives for size in sizes for ranks in mesh.groups(("tp",))
    }
    expected |= {
        (kind, ranks, size) for kind in collectives for size in sizes for ranks in mesh.groups(("pp",))
    }
    links = {(0, 2), (2, 4), (4, 0), (1, 3), (3, 5), (5, 1)}  # of the looped schedules, too
    links |= {(target, source) for source, target in links}
    expected |= {("message", link, size) for link in links for size in sizes}
    assert {(one.kind, one.ranks, one.nbytes) for one in times} == expected and len(times) == len(expected)
    assert all(one.seconds > 0 and one.bandwidth > 0 for one in times)


def test_a_wrong_channel_is_named_with_its_direction() -> None:
    (line,) = wrong_lines(Mesh(t=2, p=2), channels={(3, 1): WrongChannel})
    assert line.startswith(
        "from rank 3 to rank 1 (t=2 p=2 d=1): what arrives is wrong: message, also in 1f1b, interleaved, l"
    )
    assert "of bfloat16 (" in line and "1 of 1021 elements" not in line.partition("of bfloat16")[0]


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


def test_a_wrong_sum_beside_messages_names_its_schedule() -> None:
    class OnlyStarted(WrongSum):
        def all_reduce(self, x: torch.Tensor, site: str, op: str = "sum") -> torch.Tensor:
            return self._right.all_reduce(x, site, op)

        def all_reduce_start(self, flat: torch.Tensor, site: str) -> object:
            return self._right.all_reduce_start(flat.mul_(2) if flat.numel() > 10_000 else flat, site)

    (line,) = wrong_lines(Mesh(p=2, d=2), groups={(3, "dp"): OnlyStarted})
    assert line.startswith("over dp of ranks 2, 3 (t=1 p=2 d=2): the part of rank 3 is wrong on rank 2, 3: ")
    assert (
        ": all_reduce_start with others under way, in 1f1b, interleaved, looped_bfs, zbv, of float32" in line
    )


def test_a_slow_channel_is_named() -> None:
    report = examined(Mesh(t=2, p=2), channels={(2, 0): SlowChannel}, sizes=(4096, 1 << 18), counts=(1,))
    assert report.wrong == () and ("message", (2, 0)) in {(one.kind, one.ranks) for one in report.slow}
    told = DoctorReport(None, (report,))
    assert told.status == 0, "slow is no error"
    line = next(line for line in told.warnings if line.startswith("from rank 2 to rank 0"))
    assert "256 KiB take " in line and "the median of 3 others is " in line
    assert "All right, but see above." in str(told)


def test_a_slow_group_is_named() -> None:
    report = examined(Mesh(t=2, d=3), groups={(2, "tp"): SlowGroup}, sizes=(4096,), counts=())
    assert ("tp", (2, 3)) in {(one.axis, one.ranks) for one in report.slow}


def test_what_is_never_done_ends_with_the_timeout() -> None:
    world = ThreadWorld(Mesh(), timeout=0.05).worlds[0]
    world.at = "doctor: channels"
    with pytest.raises(
        RuntimeFault, match=r"rank 0 at doctor: channels: sum of 4 float32: not done after 0\.05 s"
    ):
        wait_until(world, "sum of 4 float32", lambda: False)


def test_a_group_that_is_all_wrong_hides_nothing_else() -> None:
    lines = wrong_lines(
        Mesh(t=2, p=2), groups={(0, "tp"): WrongSum, (1, "tp"): WrongScatter}, channels={(3, 1): WrongChannel}
    )
    assert [line.partition(" (t=2")[0] for line in lines] == [
        "over tp of ranks 0, 1",
        "over tp of ranks 0, 1",
        "from rank 3 to rank 1",
    ]
