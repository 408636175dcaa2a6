"""Folders of Hugging Face's format: loaded by every rank's own part into models on meta, trained, and saved back."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.program.specs import ParamSpec
from autoptd.runtime.folders import read_folder
from autoptd.subject.match_folder import counted
from tests.parity import test_segments, test_sharing
from tests.parity.models import batch, gpt

safetensors = pytest.importorskip("safetensors.torch")

Batch = tuple[Tensor, ...]


def odd_gpt() -> nn.Module:
    """A tied vocabulary of 61, which no mesh here divides."""
    return gpt(2, vocab=61)


MODELS: dict[str, tuple[Callable[[], nn.Module], Batch, dict[str, Any], dict[str, Any]]] = {
    # model, global batch, mesh that loads and saves, mesh that goes on
    "padded and tied": (odd_gpt, batch(vocab=61), {"t": 2, "p": 2, "d": 2}, {"t": 4}),
    "shared KV heads": (
        test_sharing.grouped,
        batch(),
        {"t": 8, "machine": test_sharing.CHEAP},
        {"p": 2, "t": 2},
    ),
    "fused q|k|v": (
        lambda: test_segments.phi(parallel=False, slices=False),
        test_segments.example(),
        {"t": 2, "p": 2},
        {"t": 4, "machine": test_sharing.CHEAP},
    ),
}


def written(model: nn.Module, folder: Path) -> Path:
    """A folder as others write it: every tensor once."""
    folder.mkdir(exist_ok=True)
    tensors = {name: x.detach() for name, x in model.named_parameters()}
    tensors |= {name: x for name, x in model.named_buffers() if name in model.state_dict()}
    safetensors.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def on_meta(make: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return make().double()


def one_step(pm: autoptd.ParallelModel, example: Batch) -> float:
    optimizer = pm.optimizer(torch.optim.SGD, lr=0.1)
    loss = float(pm.step(*example))
    optimizer.step()
    return loss


@pytest.mark.one_in(9)
@pytest.mark.parametrize("name", MODELS)
def test_load_step_save_load_elsewhere(name: str, tmp_path: Path) -> None:
    make, example, first, second = MODELS[name]
    model = make().double()
    folder = written(model, tmp_path / "given")
    losses = []
    for mesh in (first, second):
        pm = autoptd.parallelize(
            on_meta(make), **mesh, backend="local", example_inputs=example, weights=folder
        )
        losses.append(one_step(pm, example))
        folder = tmp_path / "saved"
        pm.save_pretrained(folder, max_shard_size="10KB")
        pm.close()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for loss in losses:
        optimizer.zero_grad()
        out = model(*example)
        wanted = out[1] if isinstance(out, tuple) else out
        wanted.backward()
        optimizer.step()
        assert loss == pytest.approx(float(wanted.detach()), rel=1e-12, abs=0)
    reader = read_folder.open_folder(folder).reader()
    for key, parameter in model.named_parameters():
        torch.testing.assert_close(reader.whole(key), parameter.detach(), rtol=1e-9, atol=1e-12)


class Counting:
    """An open file that counts the bytes which a thread takes from it."""

    def __init__(self, file: Any, count: Counter[str]) -> None:
        self._file, self._count = file, count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def _counted(self, x: Tensor) -> Tensor:
        self._count[threading.current_thread().name] += x.nbytes
        return x

    def get_tensor(self, name: str) -> Tensor:
        return self._counted(self._file.get_tensor(name))

    def get_slice(self, name: str) -> Any:
        return Counting(self._file.get_slice(name), self._count)

    def __getitem__(self, at: Any) -> Tensor:
        return self._counted(self._file[at])


@pytest.mark.parametrize("name", MODELS)
def test_every_rank_reads_its_own_part_only(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, example, mesh, _ = MODELS[name]
    folder, opened = written(make().double(), tmp_path / "given"), read_folder.open_file
    read: Counter[str] = Counter()
    monkeypatch.setattr(read_folder, "open_file", lambda file: Counting(opened(file), read))
    pm = autoptd.parallelize(on_meta(make), **mesh, backend="local", example_inputs=example, weights=folder)
    program = pm.program
    t, pp, dp = (mesh.get(one, 1) for one in ("t", "p", "d"))

    def whole(spec: ParamSpec) -> int:
        return torch.Size(spec.shape).numel() * 8

    for rank in range(t * pp * dp):
        local = sum(program.param(one).local_bytes(program.mesh) for one in pm.rank_parameters(rank))
        assert 0 < read[f"rank {rank}"] <= local
    each = {spec: len(spec.owners(program.ranks)) * dp * whole(spec) for spec in program.params}
    copies = {spec: t // spec.storage.layout.pieces(program.mesh) for spec in program.params}
    assert sum(read.values()) == sum(each[spec] * copies[spec] for spec in program.params)
    assert any(spec.kind == "S" for spec in program.params)
    pm.close()


def test_parameters_on_meta_give_the_program_of_real_ones(tmp_path: Path) -> None:
    folder = written(odd_gpt().double(), tmp_path / "given")
    request: dict[str, Any] = {"t": 2, "p": 2, "backend": "local", "example_inputs": batch(vocab=61)}
    one = autoptd.parallelize(on_meta(odd_gpt), **request, weights=folder)
    two = autoptd.parallelize(odd_gpt().double(), **request)
    assert one.program.fingerprint() == two.program.fingerprint()
    one.close(), two.close()


def test_a_models_own_values_give_way_and_are_left_alone(tmp_path: Path) -> None:
    """A file of another precision; a model whose mask is a persistent buffer, which the folder has too."""

    class Masked(nn.Module):
        def __init__(self, value: float) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            nn.init.constant_(self.linear.weight, value)
            self.register_buffer("scale", torch.full((4,), value))

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.scale).square().mean()

    folder = written(Masked(2.0).half(), tmp_path / "given")
    model, x = Masked(1.0), torch.ones(4, 4)
    pm = autoptd.parallelize(model, d=2, backend="local", example_inputs=(x,), weights=folder)
    given = Masked(2.0)
    given.load_state_dict(pm.state_dict())
    assert (
        given.scale.eq(2).all()
        and given.linear.weight.eq(2).all()
        and given.linear.weight.dtype == torch.float32
    )
    assert float(pm.step(x)) == pytest.approx(float(given(x).detach()), rel=1e-6)
    assert model.linear.weight.eq(1).all() and model.scale.eq(1).all()
    pm.save_pretrained(tmp_path / "saved")
    assert set(read_folder.open_folder(tmp_path / "saved").entries) == {
        "linear.weight",
        "linear.bias",
        "scale",
    }
    pm.close()


def test_all_that_does_not_fit_is_told_at_once(tmp_path: Path) -> None:
    model = gpt(3)
    tensors = {name: x.detach().clone() for name, x in model.named_parameters()}
    for layer in range(3):
        del tensors[f"transformer.h.{layer}.mlp.c_proj.bias"]
        tensors[f"h.{layer}.extra"] = torch.ones(1)
    tensors["transformer.ln_f.weight"] = torch.ones(7)
    tensors["transformer.wpe.weight"] = tensors["transformer.wpe.weight"].to(torch.int8)
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(autoptd.PlanError) as caught:
        autoptd.parallelize(model, backend="local", weights=tmp_path)
    assert caught.value.fact == (
        "missing: transformer.h.*.mlp.c_proj.bias (3); unexpected: h.*.extra (3); "
        "transformer.wpe.weight has dtype torch.int8, which cannot be cast to torch.float32; "
        "transformer.ln_f.weight has shape (7,), not (32,)"
    )
    assert counted(["a.1.b", "c"]) == "a.1.b, c"


def test_tied_names_with_different_values_are_refused(tmp_path: Path) -> None:
    model = gpt(1)
    tensors = {name: x.detach().clone() for name, x in model.named_parameters(remove_duplicate=False)}
    request: dict[str, Any] = {"t": 2, "backend": "local", "example_inputs": batch(), "weights": tmp_path}
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    autoptd.parallelize(model, **request).close()
    tensors["lm_head.weight"][-1, -1] += 1
    safetensors.save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(autoptd.PlanError, match=r"is tied to \S+ in the model.*tie_word_embeddings=False"):
        autoptd.parallelize(model, **request)


def test_a_buffer_without_values_is_refused(tmp_path: Path) -> None:
    class Table(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("table", torch.arange(4.0), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * self.table).sum()

    folder = written(Table().double(), tmp_path / "given")
    with pytest.raises(autoptd.PlanError, match="table: buffers on the meta device"):
        autoptd.parallelize(on_meta(Table), backend="local", weights=folder)


def test_a_disk_that_fails_is_told_by_all_ranks(tmp_path: Path) -> None:
    model = gpt(1)
    pm = autoptd.parallelize(model, t=2, backend="local", example_inputs=batch())
    (tmp_path / "file").write_text("")
    with pytest.raises(autoptd.RuntimeFault, match="save_pretrained: rank 0 cannot write: FileExistsError"):
        pm.save_pretrained(tmp_path / "file")
    pm.save_pretrained(tmp_path / "folder")
    pm.close()


# transformers


def hugging_face(config: str, **more: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    sizes = {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "vocab_size": 61, **more}
    return getattr(transformers, f"{config}Config")(**sizes)


TOKENS = torch.randint(0, 61, (8, 8), generator=torch.Generator().manual_seed(0))
CALL = {"input_ids": TOKENS, "labels": TOKENS}


@pytest.mark.one_in(9)
@pytest.mark.parametrize(
    ("config", "more"),
    [
        ("GPT2", {}),  # tied, weights as [in, out], a padded vocabulary
        ("Llama", {"num_key_value_heads": 2, "intermediate_size": 64}),  # tables of angles that no file holds
        ("GPTNeoX", {"intermediate_size": 64}),  # a name that files have otherwise
    ],
)
def test_a_folder_of_transformers_and_back(config: str, more: dict[str, Any], tmp_path: Path) -> None:
    """The call of a user of transformers: from_config on meta, loaded, saved, and loaded by from_pretrained."""
    cfg = hugging_face(config, **more)
    auto = pytest.importorskip("transformers").AutoModelForCausalLM
    torch.manual_seed(0)
    model = auto.from_config(cfg).eval()
    model.save_pretrained(tmp_path / "theirs", max_shard_size="20KB")
    with torch.device("meta"):
        empty = auto.from_config(cfg)
    request: dict[str, Any] = {"backend": "local", "example_inputs": CALL, "weights": tmp_path / "theirs"}
    pm = autoptd.parallelize(empty, t=2, p=2, num_microbatches=1, **request)
    pm.save_pretrained(tmp_path / "ours", max_shard_size="30KB")
    pm.close()
    theirs, ours = (read_folder.open_folder(tmp_path / one).entries for one in ("theirs", "ours"))
    assert ours.keys() == theirs.keys() and len({one.file for one in ours.values()}) > 1
    loaded = auto.from_pretrained(tmp_path / "ours").eval()
    assert torch.equal(loaded(TOKENS).logits, model(TOKENS).logits)
    assert loaded.config.architectures == [type(model).__name__]


@pytest.mark.parametrize(
    ("is_tied", "remark"),
    [(True, "wte.weight, lm_head.weight: one parameter here"), (False, "lm_head.weight: not tied here")],
)
@pytest.mark.parametrize("is_config_set", [False, True])
def test_a_head_tied_or_untied_by_hand_comes_back(
    is_tied: bool, remark: str, is_config_set: bool, tmp_path: Path
) -> None:
    """Against the config, which says the reverse, or is set to it after the model was made."""
    transformers = pytest.importorskip("transformers")
    cfg = hugging_face(
        "GPT2", tie_word_embeddings=is_tied == is_config_set, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    model = transformers.GPT2LMHeadModel(cfg)
    weight = model.transformer.wte.weight
    model.lm_head.weight = weight if is_tied else torch.nn.Parameter(torch.randn_like(weight))
    model.config.tie_word_embeddings = not is_tied
    pm = autoptd.parallelize(model, t=2, example_inputs=CALL, backend="local")
    optimizer = pm.optimizer(torch.optim.SGD, lr=0.1)
    pm.step(**CALL)
    optimizer.step()
    with pytest.warns(UserWarning, match=remark):
        pm.save_pretrained(tmp_path)
    model.load_state_dict(pm.state_dict())
    pm.close()
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(TOKENS).logits, model.eval()(TOKENS).logits)
    assert loaded.config.tie_word_embeddings is not is_tied


def test_the_call_of_the_how_to(tmp_path: Path) -> None:
    """From a config, on a real device; then from a folder of the base model, whose names lack `transformer.`."""
    transformers = pytest.importorskip("transformers")
    cfg = hugging_face("GPT2", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    model = transformers.AutoModelForCausalLM.from_config(cfg)
    pm = autoptd.parallelize(model, t=2, p=2, d=2, example_inputs=CALL, backend="local")
    loss = float(pm.step(**pm.local_batch(**CALL)))
    assert loss == pytest.approx(float(model(**CALL).loss.detach()), rel=1e-5)
    pm.close()
    model.transformer.save_pretrained(tmp_path)
    assert "wte.weight" in read_folder.open_folder(tmp_path).entries
    pm = autoptd.parallelize(model, d=2, example_inputs=CALL, backend="local", weights=tmp_path)
    assert float(pm.step(**CALL)) == pytest.approx(loss, rel=1e-5)
    pm.close()
