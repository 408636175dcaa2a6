"""A9: what AutoPTD saves, plain torch reads, and the other way around; training goes on with the same losses."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict

from autoptd.errors import PlanError
from tests.parity.models import gpt
from tests.runtime.checkpoint.damage import edit, write_metadata
from tests.runtime.checkpoint.models import running, train
from tests.runtime.checkpoint.other_programs import SETTINGS, one_device, plain_losses

# Of torch's own, where there is no process group.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
MESHES = [{"t": 2, "p": 2}, {"t": 2, "d": 2, "zero": 1}]
BOUND = 1e-12


def model() -> nn.Module:
    return gpt(layers=2, vocab=61).double()


def ours(folder: Path, mesh: dict[str, Any]) -> list[float]:
    """Save after two steps; the losses of three more."""
    pm, optimizer = running(model(), torch.optim.AdamW, SETTINGS, **mesh)
    train(pm, optimizer, 2)
    pm.save(folder, optimizer=optimizer)
    losses = train(pm, optimizer, 3)
    pm.close()
    return losses


def check_losses(found: list[float], expected: list[float]) -> None:
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        assert abs(one - other) <= BOUND


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_plain_torch_reads_ours(tmp_path: Path, mesh: dict[str, Any]) -> None:
    expected = ours(tmp_path / "saved", mesh)
    own, optimizer = one_device()
    values, state = get_state_dict(own, optimizer)
    states = {"model": values, "optimizer": state}
    dcp.load(states, checkpoint_id=tmp_path / "saved")
    set_state_dict(own, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    check_losses(plain_losses(own, optimizer, 2, 3), expected)


def test_torch_makes_one_file_of_ours(tmp_path: Path) -> None:
    expected = ours(tmp_path / "saved", MESHES[0])
    dcp_to_torch_save(tmp_path / "saved", tmp_path / "saved.pt")
    states = torch.load(tmp_path / "saved.pt", weights_only=True)
    own, optimizer = one_device()
    own.load_state_dict(states["model"])
    set_state_dict(
        own,
        optimizer,
        model_state_dict={},
        optim_state_dict=states["optimizer"],
        options=StateDictOptions(strict=False),
    )
    check_losses(plain_losses(own, optimizer, 2, 3), expected)


def theirs(folder: Path) -> list[float]:
    """What a plain script saves after two steps; the losses of three more."""
    own, optimizer = one_device()
    plain_losses(own, optimizer, 0, 2)
    values, state = get_state_dict(own, optimizer)
    dcp.save({"model": values, "optimizer": state}, checkpoint_id=folder)
    return plain_losses(own, optimizer, 2, 3)


def goes_on(folder: Path, **mesh: Any) -> list[float]:
    pm, optimizer = running(model(), torch.optim.AdamW, {"lr": 3.0}, **mesh)
    pm.load(folder, optimizer=optimizer)
    pm.steps = 2
    losses = train(pm, optimizer, 3)
    pm.close()
    return losses


@pytest.mark.parametrize("mesh", MESHES, ids=str)
def test_we_read_plain_torch(tmp_path: Path, mesh: dict[str, Any]) -> None:
    expected = theirs(tmp_path / "saved")
    check_losses(goes_on(tmp_path / "saved", **mesh), expected)


def test_we_read_what_torch_saves(tmp_path: Path) -> None:
    """A file of the state dicts, whose optimizer numbers its parameters."""
    own, optimizer = one_device()
    plain_losses(own, optimizer, 0, 2)
    torch.save({"model": own.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "saved.pt")
    expected = plain_losses(own, optimizer, 2, 3)
    pm, ours = running(model(), torch.optim.AdamW, {"lr": 3.0}, t=2, p=2)
    saved = torch.load(tmp_path / "saved.pt", weights_only=True)
    pm.load_state_dict(saved["model"])
    pm.load_optimizer_state_dict(ours, saved["optimizer"])
    pm.steps = 2
    check_losses(train(pm, ours, 3), expected)
    pm.close()


@pytest.mark.thorough
@pytest.mark.processes
def test_fsdp_there_and_back(tmp_path: Path) -> None:
    """Two processes of FSDP2 read ours and go on; then we read what they saved."""
    expected = ours(tmp_path / "ours", {"t": 2, "p": 2, "d": 2})
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [
        "-m",
        "tests.runtime.checkpoint.other_programs",
        str(tmp_path / "ours"),
        str(tmp_path / "theirs"),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("loss ")]
    check_losses(losses[:3], expected)
    check_losses(goes_on(tmp_path / "theirs", t=2, p=2), expected)


class Command:
    """Pickled, it runs a command when it is unpickled."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("where", ["metadata", "item", "object"])
