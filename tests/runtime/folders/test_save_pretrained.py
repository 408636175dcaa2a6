"""Writing folders: how tensors are divided into files, and that a save which is cut short leaves what was there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from autoptd.errors import PlanError
from autoptd.program.sources import FolderFormat
from autoptd.runtime.folders.read_folder import INDEX, SINGLE, open_folder
from autoptd.runtime.folders.save_pretrained import (
    Writer,
    free_names,
    parse_size,
    split_into_files,
)

pytest.importorskip("safetensors")


def test_sizes_and_files() -> None:
    assert [parse_size(one) for one in ("5GB", "1.5 kb", "2MiB", 7)] == [5 * 10**9, 1500, 2**21, 7]
    for wrong in ("5 parrots", "", "0", "GB", -1):
        with pytest.raises(PlanError, match="max_shard_size"):
            parse_size(wrong)
    assert split_into_files({"a": 3, "b": 3, "c": 9, "d": 1, "e": 5}, 6) == [["a", "b"], ["c"], ["d", "e"]]
    assert split_into_files({"a": 0, "b": 7}, 6) == [["a"], ["b"]]


def save(folder: Path, files: list[dict[str, torch.Tensor]], stop: int | None = None) -> None:
    """Save as rank 0 does; `stop` after so many files."""
    writer = Writer(folder, len(files))
    writer.begin()
    for number, tensors in enumerate(files):
        if number == stop:
            return
        writer.write(number, tensors)
    sizes = {name: x.nbytes for one in files for name, x in one.items()}
    writer.finish(sizes, [list(one) for one in files], FolderFormat())


def held(folder: Path) -> Mapping[str, float]:
    found = open_folder(folder)
    return {name: float(found.reader().whole(name)) for name in found.entries}


def tensors(value: float, names: str) -> list[dict[str, torch.Tensor]]:
    return [{name: torch.tensor(value)} for name in names]


@pytest.mark.parametrize("before", ["a", "ab", "abc"])
@pytest.mark.parametrize("after", ["a", "ab", "abc"])
def test_a_reader_finds_the_old_or_the_new_never_a_mixture(
    before: str, after: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Stopped before and after every renaming and removal."""
    (tmp_path / "tokenizer.json").write_text("kept")
    save(tmp_path, tensors(1.0, before))
    old = held(tmp_path)
    save(tmp_path, tensors(2.0, after), stop=len(after) - 1)
    assert held(tmp_path) == old
    seen = []

    def watched(name: str) -> None:
        act = getattr(Path, name)
        monkeypatch.setattr(Path, name, lambda *args: (seen.append(held(tmp_path)), act(*args))[1])

    for name in ("replace", "unlink"):
        watched(name)
    save(tmp_path, tensors(2.0, after))
    seen.append(held(tmp_path))
    new = dict.fromkeys(after, 2.0)
    assert seen[0] == old and seen[-1] == new and all(one in (old, new) for one in seen)
    kept = {one.name for one in tmp_path.iterdir()} - {"tokenizer.json"}
    assert len(kept) == (1 if len(after) == 1 else len(after) + 1), kept


def test_names_are_those_of_hugging_face(tmp_path: Path) -> None:
    assert free_names(tmp_path, 1) == [SINGLE]
    save(tmp_path, tensors(1.0, "ab"))
    index = json.loads((tmp_path / INDEX).read_text())
    assert index == {
        "metadata": {"total_size": 8},
        "weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"},
    }
    assert free_names(tmp_path, 2)[0] == "model.1-00001-of-00002.safetensors"
    save(tmp_path, tensors(2.0, "ab"))
    assert free_names(tmp_path, 2)[0] == "model-00001-of-00002.safetensors"
