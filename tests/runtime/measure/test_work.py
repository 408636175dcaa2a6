"""FLOPs of every operator that is made of products, by hand; an operator that nobody counts is an error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autoptd.compat import TorchDispatchMode
from autoptd.errors import InternalError
from autoptd.runtime.measure.work import count_flops

F = nn.functional


class Flops(TorchDispatchMode):
    """Collects what `count_flops` says of every operator that runs."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        flops = count_flops(func, args, out)
        if flops is not None:
            self.found[str(func.overloadpacket).removeprefix("aten.")] = flops
        return out


def attend(heads: int) -> Tensor:
    """Attention of 4 query heads, a head of 8 elements, 6 tokens, with `heads` KV heads."""
    query = torch.randn(2, 4, 6, 8, requires_grad=True)
    key, value = (torch.randn(2, heads, 6, 8, requires_grad=True) for _ in range(2))
    return F.scaled_dot_product_attention(query, key, value, enable_gqa=heads < 4)


def convolve(groups: int = 1) -> Tensor:
    weight = torch.randn(6, 4 // groups, 3, requires_grad=True)
    return F.conv1d(torch.randn(2, 4, 9, requires_grad=True), weight, groups=groups)


SCORES = 2 * 2 * 4 * 6 * 6 * 8
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
WINDOW = 2 * (2 * 7) * 6 * 4 * 3  # two per multiply-add, places of the result, channels, the filter
CALLS: dict[str, tuple[Callable[[], Tensor], dict[str, int]]] = {
    "mm": (lambda: torch.mm(torch.ones(3, 5), torch.ones(5, 7), out=torch.empty(3, 7)), {"mm": 210}),
    "addmm": (lambda: torch.addmm(torch.ones(7), torch.ones(3, 5), torch.ones(5, 7)), {"addmm": 210}),
    "addmm_": (lambda: torch.ones(3, 7).addmm_(torch.ones(3, 5), torch.ones(5, 7)), {"addmm_": 210}),
    "bmm": (lambda: torch.bmm(torch.ones(2, 3, 5), torch.ones(2, 5, 7)), {"bmm": 420}),
    "baddbmm_": (
        lambda: torch.ones(2, 3, 7).baddbmm_(torch.ones(2, 3, 5), torch.ones(2, 5, 7)),
        {"baddbmm_": 420},
    ),
    "mv": (lambda: torch.mv(torch.ones(5, 7), torch.ones(7)), {"mv": 70}),
    "addmv": (lambda: torch.addmv(torch.ones(5), torch.ones(5, 7), torch.ones(7)), {"addmv": 70}),
    "dot": (lambda: torch.dot(torch.ones(7), torch.ones(7)), {"dot": 14}),
    "attention": (lambda: attend(4), {FLASH: 2 * SCORES, f"{FLASH}_backward": 5 * SCORES}),
    "shared heads": (lambda: attend(2), {FLASH: 2 * SCORES, f"{FLASH}_backward": 5 * SCORES}),
    "convolution": (convolve, {"convolution": WINDOW, "convolution_backward": 2 * WINDOW}),
    "groups": (
        lambda: convolve(2),
        {"convolution": WINDOW // 2, "convolution_backward": WINDOW // 2 + WINDOW},
    ),
    "no product": (lambda: torch.ones(3, 5) + 1, {}),
}


@pytest.mark.parametrize("name", CALLS)
def test_flops(name: str) -> None:
    call, expected = CALLS[name]
    with Flops() as counting:
        result = call()
        if result.requires_grad:
            result.sum().backward()
    assert counting.found == expected


@pytest.mark.parametrize("kind", ["efficient", "flash", "cudnn"])
@pytest.mark.parametrize("heads", [1, 2, 4])
def test_attention_on_gpus(kind: str, heads: int) -> None:
    """Operators that a CPU does not run, by their shapes; KV heads that queries share take no fewer products."""
    query, grad = torch.empty(2, 4, 6, 8, device="meta"), torch.empty(2, 4, 6, 8, device="meta")
    key, value = (torch.empty(2, heads, 6, 8, device="meta") for _ in range(2))
    forward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention").default
    backward = getattr(torch.ops.aten, f"_scaled_dot_product_{kind}_attention_backward").default
    assert count_flops(forward, (query, key, value, None), None) == 2 * SCORES
    assert count_flops(backward, (grad, query, key, value, None), None) == 5 * SCORES


def test_a_product_that_nobody_counts() -> None:
    with pytest.raises(InternalError, match="no formula counts its products"):
        count_flops(torch.ops.aten._int_mm.default, (torch.ones(3, 5), torch.ones(5, 7)), None)
