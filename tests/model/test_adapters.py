"""Adapters of PEFT: written as its own `save_pretrained` writes them, read by it, and loaded on any mesh."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn

import autoptd
from autoptd.runtime.folders import read_folder, save_pretrained
from tests.parity.test_peft import KINDS, MACHINE, adapted, batch, llama, lora

safetensors = pytest.importorskip("safetensors.torch")

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
WIDE = {"t": 2, "p": 2, "num_microbatches": 2}


@contextmanager
def running(model: nn.Module, **mesh: Any) -> Iterator[autoptd.ParallelModel]:
    pm = autoptd.parallelize(model, backend="local", example_inputs=batch(), machine=MACHINE, **mesh)
    try:
        yield pm
    finally:
        pm.close()


def own_folder(model: nn.Module, folder: Path) -> Path:
    """What PEFT itself writes."""
    model.save_pretrained(folder)  # type: ignore[operator]
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    """A config with its lists in one order: PEFT writes sets."""
    config: dict[str, Any] = json.loads((folder / CONFIG).read_text())
    return {key: sorted(x) if isinstance(x, list) else x for key, x in config.items()}


def train(pm: autoptd.ParallelModel) -> float:
    optimizer = pm.optimizer(torch.optim.AdamW, lr=1e-2)
    loss = float(pm.step(**batch()))
    optimizer.step()
    return loss


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model.double().eval()(input_ids=batch()["input_ids"]).logits


SAVED: dict[str, Callable[[], nn.Module]] = {kind: partial(adapted, kind) for kind in KINDS}


def with_embeddings() -> nn.Module:
    """Besides adapters of linear layers: one of the embedding, and a head that is trained whole."""
    torch.manual_seed(0)
    config = lora(target_modules=["embed_tokens", "q_proj"], modules_to_save=["lm_head"])
    return peft.get_peft_model(llama(), config)


def without_a_task() -> nn.Module:
    """The config says where the base's class is."""
    torch.manual_seed(0)
    return peft.get_peft_model(llama(), peft.LoraConfig(r=2, target_modules=["q_proj"]))


SAVED |= {"embeddings and a whole head": with_embeddings, "no task": without_a_task}


@pytest.mark.one_in(9)
@pytest.mark.parametrize("kind", list(SAVED), ids=list(SAVED))
def test_the_folder_is_what_peft_writes(kind: str, tmp_path: Path) -> None:
    model = SAVED[kind]()
    with running(model, **WIDE) as pm:
        pm.save_adapter(tmp_path / "mine")
    own = own_folder(model, tmp_path / "own")
    assert (tmp_path / "mine" / WEIGHTS).read_bytes() == (own / WEIGHTS).read_bytes()
    assert config_of(tmp_path / "mine") == config_of(own)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["mine", "own"]


def test_peft_loads_what_was_trained_and_any_mesh_goes_on(tmp_path: Path) -> None:
    folder = tmp_path / "adapter"
    model = adapted("LoRA")
    with running(model, **WIDE) as pm:
        train(pm)
        pm.save_adapter(folder)
        state = pm.state_dict()
        following = float(pm.step(**batch()))
    model.load_state_dict(state)
    torch.manual_seed(0)
    loaded = peft.PeftModel.from_pretrained(llama(), folder)
    assert torch.equal(logits(loaded), logits(model))
    # Another adapter of the same base: it is this one afterwards.
    with running(fresh(), t=1, d=2, zero=1) as pm:
        before = pm.fingerprint()
        pm.load_adapter(folder)
        assert pm.fingerprint() != before
        found = pm.state_dict()
        assert all(torch.equal(found[name], x) for name, x in state.items())
        assert float(pm.step(**batch())) == pytest.approx(following, rel=1e-5)


def fresh(**options: Any) -> nn.Module:
    """The base of `adapted`, with an adapter of PEFT's first values."""
    torch.manual_seed(0)
    return peft.get_peft_model(llama(), lora(**options))


@pytest.mark.thorough
def test_masters_follow(tmp_path: Path) -> None:
    own = own_folder(adapted("LoRA"), tmp_path / "own")
    with running(fresh(), t=2, d=2, zero=1, precision="bf16") as pm:
        pm.load_adapter(own)
        pm.save_adapter(tmp_path / "mine")
    assert (tmp_path / "mine" / WEIGHTS).read_bytes() == (own / WEIGHTS).read_bytes()


def two_adapters() -> nn.Module:
    model = fresh()
    model.add_adapter("other", lora(r=2, target_modules=["q_proj"]))  # type: ignore[operator]
    return model


def test_one_of_several(tmp_path: Path) -> None:
    model = two_adapters()
    own_folder(model, tmp_path / "own")
    with running(model, t=2) as pm:
        pm.save_adapter(tmp_path / "active")
        pm.save_adapter(tmp_path / "named", adapter="other")
        with pytest.raises(autoptd.PlanError, match=r"no adapter 'none'.*one of 'default', 'other'"):
            pm.save_adapter(tmp_path / "none", adapter="none")
    for mine, own in (("active", "own"), ("named", "own/other")):
        assert (tmp_path / mine / WEIGHTS).read_bytes() == (tmp_path / own / WEIGHTS).read_bytes()


