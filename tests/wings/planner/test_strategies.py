"""Which strategy when."""

from __future__ import annotations

from autoptd.wings.planner.cluster import find_cluster
from autoptd.wings.planner.plan import cases_text, plan, slowed, which_when

SMALL = {"layers": 12, "hidden": 1024, "heads": 16, "seq": 1024}


def test_cases() -> None:
    """Each case is the plan that the question would give; the slow network costs time."""
    cases = which_when(SMALL, gpus=32, batch=64)
    assert [case.gpus for case in cases] == [1, 8, 32, 32]
    for case in cases[:3]:
        assert case.best is not None
        assert case.best.name == plan(SMALL, gpus=case.gpus, batch=64).best.name
    fast, slow = cases[2].best, cases[3].best
    assert fast is not None and slow is not None
    assert slow.seconds > fast.seconds
    text = cases_text(cases)
    assert text.splitlines()[0].startswith("one GPU: t=1 p=1 d=1")
    assert text.splitlines()[-1].startswith("On the slow network a step takes")
    assert len(cases_text(which_when(SMALL, gpus=8, batch=64)).splitlines()) == 2


def test_no_more_gpus_than_there_are() -> None:
    cases = which_when(SMALL, gpus=4, batch=64)
    assert [(case.name, case.gpus) for case in cases] == [("one GPU", 1), ("4 GPUs of a node of 8", 4)]
    assert cases[1].best is not None and cases[1].best.name == plan(SMALL, gpus=4, batch=64).best.name
    assert [case.gpus for case in which_when(SMALL, gpus=1, batch=64)] == [1]


def test_a_case_without_a_plan() -> None:
    large = {"layers": 48, "hidden": 6144, "heads": 64, "seq": 2048}
    cases = which_when(large, gpus=64, batch=64, precision="bf16", sequence_parallel=True)
    assert cases[0].best is None
    assert "nothing fits on 1 GPU of" in cases[0].fact
    assert cases_text(cases).splitlines()[0].startswith("one GPU: nothing fits")


def test_slowed() -> None:
    cluster = find_cluster("dgx-a100")
    assert slowed(cluster).network.bandwidth == cluster.network.bandwidth / 10
    assert slowed(cluster).fast == cluster.fast
