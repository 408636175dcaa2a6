"""Folders that hold no adapter of this model: one error that says why, and nothing has changed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import autoptd
from autoptd.model import adapters
from autoptd.options import Options
from autoptd.program.specs import ParamSpec
from autoptd.runtime.world.world import World
from tests.model.test_adapters import CONFIG, WEIGHTS, fresh, own_folder, running
from tests.parity.test_peft import MACHINE, adapted, batch, gpt2, lora

safetensors = pytest.importorskip("safetensors.torch")


def no_folder(folder: Path) -> Path:
    return folder.with_name("nowhere")


def without(name: str) -> Callable[[Path], Path]:
    def remove(folder: Path) -> Path:
        (folder / name).unlink()
        return folder

    return remove


def pickled(folder: Path) -> Path:
    torch.save(safetensors.load_file(folder / WEIGHTS), folder / "adapter_model.bin")
    return without(WEIGHTS)(folder)


def cut_short(folder: Path) -> Path:
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    return folder


def no_json(folder: Path) -> Path:
    (folder / CONFIG).write_text("{")
    return folder


def configured(**fields: Any) -> Callable[[Path], Path]:
    def change(folder: Path) -> Path:
        config = json.loads((folder / CONFIG).read_text()) | fields
        (folder / CONFIG).write_text(json.dumps(config))
        return folder

    return change


def rewritten(change: Callable[[str, torch.Tensor], tuple[str, torch.Tensor]]) -> Callable[[Path], Path]:
    """Weights of other names or shapes, beside the config that they had."""

    def rewrite(folder: Path) -> Path:
        tensors = safetensors.load_file(folder / WEIGHTS)
        safetensors.save_file(dict(change(name, x) for name, x in tensors.items()), folder / WEIGHTS)
        return folder

    return rewrite


def of(make: Callable[[], nn.Module]) -> Callable[[Path], Path]:
    return lambda folder: own_folder(make(), folder.with_name("of another"))


def narrow() -> nn.Module:
    """The same names, and one shape is another."""
    model = fresh()
    b = model.base_model.model.model.layers[0].mlp.up_proj.lora_B["default"]  # type: ignore
    b.weight = nn.Parameter(torch.zeros(48, 4))
    return model


def of_gpt2() -> nn.Module:
    return peft.get_peft_model(gpt2(), lora(target_modules=["c_attn"], fan_in_fan_out=True))


BAD: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no folder": (no_folder, "nowhere'.*there is no such folder"),
    "no config": (without(CONFIG), f"holds no {CONFIG}"),
    "no weights": (without(WEIGHTS), f"holds no {WEIGHTS}"),
    "pickled": (pickled, "convert adapter_model.bin once"),
    "cut short": (cut_short, f"{WEIGHTS} cannot be read"),
    "no JSON": (no_json, f"{CONFIG} cannot be read: JSONDecodeError"),
    "another type": (of(lambda: adapted("IA3")), "is of type IA3, and the model's adapter 'default' of LORA"),
    "another rank": (of(lambda: fresh(r=8)), "r=8, not 4"),
    "another scale": (configured(lora_alpha=32), "lora_alpha=32, not 8"),
    "another way": (configured(use_dora=True), "use_dora=True, not False"),
    "a changed base": (configured(init_lora_weights="pissa"), "init_lora_weights='pissa', not True"),
    "more modules": (
        of(lambda: fresh(target_modules="all-linear")),
        r"another base: unexpected: base_model.model.model.layers.\*.mlp.gate_proj.lora_A.weight \(2\), .*and 3 more",
    ),
    "fewer modules": (
        of(lambda: fresh(target_modules=["q_proj"])),
        r"another base: missing: base_model.model.model.layers.\*.self_attn.v_proj.lora_A.weight \(2\)",
    ),
    "another base": (of(of_gpt2), "fan_in_fan_out=True, not False"),
    "renamed": (
        rewritten(lambda name, x: (name.replace("self_attn", "attention"), x)),
        r"missing: .*self_attn.q_proj.lora_A.weight \(2\), .*; unexpected: .*layers.\*.attention.q_proj.lora_A.weight \(2\)",
    ),
    "a rank that its config does not have": (
        rewritten(lambda name, x: (name, x[:2] if "lora_A" in name else x[:, :2].contiguous())),
        r"lora_A.default.weight has shape \(2, \d+\), not \(4, \d+\); .*; and 13 more",
    ),
    "integers": (rewritten(lambda name, x: (name, x.int())), "has dtype torch.int32, which cannot be cast"),
    "another shape": (
        of(narrow),
        r"layers.0.mlp.up_proj.lora_B.default.weight has shape \(48, 4\), not \(64, 4\)",
    ),
}


@pytest.fixture(scope="module")
def target() -> Iterator[autoptd.ParallelModel]:
    with running(fresh(), t=2, p=2) as pm:
        yield pm


@pytest.mark.parametrize("case", BAD)
def test_bad_folders_change_nothing(case: str, target: autoptd.ParallelModel, tmp_path: Path) -> None:
    spoil, message = BAD[case]
    folder = spoil(own_folder(adapted("LoRA"), tmp_path / "own"))
    before = target.fingerprint()
    with pytest.raises(autoptd.PlanError, match=message):
        target.load_adapter(folder)
    assert target.fingerprint() == before


def test_where_an_adapter_comes_from_does_not_matter(target: autoptd.ParallelModel, tmp_path: Path) -> None:
    change = configured(init_lora_weights="gaussian", base_model_name_or_path="elsewhere", revision="main")
    target.load_adapter(change(own_folder(adapted("LoRA"), tmp_path / "own")))
    target.save_adapter(tmp_path / "mine")
    assert (tmp_path / "mine" / WEIGHTS).read_bytes() == (tmp_path / "own" / WEIGHTS).read_bytes()


def test_one_rank_that_cannot_read_stops_all(
    target: autoptd.ParallelModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = rewritten(lambda name, x: (name, 2 * x))(own_folder(adapted("LoRA"), tmp_path / "own"))
    before, read = target.fingerprint(), adapters.read_shard

    def fails(spec: ParamSpec, reader: Any, world: World) -> torch.Tensor:
        if world.rank == 2:
            raise OSError("the disk is gone")
        return read(spec, reader, world)

    with monkeypatch.context() as broken:
        broken.setattr(adapters, "read_shard", fails)
        with pytest.raises(autoptd.RuntimeFault, match=r"the disk is gone \(on rank 2\)"):
            target.load_adapter(own)
    assert target.fingerprint() == before
    target.load_adapter(own)
    assert target.fingerprint() != before


def test_a_program_of_a_file_says_nothing_of_adapters(tmp_path: Path) -> None:
    program = autoptd.compile(fresh(), t=2, example_inputs=batch(), machine=MACHINE)
    pm = autoptd.ParallelModel(program, Options(t=2, backend="local"), fresh().state_dict())
    try:
        for call in (pm.save_adapter, pm.load_adapter):
            with pytest.raises(autoptd.PlanError, match="says nothing of adapters"):
                call(tmp_path / "adapter")
    finally:
        pm.close()
