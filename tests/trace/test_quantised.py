"""Quantised weights are refused before anything is traced, by one error; classes here stand in for those of packages."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import autoptd
from autoptd.subject.module import check_quantised, quantised_by
from tests.parity.test_peft import adapted, llama


class Params4bit(nn.Parameter):
    """As in bitsandbytes: packed bytes, and what they mean beside them."""


class Int8Params(nn.Parameter):
    pass


class Linear4bit(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight = Params4bit(torch.zeros(32, 1, dtype=torch.uint8), requires_grad=False)


class Linear8bitLt(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.weight = Int8Params(torch.zeros(8, 8, dtype=torch.int8), requires_grad=False)


class OfTorchao(Tensor):
    __module__ = "torchao.dtypes.affine_quantized_tensor"


def with_weight(make: Callable[[], Any]) -> Callable[[], nn.Module]:
    def layer() -> nn.Module:
        linear = nn.Linear(8, 8)
        linear.weight = make()
        return linear

    return layer


def with_state() -> nn.Parameter:
    weight = nn.Parameter(torch.zeros(8, 8))
    weight.quant_state = object()  # type: ignore[attr-defined]
    return weight


def packed(name: str, is_buffer: bool) -> Callable[[], nn.Module]:
    def layer() -> nn.Module:
        module, x = nn.Module(), torch.zeros(1, 8, dtype=torch.int32)
        if is_buffer:
            module.register_buffer(name, x)
        else:
            setattr(module, name, x)
        return module

    return layer


def of_bytes(dtype: torch.dtype) -> Callable[[], nn.Module]:
    def layer() -> nn.Module:
        linear = nn.Linear(8, 8)
        del linear.weight
        linear.register_buffer("weight", torch.zeros(8, 8).to(dtype))
        return linear

    return layer


QUANTISED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "4 bits": (Linear4bit, "a Linear4bit, whose weights are quantised by bitsandbytes"),
    "8 bits": (Linear8bitLt, "a Linear8bitLt, whose weights are quantised by bitsandbytes"),
    "a state": (with_weight(with_state), "a Linear, whose weights are quantised by bitsandbytes"),
    "torchao": (
        with_weight(lambda: nn.Parameter(torch.zeros(8, 8).as_subclass(OfTorchao))),
        "by torchao",
    ),
    "qweight": (packed("qweight", True), "by GPTQ or AWQ"),
    "weight_packed": (packed("weight_packed", True), "by compressed-tensors"),
    "W_q": (packed("W_q", False), "by HQQ"),
    "int8": (of_bytes(torch.int8), "by a package that stores them in int8"),
    "fp8": (of_bytes(torch.float8_e4m3fn), "by a package that stores them in float8_e4m3fn"),
    "torch.ao": (lambda: torch.ao.nn.quantized.Linear(8, 8), "by torch.ao"),
}


class Net(nn.Module):
    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(8, 8), nn.ModuleList([middle])

    def forward(self, x: Tensor) -> Tensor:
        raise AssertionError("it was traced")


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("call", [autoptd.parallelize, autoptd.compile, autoptd.verify])
def test_one_error_before_the_trace(kind: str, call: Callable[..., Any]) -> None:
    make, message = QUANTISED[kind]
    with pytest.raises(autoptd.TraceError) as caught:
        call(Net(make()), t=2, example_inputs=(torch.zeros(2, 8),))
    assert caught.value.site == "blocks.0" and message in caught.value.fact
    assert "without quantization_config" in caught.value.remedy


def test_a_base_under_adapters_is_counted() -> None:
    model = adapted("LoRA")
    # As PEFT leaves a quantised base: its layers within those of the adapter.
    for layer in model.base_model.model.model.layers:  # type: ignore[union-attr, operator]
        layer.self_attn.q_proj.base_layer = Linear4bit()
    with pytest.raises(autoptd.TraceError, match="as are those of 1 more module:") as caught:
        check_quantised(model)
    assert caught.value.site == "base_model.model.model.layers.0.self_attn.q_proj.base_layer"


def test_what_a_model_of_transformers_says_of_itself() -> None:
    """As its quantisers mark a model, whatever they have made of the layers."""
    model = adapted("LoRA")
    base = model.base_model.model  # type: ignore[union-attr]
    base.is_quantized, base.quantization_method = True, "aqlm"
    with pytest.raises(autoptd.TraceError, match="weights are quantised by aqlm"):
        check_quantised(model)
    base.is_quantized = False
    check_quantised(model)


def test_what_is_not_quantised() -> None:
    class Indices(nn.Module):
        """8 bits that are no weights of a linear layer."""

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.zeros(8, dtype=torch.uint8))
            self.register_buffer("mask", torch.ones(8, dtype=torch.bool))
            self.qweight = nn.Parameter(torch.zeros(8))

    masked = of_bytes(torch.bool)()
    models = (llama(), llama().bfloat16(), adapted("DoRA"), Indices(), masked)
    assert [
        quantised_by(module) for model in models for module in model.modules() if quantised_by(module)
    ] == []
    assert isinstance(models[2], peft.PeftModel)
