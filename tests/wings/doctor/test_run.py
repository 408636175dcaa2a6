"""The command alone, its text and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autoptd.ir.mesh import Mesh
from autoptd.schedule import simulate
from autoptd.wings.cli import main
from autoptd.wings.doctor.calls import Wrong
from autoptd.wings.doctor.examine import MeshReport
from autoptd.wings.doctor.facts import judge
from autoptd.wings.doctor.report import DoctorReport
from autoptd.wings.doctor.slow import Slow, Timed
from autoptd.wings.doctor.traffic import all_orders, communicators_of_orders
from autoptd.wings.planner.cluster import find_cluster
from tests.wings.doctor.test_facts import gpus


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)


def test_alone_it_looks_at_threads_and_says_how_to_start_processes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "doctor.json"
    assert main(["doctor", "--t", "2", "--p", "2", "--json", str(file)]) == 0
    text = capsys.readouterr().out
    for words in (
        "1 rank on ",
        "t=2 p=2 d=1: ",
        " results are right; schedules: 1f1b, interleaved, looped_bfs, zbv",
        "a group of one over gloo (",
        "torchrun --nproc-per-node 4 -m -- autoptd doctor",
        "\nAll right.\n",
    ):
        assert words in text
    record = json.loads(file.read_text())
    assert record["status"] == 0 and record["wrong"] == [] and record["meshes"][0]["checks"] > 1000


@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        ("--t 2 --p 2", {"WORLD_SIZE": "2"}, "t=2 p=2: 2 ranks do not divide by 4"),
        ("--t 2 --p 2 --d 1", {"WORLD_SIZE": "8"}, "t*p*d is 4, and there are 8 ranks"),
        (
            "--t 16 --p 16",
            {},
            "256 ranks, and this process is alone. Remedy: torchrun --nproc-per-node 256 -m -- ",
        ),
        ("--timeout 0", {}, "--timeout 0: is not a valid timeout"),
        ("--timeout nan", {}, "--timeout nan: is not a valid timeout"),
        ("--t 0", {}, "--t 0: is below 1"),
        ("--json none/doctor.json", {}, "there is no directory none"),
        ("--cluster dgx-h1000", {}, "no such cluster"),
        ("", {"WORLD_SIZE": "two"}, "WORLD_SIZE='two': is not a number"),
    ],
)
def test_bad_input_is_one_line(
    words: str,
    env: dict[str, str],
    told: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (
        {"RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1", **env}.items() if env else ()
    ):
        monkeypatch.setenv(name, value)
    assert main(["doctor", *words.split()]) == 2
    said = capsys.readouterr().err
    assert told in said and said.count("\n") == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("words", ["--backend nccl", "--device cuda"])
def test_a_device_that_is_not_there_is_told(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words.split()]) == 1
    told = capsys.readouterr().out
    assert "\nWrong:\n  rank 0 on " in told and " has no device: " in told and "Something is wrong." in told


def test_the_report_of_thousands_is_short() -> None:
    mesh = Mesh(t=8, p=16, d=24)
    wrong = tuple(
        Wrong("all_gather", "tp", mesh.group(rank, ("tp",)), (rank,), other, "bfloat16", "1 of 4 elements")
        for rank in range(0, 800, 8)
        for other in mesh.group(rank, ("tp",))
    )
    slow = (Slow("all_reduce", "dp", mesh.group(5, ("dp",)), 1 << 28, 0.5, 0.1, 127),)
    groups = [Timed("all_reduce", "tp", ranks, 1 << 28, 0.002, 1) for ranks in mesh.groups(("tp",))]
    groups.append(Timed("all_reduce", "tp", (3064, 3065), 1 << 28, 0.004, 1))
    links = [Timed("message", "pp", (rank, rank + 192), 1 << 28, 0.02, 2) for rank in range(2880)]
    times = tuple(groups + links)
    report = DoctorReport(
        judge(gpus(3072, 8)),
        (MeshReport(mesh, ("1f1b",), 10**6, wrong, slow, times),),
        find_cluster("dgx-h100"),
    )
    text = str(report)
    assert len(text.splitlines()) < 40 and max(map(len, text.splitlines())) < 400
    for words in (
        "3072 ranks on 384 hosts, node0 to node383: nccl, NVIDIA H100, 73.6 GiB free",
        "tp, 1 host   all_reduce  385 of",
        "pp, 2 hosts  message     2880 pairs",
        "the part of rank 0 is wrong on rank 0-7: all_gather of bfloat16",
        "... and 88 more: --json FILE has all",
        "over dp of ranks 5, 13, 21, 29, 37, 45, 53, 61, ... (t=8 p=16 d=24): all_reduce of 256 MiB takes 500 ms, the "
        "median of 127 others is 100 ms; --p 24 times its links",
        "Something is wrong.",
    ):
        assert words in text, text
    assert report.status == 1 and json.loads(json.dumps(report.record()))["status"] == 1


@pytest.mark.parametrize("p", [1, 2, 3, 8])
def test_schedules_end_and_open_what_they_use(p: int) -> None:
    """No deadlock on paper; and a sender of every channel has one back, for the answers of timing."""
    orders = all_orders(p)
    for one in orders.values():
        simulate(one)
    links = communicators_of_orders(p, orders.values()).links
    assert {(target, source) for source, target in links} == set(links)
    assert {(rank, rank + 1) for rank in range(p - 1)} <= set(links)
