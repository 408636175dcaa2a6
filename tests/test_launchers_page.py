"""docs/howto/launchers.md: its manifests are whole, and what the operators set is what torchrun reads."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.run import get_args_parser

from autoptd.runtime.world.slurm import FIRST_PORT, PORTS

yaml = pytest.importorskip("yaml")
TEXT = (Path(__file__).parents[1] / "docs/howto/launchers.md").read_text()
# Per kind: what its operator sets, as read in its sources (elastic.go of the training operator, torch.go of the trainer).
SET = {
    "PyTorchJob": {
        "PET_NNODES": "1:4",
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": "gpt-worker-0:23456",
        "PET_MAX_RESTARTS": "10",
    },
    "TrainJob": {
        "PET_NNODES": "4",
        "PET_NPROC_PER_NODE": "8",
        "PET_NODE_RANK": "2",
        "PET_MASTER_ADDR": "gpt-node-0-0.gpt",
        "PET_MASTER_PORT": "29500",
    },
}
FOUND = {
    "PyTorchJob": {
        "nnodes": "1:4",
        "rdzv_backend": "c10d",
        "rdzv_endpoint": "gpt-worker-0:23456",
        "max_restarts": "10",
    },
    "TrainJob": {"nnodes": "4", "node_rank": "2", "master_addr": "gpt-node-0-0.gpt", "master_port": "29500"},
}


def manifests() -> dict[str, Any]:
    blocks = "\n---\n".join(re.findall(r"```yaml\n(.*?)```", TEXT, re.S))
    return {found["kind"]: found for found in yaml.safe_load_all(blocks)}


def pod_of(kind: str) -> Any:
    spec = manifests()[kind]["spec"]
    if kind == "PyTorchJob":
        return spec["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]
    (job,) = spec["template"]["spec"]["replicatedJobs"]
    assert job["template"]["metadata"]["labels"] == {"trainer.kubeflow.org/trainjob-ancestor-step": "trainer"}
    assert job["name"] == "node"
    return job["template"]["spec"]["template"]["spec"]


@pytest.mark.parametrize(("kind", "name"), [("PyTorchJob", "pytorch"), ("TrainingRuntime", "node")])
def test_pods_mount_volumes_that_exist(kind: str, name: str) -> None:
    pod = pod_of(kind)
    (container,) = pod["containers"]
    # The names that the operators look for.
    assert container["name"] == name
    assert {one["name"] for one in container["volumeMounts"]} == {one["name"] for one in pod["volumes"]}


def test_the_job_runs_on_the_runtime() -> None:
    job, runtime = manifests()["TrainJob"], manifests()["TrainingRuntime"]
    assert job["spec"]["runtimeRef"]["name"] == runtime["metadata"]["name"]
    assert job["apiVersion"] == runtime["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert manifests()["PyTorchJob"]["apiVersion"] == "kubeflow.org/v1"


@pytest.mark.parametrize("kind", SET)
def test_torchrun_reads_what_the_operator_sets(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    table = TEXT.partition("prefix PET_:")[2].partition("\n\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| ([^|]*)\| ([^|]*)\| ([^|]*)\|$", table, re.M)[1:]
    listed = set(re.findall(r"PET_[A-Z_]+", "".join(row[1] for row in rows)))
    assert listed == {name for known in SET.values() for name in known}
    for _, names, options in rows[1:]:
        told = [name.removeprefix("PET_").lower() for name in re.findall(r"PET_[A-Z_]+", names)]
        assert told == [option.replace("-", "_") for option in re.findall(r"--([a-z-]+)", options)]

    for name, value in SET[kind].items():
        monkeypatch.setenv(name, value)
    container = manifests()[kind]["spec"]["trainer"] if kind == "TrainJob" else pod_of(kind)["containers"][0]
    command, *words = container["command"]
    asked = vars(get_args_parser().parse_args(words))
    assert command == "torchrun" and asked["training_script"] == "train.py"
    assert {key: str(asked[key]) for key in FOUND[kind]} == FOUND[kind]
    assert (str(asked["nproc_per_node"]), asked["shutdown_timeout"]) == ("8", 100)


def test_the_port_is_in_the_range_that_the_page_names() -> None:
    assert f"from {FIRST_PORT} to {FIRST_PORT + PORTS - 1}" in TEXT
