"""Masks that prove to be causal are not read where ranks divide tokens; all others are, row by row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autoptd
from autoptd.errors import PlanError
from tests.parity.models import LENGTH, VOCAB, batch

Mask = Callable[[int], Tensor]
HIDDEN = float("-inf")


def seen(n: int) -> Tensor:
    return torch.ones(n, n, dtype=torch.bool).tril()


CAUSAL: dict[str, Mask] = {
    "bool": seen,
    "of positions": lambda n: torch.arange(n)[None, None] <= torch.arange(n)[None, :, None],
    "added": lambda n: torch.zeros(n, n).masked_fill(~seen(n), HIDDEN),
    "lowest": lambda n: torch.zeros(n, n).masked_fill(~seen(n), torch.finfo(torch.float32).min),
}
OTHERS: dict[str, Mask] = {
    "window": lambda n: seen(n) & seen(n).T.roll(-3, 1).triu(-3),
    "one key later": lambda n: torch.ones(n, n, dtype=torch.bool).tril(1),
    "one key missing": lambda n: seen(n) & ~F.one_hot(torch.full((n,), 2), n).bool().tril(-3),
    "all": lambda n: torch.ones(n, n, dtype=torch.bool),
    "low, not hidden": lambda n: torch.zeros(n, n).masked_fill(~seen(n), -50.0),
}


class Masked(nn.Module):
    """One layer of attention that hands torch a mask, made in forward or kept as a buffer."""

    def __init__(self, mask: Mask, kept: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.qkv, self.head = nn.Embedding(VOCAB, 16), nn.Linear(16, 48), nn.Linear(16, VOCAB)
        self.make = None if kept else mask
        if kept:
            self.register_buffer("mask", mask(LENGTH))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        b, s = ids.shape
        qkv = self.qkv(self.embed(ids)).view(b, s, 3, 4, 4).permute(2, 0, 3, 1, 4)
        mask = self.mask if self.make is None else self.make(s)
        mask = mask.expand(b, 4, s, s)
        mixed = F.scaled_dot_product_attention(*qkv, mask if mask.dtype == torch.bool else mask.to(qkv.dtype))
        logits = self.head(mixed.transpose(1, 2).reshape(b, s, 16))
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def source(model: nn.Module, **asked: Any) -> str:
    program = autoptd.compile(model, **asked, context="all_gather", example_inputs=batch())
    return "".join(program.sources.values())


@pytest.mark.parametrize("kept", [False, True], ids=["made", "kept"])
@pytest.mark.parametrize("name", CAUSAL)
def test_a_causal_mask_is_not_read(name: str, kept: bool) -> None:
    text = source(Masked(CAUSAL[name], kept), c=2)
    assert text.count("rt.causal_attention(") == 1 and 'order="zigzag"' in text
    assert " mask" not in text and "b.mask" not in text


@pytest.mark.parametrize("name", OTHERS)
def test_any_other_mask_is_read(name: str) -> None:
    assert "attn_mask=" in source(Masked(OTHERS[name]), c=2)


CASES = [(name, mesh) for name in (*CAUSAL, *OTHERS) for mesh in ({"c": 2}, {"c": 2, "d": 2, "t": 2})]


@pytest.mark.parametrize(("name", "mesh"), CASES, ids=map(str, CASES))
def test_either_way_it_trains_like_one_device(name: str, mesh: dict[str, Any]) -> None:
    model = Masked((CAUSAL | OTHERS)[name])
    autoptd.verify(model, **mesh, context="all_gather", example_inputs=batch(), steps=2)


def test_a_mask_that_is_loaded_later_is_refused() -> None:
    """The mask of the model was causal, that of the state is not: it is another program."""
    model, other = Masked(seen, kept=True).double(), Masked(OTHERS["window"], kept=True).double()
    data = batch()
    pm = autoptd.parallelize(model, c=2, context="all_gather", backend="local", example_inputs=data)
    assert torch.allclose(pm.step(*data), model(*data), rtol=1e-12)
    with pytest.raises(PlanError, match="other values of mask, which were read while compiling"):
        pm.load_state_dict(other.state_dict())
    pm.close()


def test_masks_of_all_tokens_leave_no_trace_in_memory() -> None:
    """Two layers of 16,384 tokens on 8 ranks: an eighth of one device's peak, and the weights."""
    transformers = pytest.importorskip("transformers")
    length = 1 << 14
    sizes = {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2, "num_attention_heads": 8}
    config = transformers.LlamaConfig(
        vocab_size=256, use_cache=False, max_position_embeddings=length, **sizes
    )
    ids = torch.zeros((1, length), dtype=torch.long, device="meta")
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)

    def peak(**asked: Any) -> int:
        call = {"input_ids": ids, "labels": ids}
        return autoptd.peak_memory(autoptd.compile(model, example_inputs=call, num_microbatches=1, **asked))[
            0
        ].nbytes

    assert peak(c=8, context="ulysses") <= 0.16 * peak()
