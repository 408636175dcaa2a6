"""Every Triton kernel of the fused operators compiles for an H100, for bfloat16 tensors; no GPU is needed for that.

No file of tests by its name: `test_triton.py` runs it in a process without Triton's interpreter.
"""

from __future__ import annotations

from typing import Any

import pytest
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from autoptd.kernels import (
    activations_triton,
    cross_entropy_triton,
    dropout_triton,
    norms_triton,
    rotary_triton,
    softmax_triton,
)

WIDE: dict[str, Any] = {"WIDE": tl.float32}
ALL_NORM = {"HAS_WEIGHT": True, "HAS_BIAS": True, "HAS_RESIDUAL": True, "HAS_TOTAL": True, "CENTERED": True}
DROP = {"SCALE": 1.1, "HAS_MASK": True, "HAS_BIAS": True, "HAS_RESIDUAL": True, "IS_HALF": True, "IS_LARGE": False}
MASKED = {"HAS_MASK": True, "IS_BOOL": False, "CAUSAL": True, "LIKE": tl.bfloat16}
SCALARS = """count width rows after block degree index first_row row_key column_key least heads queries keys stride_a stride_b
stride_q stride_k half size_b size_q x_a x_b x_q out_a out_b out_q cos_a cos_b cos_q sin_a sin_b sin_q real steps""".split()
FLOATS = ["mean", "factor", "sums", "maximum", "total_", "weighted", "picked", "soft"]
KERNELS = {
    "gelu": (activations_triton._bias_gelu, {"KIND": 0, "BACK": True, "SIZE": 1024}),
    "gated": (activations_triton._gated, {"KIND": 1, "SIZE": 1024}),
    "gated backward": (activations_triton._gated_backward, {"KIND": 2, "SIZE": 1024}),
    "softmax": (softmax_triton._forward, {"SCALE": 0.1, "BLOCK": 1024, **MASKED}),
    "softmax backward": (softmax_triton._backward, {"SCALE": 0.1, "BLOCK": 1024}),
    "norm": (norms_triton._forward, {"EPS": 1e-6, "OFFSET": 0.0, "BLOCK": 1024, **ALL_NORM}),
    "norm backward": (norms_triton._backward, {"OFFSET": 0.0, "BLOCK": 1024, **ALL_NORM}),
    "rotary": (rotary_triton._turn, {"BACK": True, "INTERLEAVED": False, "HEIGHT": 4, "BLOCK": 32}),
    "loss": (cross_entropy_triton._terms, {"BLOCK": 1024}),
    "loss backward": (cross_entropy_triton._gradients, {"SMOOTHS": True, "BLOCK": 1024}),
    "dropout": (dropout_triton._drop, {"SIZE": 1024, **DROP}),
}


def type_of(name: str) -> str:
    if name in SCALARS:
        return "i32"
    return "*i64" if name == "target" else "*fp32" if name in FLOATS else "*bf16"


@pytest.mark.parametrize("name", KERNELS)
def test_compiles(name: str) -> None:
    kernel, values = KERNELS[name]
    names = kernel.arg_names
    constants = {each: value for each, value in {**values, **WIDE}.items() if each in names}
    signature = {each: "constexpr" if each in constants else type_of(each) for each in names}
    source = ASTSource(kernel, signature, {(names.index(each),): value for each, value in constants.items()})
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
