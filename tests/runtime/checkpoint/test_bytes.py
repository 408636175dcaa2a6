"""A6, A7: what is read is what is needed, each byte by one rank, and nothing is in memory twice."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.model import checkpoints
from autoptd.program.pieces import share_stage
from autoptd.runtime.checkpoint import storage
from autoptd.runtime.checkpoint.manifest import Manifest
from autoptd.runtime.checkpoint.read import open_checkpoint
from autoptd.runtime.checkpoint.restore import Restoration
from autoptd.runtime.folders.disk import BLOCK_BYTES
from autoptd.runtime.params.parts import dtype_of

WIDTH = 1024
KEYS = {"exp_avg": 4, "exp_avg_sq": 4}
# A file has rows of each of six tensors, from two tensor ranks.
RUNS = 12


class Wide(nn.Module):
    """Few parameters of 8 MB, one split by rows over tp and one by columns."""

    def __init__(self, hidden: int = 2 * WIDTH) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, hidden, bias=False), nn.Linear(hidden, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu()).square().mean()


def running(**mesh: Any) -> tuple[autoptd.ParallelModel, torch.optim.Optimizer]:
    x = torch.randn(8, WIDTH)
    pm = autoptd.parallelize(Wide(), **mesh, example_inputs=(x,), backend="local", timeout=60)
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)
    pm.step(x)
    optimizer.step()
    return pm, optimizer


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("wide") / "saved"
    pm, optimizer = running(t=2, d=2)
    # Small items, as those of large tensors are small beside a rank's share.
    with mock.patch.object(storage, "MOST_BYTES", BLOCK_BYTES // 4):
        pm.save(folder, optimizer=optimizer)
    pm.close()
    yield folder


def payload(manifest: Manifest) -> int:
    """The bytes of all tensors."""
    total = 0
    for record in manifest.tensors.values():
        total += torch.Size(record.shape).numel() * dtype_of(record.dtype).itemsize
    return total


def bytes_read(folder: Path, monkeypatch: pytest.MonkeyPatch, **mesh: Any) -> tuple[dict[int, int], Any]:
    """What each rank of a mesh reads; the mesh's program."""
    read: dict[int, int] = {}

    class Counted(Restoration):
        def spread(self) -> None:
            read[self.params.world.rank] = self.nbytes
            super().spread()

    monkeypatch.setattr(checkpoints, "Restoration", Counted)
    pm, optimizer = running(**mesh)
    pm.load(folder, optimizer=optimizer)
    pm.close()
    return read, pm.program


def test_on_the_same_mesh_each_byte_is_read_once(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of replicas too."""
    read, _ = bytes_read(saved, monkeypatch, t=2, d=2)
    total = payload(open_checkpoint(saved).manifest)
    assert total <= sum(read.values()) <= 1.01 * total
    assert max(read.values()) <= 1.02 * total / 4


@pytest.mark.parametrize("mesh", [{"t": 4}, {}, {"d": 2}, {"d": 4, "zero": 1}], ids=str)
def test_on_another_mesh_little_more_is_read(
    saved: Path, monkeypatch: pytest.MonkeyPatch, mesh: dict[str, Any]
) -> None:
    """Two blocks more for each run of rows; the columns of `down` come with those between them."""
    read, program = bytes_read(saved, monkeypatch, **mesh)
    shares = share_stage(program, 0, {spec.name: KEYS for spec in program.params})
    for rank, items in shares.items.items():
        needed = sum(item.nbytes for item in items)
        columns = sum(item.nbytes for item in items if item.name == "down.weight")
        # A fourth of the columns lies in half of a chunk's.
        between = columns if mesh.get("t") == 4 else 0
        assert needed <= read[rank] <= needed + between + 2 * BLOCK_BYTES * RUNS


def test_rows_of_one_rank_are_not_all_rows(saved: Path) -> None:
    reader = open_checkpoint(saved).reader()
    part = reader.rows("up.weight", 0, torch.arange(1, 101))
    assert reader.nbytes <= part.nbytes + 2 * BLOCK_BYTES
    assert torch.equal(part, open_checkpoint(saved).reader().whole("up.weight")[:100])


MEMORY = """
import sys, torch
from pathlib import Path
from tests.runtime.checkpoint import test_bytes
import autoptd
folder = Path(sys.argv[1])
x = torch.randn(8, test_bytes.WIDTH)
def peak():
    text = Path("/proc/self/status").read_text()
    return int(text.split("VmHWM:")[1].split()[0]) << 10
pm = autoptd.parallelize(test_bytes.Wide(24 * 1024), d=2, example_inputs=(x,), backend="local")
optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)
if sys.argv[2] == "save":
    pm.step(x); optimizer.step(); pm.save(folder, optimizer=optimizer)
else:
    Path("/proc/self/clear_refs").write_text("5")
    before = peak()
    pm.load(folder, optimizer=optimizer)
    moments = sum(x.nbytes for state in optimizer.state.values() for x in state.values())
    print(peak() - before - moments, moments)
"""


@pytest.mark.thorough
def test_loading_takes_no_second_copy(tmp_path: Path) -> None:
    """Beside the moments, which are not there before, 128 MiB for each of the two ranks at most."""
    found = ""
    for verb in ("save", "load"):
        command = [sys.executable, "-c", MEMORY, str(tmp_path / "saved"), verb]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        found = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    more, moments = map(int, found.split())
    assert moments > 2 * 350 << 20
    assert more <= 2 * 128 << 20
    # A second copy of the parameters, or of a moment, would be found.
    assert moments / 2 > 2 * 128 << 20
