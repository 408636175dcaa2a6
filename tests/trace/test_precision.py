"""Buffers under `precision="bf16"`: what a checkpoint has is cast, what is computed from a config is not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import TraceError
from autoptd.program.program import Program
from autoptd.trace import computing_in
from autoptd.wings.reports.summary import summarize

VOCAB, WIDTH = 16, 16
# Positions are so far apart that a few tokens reach to 8,192.
STRIDE = 64
BF16 = torch.bfloat16


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return x * cos + torch.cat([-two, one], -1) * sin


class Attention(nn.Module):
    """Attends to the token `distance` before, where its angles are right."""

    def __init__(self, length: int, distance: int, tables: str) -> None:
        super().__init__()
        self.tables, self.scale = tables, 40.0
        frequencies = 10_000.0 ** (-torch.arange(0, WIDTH, 2) / WIDTH)
        self.q, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)
        nn.init.constant_(self.q.weight, 0.0)
        nn.init.constant_(self.q.bias, WIDTH**-0.5)
        nn.init.eye_(self.v.weight)
        angles = torch.outer(STRIDE * torch.arange(length).float(), frequencies).repeat(1, 2)
        # The angle at which keys are ahead.
        self.register_buffer("ahead", STRIDE * distance * frequencies.repeat(2), persistent=False)
        if tables in ("frequencies", "masked"):
            self.register_buffer("frequencies", frequencies, persistent=False)
        else:
            self.register_buffer("cos", angles.cos(), persistent=False)
            self.register_buffer("sin", angles.sin(), persistent=False)
        if tables == "masked":
            mask = torch.full((length, length), -torch.inf).triu(1)
            self.register_buffer("mask", mask, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        length, q = x.shape[1], self.q(x)
        k = turned(q, self.ahead.float().cos().to(x.dtype), self.ahead.float().sin().to(x.dtype))
        if self.tables in ("frequencies", "masked"):
            positions = STRIDE * torch.arange(length, device=x.device, dtype=torch.float32)
            angles = torch.outer(positions, self.frequencies.float()).repeat(1, 2)
            cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        else:
            cos, sin = self.cos[:length], self.sin[:length]
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        if self.tables == "masked":
            scores = self.scale * q @ k.transpose(-1, -2) + self.mask[:length, :length]
            return scores.softmax(-1) @ self.v(x)
        return F.scaled_dot_product_attention(q, k, self.v(x), is_causal=True, scale=self.scale)


class Finder(nn.Module):
    """Says which token was `distance` positions before."""

    def __init__(self, tables: str = "frequencies", length: int = 128, distance: int = 112) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB, bias=False)
        nn.init.eye_(self.embed.weight)
        nn.init.eye_(self.head.weight)
        self.attention = Attention(length, distance, tables)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        logits = 12 * self.head(self.attention(self.embed(ids)))
        return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def finding(rows: int = 2, length: int = 128, distance: int = 112) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCAB, (rows, length), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(distance, 1)
    labels[:, :distance] = -100
    return ids, labels


def started(model: nn.Module, data: Any, **keywords: Any) -> autoptd.ParallelModel:
    return autoptd.parallelize(
        model, **{"precision": "bf16", **keywords}, backend="local", timeout=30, example_inputs=data
    )


def by_hand(model: nn.Module, *cast: str) -> nn.Module:
    """The model as `from_pretrained(dtype=torch.bfloat16)` holds it, with the buffers of these names cast besides."""
    narrow = copy.deepcopy(model)
    kept = {name: x for name, x in narrow.named_buffers() if name not in narrow.state_dict()}
    narrow.to(BF16)
    for name, x in kept.items():
        path, _, attribute = name.rpartition(".")
        if attribute not in cast:
            narrow.get_submodule(path)._buffers[attribute] = x
    return narrow


def test_angles_at_far_positions_are_not_rounded() -> None:
    model, data = Finder(), finding()
    pm = started(model, data, fuse=False, num_microbatches=1)
    found = float(pm.step(*data))
    assert found == float(by_hand(model)(*data).detach()) < 0.1
    assert float(pm.eval_step(*data)) == found
    pm.close()
    assert float(copy.deepcopy(model).to(BF16)(*data).detach()) > 10 * found
    assert pm.program.cast_buffers == () and summarize(pm.program).remarks == ()


MESHES: list[dict[str, Any]] = [{"t": 2, "c": 2}, {"d": 2, "zero": 1, "num_microbatches": 1}]


@pytest.mark.parametrize(
    ("mesh", "precision"),
    [
        (MESHES[0], "bf16"),
        pytest.param(MESHES[1], "fp16", marks=pytest.mark.thorough),
        pytest.param(MESHES[0], "fp16", marks=pytest.mark.thorough),
        pytest.param(MESHES[1], "bf16", marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_nor_are_they_on_a_mesh(mesh: dict[str, Any], precision: str, tmp_path: Path) -> None:
    data = finding()
    pm = started(Finder(), data, precision=precision, **mesh)
    assert float(pm.step(*data)) < 0.1
    pm.save(tmp_path / "saved")
    pm.close()
    other = started(Finder(), data, precision=precision)
    other.load(tmp_path / "saved")
    assert float(other.eval_step(*data)) < 0.1
    other.close()


@pytest.mark.parametrize(
    ("tables", "cast"), [("caches", ("cos", "sin")), ("masked", ("mask",))], ids=lambda x: str(x)
)
def test_what_cannot_be_read_in_float32_is_cast_and_named(
    tables: str, cast: tuple[str, ...], capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """Frequencies stay as they are next to a mask that is cast."""
    model, data = Finder(tables), finding()
    pm = started(model, data, fuse=False, num_microbatches=1)
    assert pm.program.cast_buffers == tuple(f"attention.{name}" for name in cast)
    (remark,) = summarize(pm.program).remarks
    assert all(f"attention.{name}" in remark for name in cast) and "ahead" not in remark
    wanted = float(by_hand(model, *cast)(*data).detach())
    assert float(pm.step(*data)) == wanted == float(pm.eval_step(*data))
    pm.close()
    # Torch's log of what was tried.
    assert capfd.readouterr().err == ""
    pm.program.save(tmp_path)
    assert Program.load(tmp_path).cast_buffers == pm.program.cast_buffers


class Positions(nn.Module):
    """A table in float32 makes all that follows float32, which a product with bf16 refuses: on a device only."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, VOCAB)
        self.register_buffer("table", torch.randn(8, WIDTH), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids) + self.table).float().square().mean()  # type: ignore[no-any-return]


