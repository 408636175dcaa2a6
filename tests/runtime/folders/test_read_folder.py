"""Reading folders of safetensors: which bytes are read, and what is said of folders that are none."""

from __future__ import annotations

import builtins
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from autoptd.errors import PlanError, RuntimeFault
from autoptd.ir.mesh import Mesh
from autoptd.runtime.folders.read_folder import INDEX, SINGLE, open_folder, runs
from autoptd.runtime.step.launch import check_same_source
from autoptd.runtime.world.threads import ThreadWorld, run_ranks

save_file = pytest.importorskip("safetensors.torch").save_file


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        ([1, 2, 3], [(1, 3)]),
        ([3, 4, 7, 8, 9, 11], [(3, 4), (7, 9), (11, 11)]),
        ([9, 10, 0, 0], [(9, 10)]),
        ([0, 0], []),
    ],
    ids=str,
)
def test_runs(rows: list[int], expected: list[tuple[int, int]]) -> None:
    assert runs(torch.tensor(rows)) == expected


def test_rows_of_any_dim_in_their_order(tmp_path: Path) -> None:
    x = torch.arange(40.0).reshape(5, 8)
    save_file({"x": x, "y": torch.tensor(3.0)}, tmp_path / SINGLE)
    reader = open_folder(tmp_path).reader()
    assert torch.equal(reader.rows("x", 1, torch.tensor([2, 3, 7])), x[:, [1, 2, 6]])
    assert torch.equal(reader.rows("x", 0, torch.tensor([4, 5, 0])), torch.cat([x[3:], torch.zeros(1, 8)]))
    assert torch.equal(reader.rows("x", 0, torch.tensor([0, 0])), torch.zeros(2, 8))
    assert reader.whole("y") == 3 and reader.has("x") and not reader.has("z")


def test_what_is_read_is_memory_of_its_own(tmp_path: Path) -> None:
    save_file({"x": torch.ones(4, 4)}, tmp_path / SINGLE)
    reader = open_folder(tmp_path).reader()
    reader.whole("x").zero_()
    reader.rows("x", 0, torch.tensor([1, 2, 3, 4])).zero_()
    assert torch.equal(open_folder(tmp_path).reader().whole("x"), torch.ones(4, 4))


def test_several_files_and_their_index(tmp_path: Path) -> None:
    save_file({"x": torch.ones(2)}, tmp_path / "one.safetensors")
    save_file({"y": torch.zeros(3, dtype=torch.bfloat16)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"x": "one.safetensors", "y": "two.safetensors"}}
    (tmp_path / INDEX).write_text(json.dumps(index))
    folder = open_folder(tmp_path)
    assert {name: (one.shape, one.dtype) for name, one in folder.entries.items()} == {
        "x": ((2,), torch.float32),
        "y": ((3,), torch.bfloat16),
    }
    index["weight_map"]["z"] = "two.safetensors"
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(PlanError, match="tensors that are not there: z"):
        open_folder(tmp_path)
    (tmp_path / "two.safetensors").unlink()
    with pytest.raises(PlanError, match=r"files that are not there: two\.safetensors"):
        open_folder(tmp_path)


def test_ranks_that_see_other_files_are_named(tmp_path: Path) -> None:
    folders = []
    for rank, value in enumerate((1.0, 1.0, 2.0)):
        (tmp_path / str(rank)).mkdir()
        save_file({"x": torch.full((4000,), value)}, tmp_path / str(rank) / SINGLE)
        folders.append(open_folder(tmp_path / str(rank)))
    run_ranks(ThreadWorld(Mesh(d=2)), lambda world: check_same_source(folders[world.rank], world))
    with pytest.raises(RuntimeFault, match=r"rank 2 found other files in .* than rank 0"):
        run_ranks(ThreadWorld(Mesh(d=3)), lambda world: check_same_source(folders[world.rank], world))


def test_folders_without_safetensors(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such folder"):
        open_folder(tmp_path / "nowhere")
    with pytest.raises(PlanError, match=r"neither model\.safetensors nor"):
        open_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(PlanError, match=r"pickled weights \(pytorch_model.bin\).*save_pretrained\(another\)"):
        open_folder(tmp_path)
    (tmp_path / SINGLE).write_bytes(b"short")
    with pytest.raises(PlanError, match="cannot be read"):
        open_folder(tmp_path)


def test_without_the_package_one_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    (tmp_path / SINGLE).write_bytes(b"")
    monkeypatch.setattr(builtins, "__import__", without)
    with pytest.raises(PlanError, match=r"safetensors: is not installed.*'autoptd\[hf\]'"):
        open_folder(tmp_path)
