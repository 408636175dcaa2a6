"""The command alone, its text and its file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autoptd.errors import PlanError
from autoptd.ir.mesh import Mesh
from autoptd.wings.cli import main
from autoptd.wings.doctor.checks import Timed, Wrong
from autoptd.wings.doctor.launch import judge
from autoptd.wings.doctor.report import DoctorReport, MeshReport
from autoptd.wings.doctor.run import requested_mesh, usual_meshes
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
        " results compared, all right",
        "torchrun --nproc-per-node 4 -m -- autoptd doctor",
        "\nAll right.\n",
    ):
        assert words in text
    record = json.loads(file.read_text())
    assert record["status"] == 0 and record["wrong"] == [] and record["meshes"][0]["checks"] > 100


@pytest.mark.parametrize(
    ("words", "env", "told"),
    [
        ("--t 2 --p 2", {"WORLD_SIZE": "2"}, "t=2 p=2: 2 ranks are not divisible by 4"),
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
    groups = [Timed("all_reduce", "tp", ranks, 1 << 28, 0.002, 1) for ranks in mesh.groups(("tp",))]
    groups += [Timed("all_reduce", "dp", ranks, 1 << 28, 0.1, 24) for ranks in mesh.groups(("dp",))]
    groups[-1] = Timed("all_reduce", "dp", groups[-1].ranks, 1 << 28, 0.5, 24)
    links = [Timed("message", "pp", (rank, rank + 192), 1 << 28, 0.02, 2) for rank in range(2880)]
    times = tuple(groups + links)
    report = DoctorReport(
        judge(gpus(3072, 8)),
        (MeshReport(mesh, 10**6, wrong, times),),
        find_cluster("dgx-h100"),
    )
    text = str(report)
    assert len(text.splitlines()) < 40 and max(map(len, text.splitlines())) < 400
    for words in (
        "3072 ranks on 384 hosts, node0 to node383: nccl, NVIDIA H100, 73.6 GiB free",
        "tp, 1 host    all_reduce  384 of 8",
        "pp, 2 hosts   message     2880 pairs",
        "the part of rank 0 is wrong on rank 0-7: all_gather of bfloat16",
        "... and 88 more (all of them with --json FILE)",
        "(t=8 p=16 d=24): all_reduce of 256 MiB took 500 ms, the median is 100 ms; --p 24 times its links",
        "Something is wrong.",
    ):
        assert words in text, text
    assert report.status == 1 and json.loads(json.dumps(report.record()))["status"] == 1


@pytest.mark.parametrize(
    ("size", "per_node", "meshes"),
    [
        (2, 2, [Mesh(t=2), Mesh(p=2)]),
        (3, 3, [Mesh(t=3), Mesh(p=3)]),
        (4, 4, [Mesh(t=4), Mesh(p=2, d=2)]),
        (4, 1, [Mesh(d=4), Mesh(p=4)]),
        (16, 8, [Mesh(t=8, d=2), Mesh(p=2, d=8)]),
        # One machine with eight ranks and one with four.
        (12, 4, [Mesh(t=4, d=3), Mesh(p=3, d=4)]),
    ],
)
def test_the_usual_meshes(size: int, per_node: int, meshes: list[Mesh]) -> None:
    assert usual_meshes(size, per_node) == meshes


def test_a_part_of_a_mesh_is_completed() -> None:
    assert requested_mesh(8, {}) is None and requested_mesh(8, {"t": None}) is None
    assert requested_mesh(8, {"t": 2, "p": 2, "d": 2}) == requested_mesh(8, {"t": 2, "p": 2}) == Mesh(2, 2, 2)
    assert requested_mesh(8, {"t": 2, "c": 2}) == Mesh(2, 1, 2, c=2)
    assert requested_mesh(8, {"t": 1, "p": 2, "d": 2, "c": 2}) == Mesh(1, 2, 2, c=2)
    assert requested_mesh(8, {"d": 2, "p": 2}) == Mesh(2, 2, 2)
    with pytest.raises(PlanError, match=r"t\*p\*d is 4, .* 8 ranks\. Remedy: .*product is 8"):
        requested_mesh(8, {"t": 2, "p": 2, "d": 1})
    with pytest.raises(PlanError, match="t=3: 8 ranks are not divisible by 3"):
        requested_mesh(8, {"t": 3})