@pytest.mark.parametrize("is_deferred", [False, True])
def test_tensors_without_data_show_what_does_not_fit(is_deferred: bool) -> None:
    data = (torch.randint(VOCAB, (2, 8)),)
    if is_deferred:
        with autoptd.deferred(seed=0):
            model: nn.Module = Positions()
    else:
        model = Positions()
    pm = started(model, data)
    assert pm.program.cast_buffers == ("table",) and pm.step(*data).isfinite()
    pm.close()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("saved", torch.tensor([1.0 + 2.0**-12]))
        self.register_buffer("view", self.saved[:], persistent=False)
        self.register_buffer("exact", torch.tensor([1.0 + 2.0**-40]).double(), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return (self.layer(x) * self.saved * self.view).square().mean()


def test_what_is_saved_is_cast_with_all_that_shares_its_memory() -> None:
    model = Scaled()
    before = dict(model.named_buffers())
    with computing_in(model, "bf16") as narrowing:
        assert (model.saved.dtype, model.view.dtype, model.exact.dtype) == (BF16, BF16, torch.float64)
        assert model.saved.data_ptr() == model.view.data_ptr() and narrowing.cast == ()
    assert all(x is before[name] for name, x in model.named_buffers())
    data = (torch.randn(4, WIDTH, dtype=BF16),)
    pm = started(model, data)
    pm.step(*data)
    assert pm.state_dict()["saved"].dtype == torch.float32
    assert torch.equal(pm.state_dict()["saved"], model.saved)
    pm.close()


class Failing(Positions):
    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids) + self.table.to(BF16)
        return (x.double() @ self.head.weight.T.expand(2, -1, -1)).mean()


def test_a_model_that_runs_in_no_way_fails_with_its_own_error() -> None:
    with pytest.raises(TraceError, match=r"head\.weight\.T.*fails without AutoPTD as well.*double"):
        started(Failing(), (torch.randint(VOCAB, (2, 8)),))


@pytest.mark.thorough
def test_a_llama_at_8k_tokens_is_that_of_from_pretrained(tmp_path: Path) -> None:
    """Its attention finds the token 7,000 positions before, by the angles of Llama 3."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size, length, distance = 64, 8192, 7000
    config = LlamaConfig(
        vocab_size=size,
        hidden_size=size,
        intermediate_size=size,
        num_hidden_layers=1,
        num_attention_heads=1,
        attention_bias=True,
        tie_word_embeddings=True,
        max_position_embeddings=length,
        rope_parameters={"rope_type": "default", "rope_theta": 500_000.0},
    )
    model = LlamaForCausalLM(config)
    layer, angles = model.model.layers[0], distance * model.model.rotary_emb.inv_freq.repeat(2)
    with torch.no_grad():
        for weight in (model.model.embed_tokens.weight, layer.self_attn.v_proj.weight):
            nn.init.eye_(weight)
        layer.self_attn.o_proj.weight.copy_(4 * torch.eye(size))
        for zero in (
            layer.self_attn.q_proj.weight,
            layer.self_attn.k_proj.weight,
            layer.mlp.down_proj.weight,
        ):
            zero.zero_()
        layer.self_attn.q_proj.bias.fill_(3.0)
        layer.self_attn.k_proj.bias.copy_(turned(torch.full((size,), 3.0), angles.cos(), angles.sin()))
    model.save_pretrained(tmp_path)
    theirs = LlamaForCausalLM.from_pretrained(tmp_path, dtype=BF16)
    ids = torch.randint(size, (1, length), generator=torch.Generator().manual_seed(0))
    labels = ids.roll(distance, 1)
    labels[:, :distance] = -100
    # Transformers shift labels: position i is asked for label i + 1.
    data = {"input_ids": ids, "labels": labels.roll(1, 1)}
    wanted = float(theirs(**data).loss.detach())
    rounded = float(copy.deepcopy(model).to(BF16)(**data).loss.detach())
    pm = autoptd.parallelize(model, precision="bf16", backend="local", t=1, example_inputs=data)
    found = float(pm.step(**data))
    pm.close()
    assert found == pytest.approx(wanted, rel=2.0**-7) and rounded > 4 * wanted


def test_verify_holds_the_cast_buffers_against_the_model() -> None:
    data = (torch.randint(VOCAB, (2, 8)),)
    assert autoptd.verify(Positions(), d=2, precision="bf16", example_inputs=data, steps=1).passed
