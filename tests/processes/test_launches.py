"""Real processes over gloo: every shape of mesh and every schedule start, and train as one device does.

Eight processes run all worlds one after the other, those of fewer ranks without the last ones.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest

import autoptd
from autoptd.ir.actions import SCHEDULES
from tests.forks import CONTEXT
from tests.parity.models import batch, gpt
from tests.ports import free_port
from tests.processes.launches import Launch, serve
from tests.runtime.tied_model import Case

pytestmark = pytest.mark.processes

# What hung, or had not been tried: (t, p, d, v), and more than two pipeline ranks of each schedule.
MESHES = [
    Case(p=3, layers=3, rows=6, m=3, schedule="gpipe"),
    Case(p=3, layers=3, rows=6, m=3, schedule="zb_h1"),
    Case(p=4, v=2, layers=8, rows=4, m=4, schedule="interleaved"),
    Case(p=4, v=2, layers=8, rows=8, m=8, schedule="looped_bfs"),
    Case(p=4, v=2, layers=8, rows=4, m=4, schedule="zbv"),
    Case(p=8, layers=8, rows=8, m=8),
    Case(t=2, p=3, layers=3, rows=6, m=3, p2p="scatter_gather"),
    Case(p=3, d=2, layers=3, rows=12, m=6, schedule="zb_2p"),
    Case(t=2, p=4, rows=4, m=4),
    Case(p=2, d=4, rows=8, m=2, schedule="gpipe"),
    Case(t=4, p=2, rows=4, m=4, schedule="zb_2p"),
    Case(t=2, p=2, d=2, rows=8, m=2, p2p="scatter_gather", order="pp-dp-tp"),
]


def test_every_schedule_and_every_mesh_are_there() -> None:
    assert {case.schedule for case in MESHES} == set(SCHEDULES)
    wanted = {
        (1, 3, 1, 1),
        (1, 4, 1, 2),
        (1, 8, 1, 1),
        (2, 3, 1, 1),
        (1, 3, 2, 1),
        (2, 4, 1, 1),
        (1, 2, 4, 1),
        (4, 2, 1, 1),
        (2, 2, 2, 1),
    }
    assert {(case.t, case.p, case.d, case.v) for case in MESHES} == wanted


def launch_of(cases: list[Case | Path], size: int, group: str = "", **keywords: object) -> Launch:
    return Launch(size, free_port(), tuple(cases), group, **keywords)  # type: ignore[arg-type]


def size_of(case: Case) -> int:
    return case.t * case.p * case.d


def run(launches: list[Launch], timeout: float = 60.0, patience: float = 300.0) -> None:
    """Run the launches on as many processes as the largest needs, forked from a server that has imported torch once."""
    out = CONTEXT.Queue()
    size = max(launch.size for launch in launches)
    processes = [CONTEXT.Process(target=serve, args=(rank, launches, timeout, out)) for rank in range(size)]
    for process in processes:
        process.start()
    deadline = time.monotonic() + patience
    for process in processes:
        process.join(max(deadline - time.monotonic(), 0.1))
    hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    for process in processes:
        process.kill()
    said = {}
    while not out.empty():
        number, rank, text = out.get()
        said[number, rank] = text
    assert not any(said.values()), next(text for text in said.values() if text)
    assert not hung, f"ranks {hung} hung"
    assert set(said) == {
        (number, rank) for number, launch in enumerate(launches) for rank in range(launch.size)
    }


# Below, those of up to six ranks run on the stand-in for NCCL, over gloo as well.
@pytest.mark.parametrize(
    "cases",
    [[MESHES[0], MESHES[5], MESHES[-1]], pytest.param(MESHES, marks=pytest.mark.thorough)],
    ids=["few", "all"],
)
def test_all_meshes_and_schedules_train_like_one_device(cases: list[Case]) -> None:
    """Under torchrun's environment, and with a default group of the user's."""
    sizes = sorted({size_of(case) for case in cases})
    run(
        [
            launch_of([case for case in cases if size_of(case) == size], size, "" if size < 8 else "gloo")
            for size in sizes
        ]
    )


@pytest.mark.parametrize("more", [False, pytest.param(True, marks=pytest.mark.thorough)])
def test_a_default_group_of_the_users(more: bool) -> None:
    """Bound to a device; with groups of the user's own on some ranks; with ranks that come late, the first one too."""
    late, crossed = Case(p=3, layers=3, rows=6, m=3), Case(t=2, p=2, rows=4)
    if more:
        first = launch_of([crossed], 4, "", starts_late=(0, 1))
    else:
        first = launch_of([late], 3, "gloo", has_own_groups=True, starts_late=(0, 2))
    run([first, launch_of([Case(p=4, m=4) if more else crossed], 4, "bound", has_own_groups=True)])


@pytest.mark.parametrize("sizes", [(4,), pytest.param((3, 6, 8), marks=pytest.mark.thorough)], ids=str)
def test_operations_in_one_order_over_all_communicators(sizes: tuple[int, ...]) -> None:
    """What NCCL asks for, and no Work of synchronous collectives: on the stand-in, which gets stuck otherwise."""
    launches = []
    for size in sizes:
        launches.append(launch_of([case for case in MESHES if size_of(case) == size], size, "in_order"))
    run(launches, 20.0)


# Where scattered messages are gathered, and where W actions do something.
COMPILED = [{"t": 2, "p": 2, "p2p": "scatter_gather"}, {"p": 4, "v": 2, "schedule": "zbv"}]
BOTH = [("in_order", ""), ("", "in_order")]


@pytest.mark.parametrize(
    "groups", [("in_order",), *(pytest.param(both, marks=pytest.mark.thorough) for both in BOTH)], ids=str
)
def test_compiled_programs_on_both_kinds_of_groups(tmp_path: Path, groups: tuple[str, ...]) -> None:
    launches = []
    for number, group in enumerate(groups):
        model, folder = gpt(8, width=16).double(), tmp_path / str(number)
        program = autoptd.compile(model, **COMPILED[number], backend="local", example_inputs=batch(24))  # type: ignore[arg-type]
        program.save(folder)
        launches.append(launch_of([folder], 4, group))
    run(launches)
