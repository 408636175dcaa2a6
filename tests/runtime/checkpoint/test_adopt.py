"""`autoptd checkpoint convert --from`: what torch.save and Hugging Face folders hold becomes a checkpoint as any other."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autoptd
from autoptd.errors import PlanError
from autoptd.wings.cli import main
from tests.runtime.checkpoint.models import assert_same, data, running, state_of, tied_gpt, train
from tests.runtime.checkpoint.other_programs import one_device, plain_losses
from tests.runtime.checkpoint.test_others import Command, check_losses, goes_on
from tests.runtime.checkpoint.test_weights import on_meta


def convert(source: Path, kind: str, out: Path) -> None:
    assert main(["checkpoint", "convert", str(source), "--from", kind, "--out", str(out)]) == 0


@pytest.mark.parametrize("mesh", [{"t": 2, "p": 2}, {"t": 2, "d": 2, "zero": 1}], ids=str)
def test_a_run_of_plain_torch_goes_on(
    tmp_path: Path, mesh: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    """Tied weights once, moments and groups; the optimizer numbers its parameters."""
    own, optimizer = one_device()
    plain_losses(own, optimizer, 0, 2)
    saved = {"model": own.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}
    torch.save(saved, tmp_path / "saved.pt")
    expected = plain_losses(own, optimizer, 2, 3)
    convert(tmp_path / "saved.pt", "torch", tmp_path / "saved")
    assert "skipped: epoch" in capsys.readouterr().out
    check_losses(goes_on(tmp_path / "saved", **mesh), expected)
    assert main(["checkpoint", "verify", str(tmp_path / "saved")]) == 0
    assert main(["checkpoint", "show", str(tmp_path / "saved")]) == 0
    assert "autoptd checkpoint convert, from " in capsys.readouterr().out


def test_there_and_back_is_the_same(tmp_path: Path) -> None:
    """A checkpoint to a file of torch.save, whose optimizer has names, and to a checkpoint again."""
    pm, optimizer = running(t=2, d=2)
    train(pm, optimizer, 2)
    pm.save(tmp_path / "saved", optimizer=optimizer)
    expected = state_of(pm, optimizer)
    pm.close()
    words = [
        "checkpoint",
        "convert",
        str(tmp_path / "saved"),
        "--to",
        "torch",
        "--out",
        str(tmp_path / "all.pt"),
    ]
    assert main(words) == 0
    convert(tmp_path / "all.pt", "torch", tmp_path / "again")
    pm, optimizer = running(p=2)
    pm.load(tmp_path / "again", optimizer=optimizer)
    assert pm.steps == 0
    assert_same({**state_of(pm, optimizer), "steps": 2}, expected)
    pm.close()


@pytest.mark.parametrize("how", ["weights", "load"])
def test_weights_of_a_folder(tmp_path: Path, how: str) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    values = tied_gpt().state_dict()
    (tmp_path / "hf").mkdir()
    given = {name: x for name, x in values.items() if name != "lm_head.weight"}
    safetensors.save_file(given, tmp_path / "hf" / "model.safetensors")
    convert(tmp_path / "hf", "hf", tmp_path / "saved")
    keywords: dict[str, Any] = {"t": 2, "example_inputs": data(0), "backend": "local"}
    if how == "weights":
        pm = autoptd.parallelize(on_meta(), weights=tmp_path / "saved", **keywords)
    else:
        pm = autoptd.parallelize(tied_gpt(), **keywords)
        pm.load(tmp_path / "saved")
    found = pm.state_dict()
    assert all(torch.equal(found[name], x) for name, x in values.items())
    pm.close()


class Counted(nn.Module):
    """Has buffers that are no floats, and a tensor that is not contiguous."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(4, 6)
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("none", torch.ones(0, 3, dtype=torch.bool))
        self.down = nn.Linear(6, 4)
        self.up.weight.data = torch.randn(4, 6).t()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.down(self.up(x)) * self.seen).square().mean()


def stepped(*groups: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Counted()
    params: Any = [{"params": part(model)} for part in groups] or model.parameters()
    optimizer = torch.optim.AdamW(params)
    model(torch.randn(2, 4)).backward()
    optimizer.step()
    return model, optimizer


def saved_by(model: nn.Module, optimizer: torch.optim.Optimizer, folder: Path) -> Path:
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, folder / "saved.pt")
    return folder / "saved.pt"


def test_integers_are_no_parameters(tmp_path: Path) -> None:
    model, optimizer = stepped()
    convert(saved_by(model, optimizer, tmp_path), "torch", tmp_path / "saved")
    x = (torch.randn(2, 4),)
    pm = autoptd.parallelize(Counted(), example_inputs=x, backend="local", p=2)
    ours = pm.optimizer(torch.optim.AdamW)
    pm.load(tmp_path / "saved", optimizer=ours)
    assert all(torch.equal(pm.state_dict()[name], x) for name, x in model.state_dict().items())
    state = ours.state_dict()["state"]
    for name, parameter in model.named_parameters():
        assert torch.equal(state[name]["exp_avg"], optimizer.state[parameter]["exp_avg"])
    pm.close()