def test_nothing_of_a_checkpoint_is_executed(tmp_path: Path, where: str) -> None:
    theirs(tmp_path / "saved")
    mark = tmp_path / "mark"
    if where == "metadata":
        (tmp_path / "saved" / ".metadata").write_bytes(pickle.dumps(Command(mark)))
    else:
        name = "model.transformer.wte.weight" if where == "item" else "optimizer.param_groups.0.lr"
        replace_item(tmp_path / "saved", name, Command(mark))
    pm, optimizer = running(model(), t=2)
    fact = "would run posix.system" if where == "metadata" else "cannot be read without unpickling code"
    with pytest.raises(PlanError, match=fact):
        pm.load(tmp_path / "saved", optimizer=optimizer)
    assert not mark.exists()
    pm.close()


def replace_item(folder: Path, name: str, value: Any) -> None:
    """Let an item of a checkpoint be another one, at the end of its file."""
    reader = dcp.FileSystemReader(folder)
    metadata = reader.read_metadata()
    [index] = [index for index in metadata.storage_data if index.fqn == name]
    info = metadata.storage_data[index]
    with (folder / info.relative_path).open("ab") as file:
        info.offset = file.tell()
        torch.save(value, file)
        info.length = file.tell() - info.offset
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_nothing_of_our_own_checkpoints_is_executed(tmp_path: Path) -> None:
    """Not even where an attacker wrote the checksums anew; and torch.load is asked for weights only."""
    expected = ours(tmp_path / "saved", MESHES[0])
    pm, optimizer = running(model(), torch.optim.AdamW, {"lr": 3.0}, t=2)
    load = torch.load

    def guarded(*args: Any, **keywords: Any) -> Any:
        assert keywords.get("weights_only") is True
        return load(*args, **keywords)

    with mock.patch.object(torch, "load", guarded), mock.patch.object(pickle, "load", None):
        pm.load(tmp_path / "saved", optimizer=optimizer)
    check_losses(train(pm, optimizer, 3), expected)
    write_metadata(tmp_path / "saved", pickle.dumps(Command(tmp_path / "mark")))
    with pytest.raises(PlanError, match=r"would run posix\.system"):
        pm.load(tmp_path / "saved", optimizer=optimizer)
    assert not (tmp_path / "mark").exists()
    pm.close()


def test_extra_that_would_run_code(tmp_path: Path) -> None:
    """Of a manifest that an attacker wrote anew, too."""
    ours(tmp_path / "saved", {})
    data_ = pickle.dumps(Command(tmp_path / "mark"))
    (tmp_path / "saved" / "extra.pt").write_bytes(data_)
    entry = {"bytes": len(data_), "crc32": zlib.crc32(data_)}
    edit(tmp_path / "saved", lambda record: record["files"].update({"extra.pt": entry}))
    pm, optimizer = running(model(), t=2)
    with pytest.raises(PlanError, match=r"extra.pt: cannot be read without unpickling code"):
        pm.load(tmp_path / "saved", optimizer=optimizer)
    assert not (tmp_path / "mark").exists()
    pm.close()


def test_missing_and_short_files_of_others(tmp_path: Path) -> None:
    theirs(tmp_path / "saved")
    pm, optimizer = running(model(), t=2)
    file = tmp_path / "saved" / "__0_0.distcp"
    os.truncate(file, file.stat().st_size - 1)
    with pytest.raises(PlanError, match=r"__0_0.distcp has \d+ bytes, not \d+"):
        pm.load(tmp_path / "saved", optimizer=optimizer)
    file.unlink()
    with pytest.raises(PlanError, match=r"__0_0.distcp is missing"):
        pm.load(tmp_path / "saved", optimizer=optimizer)
    pm.close()
