"""What cannot be saved or loaded is one error, of all ranks, with site, fact and remedy; and nothing has changed then."""

from __future__ import annotations

import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.errors import PlanError, RuntimeFault
from autoptd.runtime.checkpoint.commit import siblings
from tests.parity.models import gpt
from tests.runtime.checkpoint.damage import edit, edit_metadata
from tests.runtime.checkpoint.models import assert_same, running, state_of, tied_gpt, train

Running = tuple[autoptd.ParallelModel, torch.optim.Optimizer]


@pytest.fixture(scope="module")
def model() -> Iterator[Running]:
    pm, optimizer = running(t=2, d=2)
    train(pm, optimizer, 1)
    yield pm, optimizer
    pm.close()


@pytest.fixture(scope="module")
def written(model: Running, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("written") / "saved"
    model[0].save(folder, optimizer=model[1])
    return folder


@pytest.fixture
def folder(written: Path, tmp_path: Path) -> Path:
    """A checkpoint of its own, for a test to damage."""
    return Path(shutil.copytree(written, tmp_path / "saved"))


def refused(
    model: Running, folder: Path, fact: str, kind: type[Exception] = PlanError, **keywords: Any
) -> str:
    """Loading raises one error with this fact, and changes nothing; return the error."""
    pm, optimizer = model
    before = state_of(pm, optimizer)
    with pytest.raises(kind, match=fact) as caught:
        pm.load(folder, **{"optimizer": optimizer, **keywords})
    assert_same(state_of(pm, optimizer), before)
    assert caught.value.remedy  # type: ignore[attr-defined]
    return str(caught.value)


def test_no_folder(model: Running, tmp_path: Path) -> None:
    refused(model, tmp_path / "none", "there is no such folder")


def test_an_empty_folder(model: Running, tmp_path: Path) -> None:
    refused(model, tmp_path, "is an empty folder")


@pytest.mark.parametrize(
    ("path", "fact"), [(".", "has no checkpoint.json"), ("", "is not a valid directory path")]
)
def test_a_neighbour_is_never_taken(
    model: Running, folder: Path, path: str, fact: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A path without a name of its own is not that of every folder without a mark."""
    monkeypatch.chdir(folder.parent)
    refused(model, path, fact)
    assert siblings(Path("/"), ".old-") == siblings(Path("."), ".old-") == []


def test_only_what_a_save_left(model: Running, folder: Path) -> None:
    part = folder.rename(folder.with_name("saved.part-11111111"))
    refused(model, folder, "was never completed")
    refused(model, part, "is the temporary folder of a save that did not finish")


def test_a_file_and_pickled_weights(model: Running, tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    refused(model, tmp_path / "pytorch_model.bin", "is a file")
    refused(model, tmp_path, "holds pickled values")


@pytest.mark.parametrize("change", ["missing", "truncated", "longer", "empty", "link"])
def test_a_file_that_is_not_as_it_was_written(model: Running, folder: Path, change: str) -> None:
    file = folder / "__1_0.distcp"
    if change == "missing":
        file.unlink()
    elif change == "truncated":
        os.truncate(file, file.stat().st_size - 1)
    elif change == "longer":
        file.write_bytes(file.read_bytes() + b"1")
    elif change == "empty":
        file.write_bytes(b"")
    else:
        file.rename(folder.with_name("elsewhere"))
        file.symlink_to(folder.with_name("elsewhere"))
    text = refused(model, folder, "__1_0.distcp")
    assert {"missing": "is missing", "link": "is a link"}.get(change, "bytes, not") in text


def test_a_manifest_that_is_no_json_newer_or_changed(model: Running, folder: Path) -> None:
    path = folder / "checkpoint.json"
    text = path.read_text()
    path.write_text(text[:-100])
    refused(model, folder, "cannot be read")
    path.write_text(text.replace('"steps": 1', '"steps": 7'))
    refused(model, folder, "another CRC32")
    path.write_text(text.replace('"version": 2', '"version": 3'))
    refused(model, folder, "has format 3, and this version of AutoPTD reads formats up to 2")
    path.write_text("[]")
    refused(model, folder, "cannot be read")


@pytest.mark.parametrize("name", ["../__1_0.distcp", "/etc/passwd", "a/b", "..", ""])
def test_a_name_that_leads_out_of_the_folder(model: Running, folder: Path, name: str) -> None:
    def change(record: dict[str, Any]) -> None:
        record["files"][name] = record["files"].pop("__1_0.distcp")

    edit(folder, change)
    refused(model, folder, "which is not in its folder")


def test_metadata_that_is_not_the_tensor(model: Running, folder: Path) -> None:
    name = "model.transformer.wte.weight"
    edit_metadata(folder, lambda metadata: metadata.state_dict_metadata[name].chunks.pop())
    refused(model, folder, f"elements of {name}")

    def lead_out(metadata: Any) -> None:
        next(iter(metadata.storage_data.values())).relative_path = "../__0_0.distcp"

    edit_metadata(folder, lead_out)
    refused(model, folder, "which is not in its folder")


class Two(nn.Module):
    """The model of `format_1.tar.xz`."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x).relu()).square().mean()


@pytest.mark.parametrize("mesh", [{"t": 2}, {"p": 2}], ids=str)
def test_the_format_before_is_read(tmp_path: Path, mesh: dict[str, int]) -> None:
    """A checkpoint that the last version with format 1 wrote at t=2, after two steps, and its full tensors by torch.save."""
    with tarfile.open(Path(__file__).parent / "format_1.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    x = torch.randn(4, 4, dtype=torch.float64)
    pm = autoptd.parallelize(Two().double(), **mesh, example_inputs=(x,), backend="local")
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-3)
    pm.load(tmp_path / "saved", optimizer=optimizer)
    expected = torch.load(tmp_path / "state.pt", weights_only=True)
    assert_same(pm.state_dict(), expected["model"])
    found = optimizer.state_dict()
    assert found["state"].keys() == expected["optimizer"]["state"].keys()
    for name, state in found["state"].items():
        assert_same(state, expected["optimizer"]["state"][name])
    assert pm.steps == 2 and found["param_groups"] == expected["optimizer"]["param_groups"]
    pm.close()


def other(model: nn.Module, folder: Path, fact: str, cls: Any = torch.optim.AdamW, **keywords: Any) -> None:
    """Another model refuses the checkpoint, and keeps its state."""
    pm, optimizer = running(model, cls, **keywords)
    refused((pm, optimizer), folder, fact)
    pm.close()


def test_other_shapes(written: Path) -> None:
    other(gpt(layers=2, vocab=61, width=64).double(), written, r"has shape \(61, 32\), not \(61, 64\)")


def test_other_names(written: Path) -> None:
    other(gpt(layers=3, vocab=61).double(), written, "lacks transformer.h.2.attn.c_attn.bias")
    other(gpt(layers=1, vocab=61).double(), written, "not in the model")


def test_other_dtype(written: Path) -> None:
    other(tied_gpt(torch.float32), written, "is float64, not float32")


def test_tied_to_others(written: Path) -> None:
    model = tied_gpt()
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    other(model, written, "transformer.wte.weight was tied to lm_head.weight, now to nothing")


def test_other_heads_of_equal_shapes(written: Path) -> None:
    model = gpt(layers=2, vocab=61, heads=8).double()
    other(model, written, r"c_attn.weight was \[\[3, 4, 8\], \[32\]\], now \[\[3, 8, 4\], \[32\]\]")


class Positive(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.relu()


def test_another_activation(written: Path, folder: Path) -> None:
    """All shapes are equal. Another torch may have traced the same model differently: it is told, and loaded."""
    model = tied_gpt()
    model.transformer.h[1].mlp.gelu = Positive()
    other(model, written, r"transformer.h.1.mlp(.gelu)? was made of other operators")
    model = tied_gpt()
    model.transformer.ln_f.eps = 1e-3
    other(model, written, r"transformer.ln_f was made of other operators, or other numbers in them")
    edit(folder, lambda record: record.update(torch="1.0"))
    pm, optimizer = running(model)
    with pytest.warns(UserWarning, match=r"transformer.ln_f was made of .* with torch 1.0"):
        pm.load(folder, optimizer=optimizer)
    pm.close()


def test_another_optimizer(written: Path) -> None:
    other(tied_gpt(), written, "has the state of an AdamW, not of an SGD", torch.optim.SGD)


def test_other_groups(model: Running, written: Path) -> None:
    pm = model[0]
    groups = [{"params": "*.bias"}, {"params": ["*wte.weight"]}]
    optimizer = pm.optimizer(torch.optim.AdamW, groups, lr=1e-2)
    refused((pm, optimizer), written, "1 groups were saved, this optimizer has 2")


def test_no_optimizer(model: Running, written: Path, tmp_path: Path) -> None:
    refused(model, written, "which would be lost", optimizer=None)
    model[0].save(tmp_path / "weights")
    refused(model, tmp_path / "weights", "has no state of an optimizer")
    assert model[0].load(tmp_path / "weights") == ([], [])
    foreign = torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    refused(model, written, "over other tensors than those of this model", optimizer=foreign)
    with pytest.raises(PlanError, match="over other tensors"):
        model[0].save(tmp_path / "weights", optimizer=foreign)


def test_moments_of_one_parameter_are_missing(model: Running, folder: Path) -> None:
    def drop(metadata: Any) -> None:
        for name in [name for name in metadata.state_dict_metadata if ".state.transformer.wpe" in name]:
            del metadata.state_dict_metadata[name]

    edit_metadata(folder, drop)
    refused(model, folder, "has no optimizer state of transformer.wpe.weight, only of other parameters")


def test_another_seed_where_dropout_draws_by_it(tmp_path: Path) -> None:
    def dropping() -> nn.Module:
        model = tied_gpt()
        model.transformer.drop = nn.Dropout(0.1)
        return model

    pm, optimizer = running(dropping(), d=2, seed=3)
    pm.save(tmp_path / "saved", optimizer=optimizer)
    pm.close()
    other(
        dropping(),
        tmp_path / "saved",
        "was saved with seed=3, and dropout masks would now be drawn with seed=0",
    )


def test_strict_is_false(written: Path) -> None:
    """What fits is loaded, and the rest is told."""
    pm, _ = running(gpt(layers=3, vocab=61).double(), t=2)
    before = pm.state_dict()
    missing, unexpected = pm.load(written, strict=False)
    assert "transformer.h.2.ln_1.weight" in missing and not unexpected
    after = pm.state_dict()
    assert torch.equal(after["transformer.h.2.mlp.c_fc.weight"], before["transformer.h.2.mlp.c_fc.weight"])
    assert not torch.equal(after["transformer.wpe.weight"], before["transformer.wpe.weight"])
    pm.close()


def test_a_changed_byte(model: Running, folder: Path) -> None:
    """Which is found while reading: the model then refuses to go on until another checkpoint is loaded."""
    pm, optimizer = model
    expected = state_of(pm, optimizer)
    good = Path(shutil.copytree(folder, folder.with_name("good")))
    file = folder / "__2_0.distcp"
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(RuntimeFault, match=r"__2_0.distcp.* was changed after it was written: block 0"):
        pm.load(folder, optimizer=optimizer)
    with pytest.raises(RuntimeFault, match="did not end"):
        train(pm, optimizer, 1)
    with pytest.raises(RuntimeFault, match="did not end"):
        pm.save(folder)
    pm.load(good, optimizer=optimizer)
    assert_same(state_of(pm, optimizer), expected)


@pytest.mark.parametrize("file", ["__0_0.crc", "extra.pt"])
def test_a_changed_byte_of_a_small_file(model: Running, written: Path, folder: Path, file: str) -> None:
    content = bytearray((folder / file).read_bytes())
    content[len(content) // 2] ^= 1
    (folder / file).write_bytes(content)
    with pytest.raises(PlanError, match=rf"{file}: has another CRC32"):
        model[0].load(folder, optimizer=model[1])
    model[0].load(written, optimizer=model[1])


class Broken:
    def __init__(self, saves: bool) -> None:
        self.saves = saves

    def state_dict(self) -> dict[str, Any]:
        return {} if self.saves else {}["state"]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise KeyError("at")


class Stateless:
    """Not a thing that a checkpoint can hold."""


class Unreadable:
    def state_dict(self) -> dict[str, Any]:
        return {"hook": Stateless()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError


def test_extra_that_is_not_there_or_would_not_come_back(
    model: Running, written: Path, tmp_path: Path
) -> None:
    pm, optimizer = model
    with pytest.raises(PlanError, match="cannot be read without unpickling code"):
        pm.save(tmp_path / "saved", extra={"loader": Unreadable()})
    with pytest.raises(PlanError, match="is a Stateless, without state_dict"):
        pm.save(tmp_path / "saved", extra={"loader": Stateless()})
    assert list(tmp_path.iterdir()) == []
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    refused(model, written, "has no extra state scheduler; it has none", extra={"scheduler": scheduler})


def test_extra_that_fails_is_named(written: Path, tmp_path: Path) -> None:
    pm, _ = running(t=2)
    with pytest.raises(PlanError, match=r"extra\['loader'\]: its state_dict raised KeyError"):
        pm.save(tmp_path / "saved", extra={"loader": Broken(saves=False)})
    pm.save(tmp_path / "saved", extra={"loader": Broken(saves=True)})
    with pytest.raises(PlanError, match=r"extra\['loader'\]: its load_state_dict raised KeyError: 'at'"):
        pm.load(tmp_path / "saved", extra={"loader": Broken(saves=True)})
    with pytest.warns(UserWarning, match="states of loader were saved .*extra= does not have them"):
        pm.load(tmp_path / "saved")
    for steps in ("5", 5.0, -1):
        with pytest.raises(PlanError, match="must be a non-negative integer"):
            pm.steps = steps  # type: ignore[assignment]
    pm.close()


@pytest.mark.parametrize(
    "kind", [torch.optim.SGD, pytest.param(torch.optim.NAdam, marks=pytest.mark.thorough)]
)
def test_the_state_of_another_class_is_left_out(written: Path, kind: Any) -> None:
    """strict=False asks for what fits, and its first step would not have found what it reads."""
    pm, optimizer = running(None, kind, {"lr": 0.5}, t=2)
    with pytest.warns(UserWarning, match=f"the state of an AdamW does not fit an? {kind.__name__}"):
        pm.load(written, optimizer=optimizer, strict=False)
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.5
    train(pm, optimizer, 1)
    pm.close()


def test_a_folder_that_cannot_be_written(model: Running, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "thesis.tex").write_text("")
    with pytest.raises(PlanError, match="is a file, and would be replaced"):
        model[0].save(tmp_path / "file")
    with pytest.raises(PlanError, match="holds other files than those of a checkpoint"):
        model[0].save(tmp_path / "own")
    with pytest.raises(PlanError, match="cannot be written"):
        model[0].save(tmp_path / "file" / "inside")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "own"]


def test_a_full_disk(model: Running, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one rank's: all say so, what was being written is removed, and the checkpoint before is whole."""
    write = os.write

    def full(descriptor: int, data: Any) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith("__3_0.distcp"):
            raise OSError(28, "No space left on device")
        return write(descriptor, data)

    before = sorted((path.name, path.read_bytes()) for path in folder.iterdir())
    monkeypatch.setattr(os, "write", full)
    with pytest.raises(RuntimeFault, match=r"No space left on device \(on rank 3\)"):
        model[0].save(folder, optimizer=model[1])
    monkeypatch.undo()
    assert [path.name for path in folder.parent.iterdir()] == ["saved"]
    assert sorted((path.name, path.read_bytes()) for path in folder.iterdir()) == before