def test_a_model_of_transformers_with_adapters_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It asks for a version of PEFT that may be newer than the one that is here.
    monkeypatch.setattr("transformers.integrations.peft.check_peft_version", lambda **_: None)
    torch.manual_seed(0)
    model = llama()
    model.add_adapter(lora())  # type: ignore[operator]
    own_folder(model, tmp_path / "own")
    with running(model, t=2) as pm:
        pm.save_adapter(tmp_path / "mine")
        pm.load_adapter(tmp_path / "own")
    assert (tmp_path / "mine" / WEIGHTS).read_bytes() == (tmp_path / "own" / WEIGHTS).read_bytes()


class Scored(nn.Module):
    """A model of PEFT within one of the user's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = fresh()

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(input_ids=input_ids, labels=labels).loss


@pytest.mark.thorough
def test_a_model_within_another(tmp_path: Path) -> None:
    model = Scored()
    own_folder(model.inner, tmp_path / "own")
    with running(model, t=2) as pm:
        pm.save_adapter(tmp_path / "mine")
        pm.load_adapter(tmp_path / "own")
    assert (tmp_path / "mine" / WEIGHTS).read_bytes() == (tmp_path / "own" / WEIGHTS).read_bytes()


def test_a_save_that_fails_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "adapter"
    with running(fresh(), t=2) as pm:
        pm.save_adapter(folder)
        before = (folder / WEIGHTS).read_bytes()
        train(pm)

        def full(*_: Any, **__: Any) -> None:
            raise OSError("disk full")

        with monkeypatch.context() as broken:
            broken.setattr(read_folder.library().torch, "save_file", full)
            with pytest.raises(autoptd.RuntimeFault, match="rank 0 cannot write: OSError: disk full"):
                pm.save_adapter(folder)
        assert (folder / WEIGHTS).read_bytes() == before
        assert [file.name for file in tmp_path.iterdir()] == ["adapter"]
        pm.save_adapter(folder)
        assert (folder / WEIGHTS).read_bytes() != before


def test_a_reader_finds_no_weights_beside_another_config(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = own_folder(fresh(r=2), tmp_path / "adapter")
    renamed = Path.replace

    def stopped(self: Path, target: Path) -> Path:
        if self.name == WEIGHTS:
            raise OSError("stopped")
        return renamed(self, target)

    with running(fresh(), t=2) as pm:
        monkeypatch.setattr(Path, "replace", stopped)
        with pytest.raises(autoptd.RuntimeFault, match="stopped"):
            pm.save_adapter(folder)
        assert not (folder / WEIGHTS).exists() and config_of(folder)["r"] == 4
        # Of the same config, the old weights stay.
        own_folder(fresh(), folder)
        with pytest.raises(autoptd.RuntimeFault, match="stopped"):
            pm.save_adapter(folder)
        assert (folder / WEIGHTS).exists()


def test_what_is_trained_besides_is_told(tmp_path: Path) -> None:
    model = fresh()
    for name, parameter in model.named_parameters():
        if name.endswith("input_layernorm.weight"):
            parameter.requires_grad_(True)
    told = r"no part of adapter 'default'.*input_layernorm.weight \(2\)"
    with running(model, t=2) as pm, pytest.warns(UserWarning, match=told):
        pm.save_adapter(tmp_path)


def test_embeddings_that_were_resized(tmp_path: Path) -> None:
    """The base's files have another size than the model: PEFT writes the embeddings besides."""
    base = llama()
    base.config.vocab_size += 1
    base.config.save_pretrained(tmp_path / "base")  # type: ignore[operator]
    model = adapted("LoRA")
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")  # type: ignore
    nn.init.normal_(model.get_input_embeddings().weight)  # type: ignore[operator, union-attr]
    own = own_folder(model, tmp_path / "own")
    assert any("embed_tokens" in name for name in safetensors.load_file(own / WEIGHTS))
    with running(fresh(), t=2, p=2) as pm:
        pm.load_adapter(own)
        state = pm.state_dict()
    for name, x in model.state_dict().items():  # type: ignore[operator]
        assert torch.equal(state[name], x), name
    with running(model, t=2, p=2) as pm:
        pm.save_adapter(tmp_path / "mine")
    assert (tmp_path / "mine" / WEIGHTS).read_bytes() == (own / WEIGHTS).read_bytes()


def test_a_folder_that_from_pretrained_could_not_read_is_refused(tmp_path: Path) -> None:
    model = adapted("LoRA")
    with running(model, t=2) as pm:
        train(pm)
        with pytest.raises(
            autoptd.PlanError, match=r"random weights.*save_adapter\(folder\).*merge_and_unload"
        ):
            pm.save_pretrained(tmp_path / "whole")
        # What it advises works.
        model.load_state_dict(pm.state_dict())
        wanted = logits(model)
    whole = model.merge_and_unload()  # type: ignore[operator]
    whole.save_pretrained(tmp_path / "whole")
    loaded = type(whole).from_pretrained(tmp_path / "whole")
    torch.testing.assert_close(logits(loaded), wanted, atol=1e-6, rtol=0)


def test_a_model_without_adapters(tmp_path: Path) -> None:
    with running(llama(), t=2) as pm:
        for call in (pm.save_adapter, pm.load_adapter):
            with pytest.raises(autoptd.PlanError, match=r"the model has no adapters of PEFT.*get_peft_model"):
                call(tmp_path / "adapter")


def test_the_files_have_the_names_of_peft() -> None:
    names = peft.utils.SAFETENSORS_WEIGHTS_NAME, peft.utils.CONFIG_NAME
    assert names == (save_pretrained.WEIGHTS, save_pretrained.CONFIG)
