"""`autoptd checkpoint`: what it prints, and what it writes for others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import autoptd
from autoptd.runtime.checkpoint.read import open_checkpoint
from autoptd.wings.cli import main
from tests.runtime.checkpoint.models import data, running, tied_gpt, train

safetensors = pytest.importorskip("safetensors.torch")
Saved = tuple[Path, dict[str, torch.Tensor], dict[str, object]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    folder = tmp_path_factory.mktemp("run")
    pm, optimizer = running(precision="bf16", t=2, d=2, zero=1)
    train(pm, optimizer, 2)
    pm.save(folder / "step-00000002", optimizer=optimizer)
    yield folder, pm.state_dict(), optimizer.state_dict()
    pm.close()


def test_list_and_show(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    (saved[0] / "step-00000003.part-11111111").mkdir()
    assert main(["checkpoint", "list", str(saved[0])]) == 0
    text = capsys.readouterr().out
    assert "step-00000002   step 2" in text and "t=2 p=1 d=2" in text
    assert "step-00000003.part-11111111   unfinished save (still running, or interrupted)" in text
    (saved[0] / "step-00000003.part-11111111").rmdir()
    folder = str(saved[0] / "step-00000002")
    assert main(["checkpoint", "show", folder]) == 0
    text = capsys.readouterr().out
    for words in ("precision=bf16 zero=1", "AdamW", "27,680 parameters", "lr=0.01", "last losses"):
        assert words in text
    assert main(["checkpoint", "show", folder, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 2


def test_verify(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved[0] / "step-00000002"
    assert main(["checkpoint", "verify", str(folder)]) == 0
    assert "match their checksums" in capsys.readouterr().out
    for file in folder.iterdir():
        content = file.read_bytes()
        file.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        status = main(["checkpoint", "verify", str(folder)])
        told = capsys.readouterr()
        file.write_bytes(content)
        # Without its manifest a checkpoint is not read at all.
        assert status == (2 if file.name == "checkpoint.json" else 1)
        assert file.name in told.out + told.err
    assert main(["checkpoint", "verify", str(folder)]) == 0


def test_a_changed_byte_is_told_with_its_tensors(saved: Saved, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved[0] / "step-00000002"
    places = open_checkpoint(folder).metadata.storage_data.items()
    info = next(info for index, info in places if index.fqn == "model.transformer.wpe.weight")
    file = info.relative_path
    content = bytearray((folder / file).read_bytes())
    content[info.offset + info.length // 2] ^= 1
    good, _ = (folder / file).read_bytes(), (folder / file).write_bytes(content)
    assert main(["checkpoint", "verify", str(folder)]) == 1
    assert f"{file}: block 0 was changed, with model." in capsys.readouterr().out
    (folder / file).write_bytes(good)


def test_convert_to_safetensors(saved: Saved, tmp_path: Path) -> None:
    folder = str(saved[0] / "step-00000002")
    assert main(["checkpoint", "convert", folder, "--to", "hf", "--out", str(tmp_path / "hf")]) == 0
    found = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    # A tied one once.
    assert found.keys() == saved[1].keys() - {"lm_head.weight"}
    for name, x in found.items():
        assert torch.equal(x, saved[1][name])
    pm = autoptd.parallelize(
        tied_gpt(torch.float32),
        t=2,
        weights=tmp_path / "hf",
        example_inputs=data(0),
        backend="local",
    )
    assert torch.equal(pm.state_dict()["lm_head.weight"], saved[1]["lm_head.weight"])
    pm.close()


def test_convert_to_torch(saved: Saved, tmp_path: Path) -> None:
    folder = str(saved[0] / "step-00000002")
    assert (
        main(["checkpoint", "convert", folder, "--to", "torch", "--out", str(tmp_path / "new" / "all.pt")])
        == 0
    )
    states = torch.load(tmp_path / "new" / "all.pt", weights_only=True)
    model = tied_gpt(torch.float32)
    model.load_state_dict(states["model"])
    for name, x in model.state_dict().items():
        assert torch.equal(x, saved[1][name])
    pm, optimizer = running(precision="bf16", p=2)
    pm.load_optimizer_state_dict(optimizer, states["optimizer"])
    found = optimizer.state_dict()
    for name, record in saved[2]["state"].items():  # type: ignore[attr-defined]
        for key, x in record.items():
            assert torch.equal(found["state"][name][key], x)
    pm.close()


@pytest.mark.parametrize(
    ("words", "told"),
    [
        ("list none", "none: no such directory"),
        ("show none", "none: there is no such folder"),
        ("convert .", "--to or --from: is missing"),
        ("convert . --to hf --from hf --out a", "exclude each other"),
        ("convert . --to hf", "--out: is missing"),
        ("convert . --to hf --out .", "already exists"),
        ("remove .", "invalid choice: 'remove'"),
    ],
)
def test_what_cannot_be_done(words: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["checkpoint", *words.split()]) == 2
    assert told in capsys.readouterr().err