def names_alone(model: nn.Module) -> list[Any]:
    return list(model.down.named_parameters("down"))


def others(model: nn.Module) -> list[Any]:
    return list(model.up.named_parameters("up"))


def test_names_tell_which_group_has_what(tmp_path: Path) -> None:
    model, optimizer = stepped(names_alone, others)
    convert(saved_by(model, optimizer, tmp_path), "torch", tmp_path / "saved")
    [first, second] = autoptd_groups(tmp_path / "saved")
    assert first == ["down.weight", "down.bias"] and second == ["up.weight", "up.bias"]


def autoptd_groups(folder: Path) -> list[list[str]]:
    from autoptd.runtime.checkpoint.read import open_checkpoint

    optimizer = open_checkpoint(folder).manifest.optimizer
    assert optimizer is not None
    return [group["params"] for group in optimizer["groups"]]


def of_down(model: nn.Module) -> list[Any]:
    return list(model.down.parameters())


def of_up(model: nn.Module) -> list[Any]:
    return list(model.up.parameters())


def wrong_file(kind: str, folder: Path) -> Path:
    file = folder / "saved.pt"
    if kind == "groups":
        return saved_by(*stepped(of_down, of_up), folder)
    if kind == "frozen":
        return saved_by(*stepped(of_down), folder)
    if kind == "order":
        return saved_by(*stepped(lambda model: [*of_down(model), *of_up(model)]), folder)
    values: dict[str, Any] = {
        "pickle": Command(folder / "mark"),
        "nested pickle": {"model": {"w": torch.ones(2)}, "optimizer": Command(folder / "mark")},
        "list": [1, 2],
        "object": {"model": {"w": "text"}},
        "sparse": {"w": torch.ones(2).to_sparse()},
        "state": {"model": {"w": torch.ones(2)}, "optimizer": {"w": torch.ones(2)}},
    }
    if kind == "pickle":
        file.write_bytes(pickle.dumps(values[kind]))
    elif kind == "text":
        file.write_text("text")
    elif kind != "none":
        torch.save(values[kind], file)
    return file


@pytest.mark.parametrize(
    "kind, told",
    [
        ("none", "is not a file"),
        ("text", "saved.pt: "),
        ("pickle", "saved.pt: "),
        ("nested pickle", "cannot be read without unpickling code"),
        ("list", "does not hold a state dict"),
        ("object", "has a str under 'w', not a tensor"),
        ("sparse", "is sparse or quantized"),
        ("state", "is not the state dict of a torch optimizer"),
        ("groups", "has numbers for 4 parameters in 2 groups"),
        ("frozen", "numbers for 2 parameters in 1 groups, which do not identify 4 tensors"),
        ("order", "exp_avg of up.weight has shape (4, 6), and up.weight (6, 4)"),
    ],
)
def test_what_is_refused(tmp_path: Path, kind: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    file = wrong_file(kind, tmp_path)
    before = set(tmp_path.iterdir())
    words = ["checkpoint", "convert", str(file), "--from", "torch", "--out", str(tmp_path / "out")]
    assert main(words) == 2
    assert told in capsys.readouterr().err
    assert set(tmp_path.iterdir()) == before


def test_nothing_is_left_of_what_fails(tmp_path: Path) -> None:
    """A setting of a group that a checkpoint cannot hold."""
    from autoptd.runtime.checkpoint.adopt import Content, write_checkpoint

    content = Content("here", {"w": torch.ones(2)}, groups=[{"params": ["w"], "lr": object()}])
    with pytest.raises(PlanError, match="which a checkpoint cannot hold"):
        write_checkpoint(content, tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.thorough
@pytest.mark.parametrize("to", ["torch", "hf"])
def test_one_tensor_is_in_memory_at_a_time(tmp_path: Path, to: str) -> None:
    """A7, of memory that the host cannot take back (pages of mapped files it can): the largest tensor, and 128 MiB."""
    pytest.importorskip("safetensors")
    large = {f"w{number}": torch.randn(2048, 4096) for number in range(12)}
    state = {name: {"exp_avg": x + 1} for name, x in large.items()}
    group = {"params": list(large), "lr": 0.1}
    torch.save({"model": large, "optimizer": {"state": state, "param_groups": [group]}}, tmp_path / "in.pt")
    first = [str(tmp_path / "in.pt"), "--from", "torch", "--out", str(tmp_path / "saved")]
    second = [str(tmp_path / "saved"), "--to", to, "--out", str(tmp_path / "out")]
    third = [str(tmp_path / "out"), "--from", to, "--out", str(tmp_path / "again")]
    for words in (first, second, third):
        command = [
            sys.executable,
            "-m",
            "tests.runtime.checkpoint.peak_memory",
            "checkpoint",
            "convert",
            *words,
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert int(done.stdout.splitlines()[-1]) <= large["w0"].nbytes + (128 << 20), words
