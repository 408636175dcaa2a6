"""The fused operators: what they stand for, what they read, and at which sizes models call them.

For the checks (fused against plain, in some dtypes) and for the times (fused beside plain beside torch's compiler).

    inputs = operator.inputs(sizes, device, dtype)
    run(operator.fused, inputs, operator.grads)          # forward and backward: results, then gradients
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoptd.kernels.activations import bias_gelu, bias_gelu_plain, geglu, geglu_plain, swiglu, swiglu_plain
from autoptd.kernels.dropout import bias_dropout_add, bias_dropout_add_plain
from autoptd.kernels.dropout_mask import Places, keys
from autoptd.kernels.loss import linear_cross_entropy, linear_cross_entropy_plain
from autoptd.kernels.norms import layer_norm, layer_norm_plain, rms_norm, rms_norm_plain
from autoptd.kernels.rotary import rotary, rotary_plain
from autoptd.kernels.softmax import masked_softmax, masked_softmax_plain
from benchmarks.gpu.models import GPT_175B, LLAMA_1B, LLAMA_8B, NANOGPT, Shape

PLACES = Places(*keys(0, 1, 2))
Maybe = Tensor | None


@dataclass(frozen=True)
class Sizes:
    """What a rank holds of one microbatch, of a model whose tensor ranks are t."""

    name: str
    b: int
    s: int
    h: int
    heads: int
    head_dim: int
    ffn: int
    vocab: int

    @property
    def tokens(self) -> int:
        return self.b * self.s


def sizes_of(shape: Shape, t: int = 1) -> Sizes:
    name = shape.name if t == 1 else f"{shape.name}, t={t}"
    ffn, vocab = shape.wide // t, -(-shape.vocab // t)
    return Sizes(name, shape.b, shape.s, shape.h, shape.heads // t, shape.h // shape.heads, ffn, vocab)


SIZES = (sizes_of(LLAMA_1B), sizes_of(NANOGPT), sizes_of(GPT_175B, 8), sizes_of(LLAMA_8B, 8))
TOY = (Sizes("toy", 2, 8, 16, 2, 8, 24, 40),)


@dataclass(frozen=True)
class Operator:
    """`inputs` of the sizes; gradients of the first `grads` are wanted. `is_ours`: there is a Triton form."""

    name: str
    fused: Callable[..., Any]
    plain: Callable[..., Any]
    inputs: Callable[[Sizes, Callable[..., Tensor]], list[Maybe]]
    grads: int
    is_ours: bool = True


def _norm(z: Sizes, make: Callable[..., Tensor]) -> list[Maybe]:
    return [make(z.b, z.s, z.h), make(z.h)]


def _norm_and_sum(z: Sizes, make: Callable[..., Tensor]) -> list[Maybe]:
    return [make(z.b, z.s, z.h), make(z.h), make(z.b, z.s, z.h)]


def _layer_norm_and_sum(z: Sizes, make: Callable[..., Tensor]) -> list[Maybe]:
    return [make(z.b, z.s, z.h), make(z.h), make(z.h), make(z.b, z.s, z.h)]


def _gated(z: Sizes, make: Callable[..., Tensor]) -> list[Maybe]:
    return [make(z.b, z.s, z.ffn), make(z.b, z.s, z.ffn)]


def _biased(z: Sizes, make: Callable[..., Tensor]) -> list[Maybe]:
    return [make(z.b, z.s, z.ffn), make(z.ffn)]


def _residual(z: Sizes, make: Callable[..., Tensor]) -> list[Maybe]:
    return [make(z.b, z.s, z.h), make(z.h), make(z.b, z.s, z.h)]


def _turned(z: Sizes, make: Callable[..., Tensor]) -> list[Maybe]:
    heads_last = make(z.b, z.s, z.heads, z.head_dim).transpose(1, 2)  # as models have it
    return [heads_last, make(z.s, z.head_dim), make(z.s, z.head_dim)]


def _scores(z: Sizes, make: Callable[..., Tensor]) -> list[Maybe]:
    return [make(z.b, z.heads, z.s, z.s)]


def _head(z: Sizes, make: Callable[..., Tensor]) -> list[Maybe]:
    x, weight = make(z.tokens, z.h), make(z.vocab, z.h) * z.h**-0.5
    generator = torch.Generator().manual_seed(7)
    return [x, weight, torch.randint(0, z.vocab, (z.tokens,), generator=generator).to(x.device)]


def _attended(z: Sizes, make: Callable[..., Tensor]) -> list[Maybe]:
    return [make(z.b, z.s, z.heads, z.head_dim).transpose(1, 2) for _ in range(3)]


def _rms(form: Callable[..., Any], x: Tensor, w: Tensor, residual: Maybe = None, **more: Any) -> Any:
    return form(x, w, eps=1e-5, residual=residual, **more)


def _layer(
    form: Callable[..., Any], x: Tensor, w: Tensor, b: Tensor, residual: Maybe = None, **more: Any
) -> Any:
    return form(x, w, b, eps=1e-5, residual=residual, **more)


def _pair(
    fused: Callable[..., Any], plain: Callable[..., Any], **options: Any
) -> dict[str, Callable[..., Any]]:
    return {"fused": partial(fused, backend="triton", **options), "plain": partial(plain, **options)}


def _norms(
    wrapped: Callable[..., Any], fused: Callable[..., Any], plain: Callable[..., Any]
) -> dict[str, Any]:
    return {"fused": partial(wrapped, fused, backend="triton"), "plain": partial(wrapped, plain)}


def _attention_plain(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Attention as models spell it."""
    return masked_softmax_plain(q @ k.transpose(-1, -2), None, scale=q.shape[-1] ** -0.5, causal=True) @ v


DROPPED: dict[str, Any] = {"rate": 0.1, "places": PLACES}
OPERATORS = (
    Operator("rms_norm", **_norms(_rms, rms_norm, rms_norm_plain), inputs=_norm, grads=2),
    Operator("swiglu", **_pair(swiglu, swiglu_plain), inputs=_gated, grads=2),
    Operator(
        "linear_cross_entropy",
        **_pair(linear_cross_entropy, linear_cross_entropy_plain),
        inputs=_head,
        grads=2,
    ),
    Operator("rotary", **_pair(rotary, rotary_plain), inputs=_turned, grads=1),
    Operator("rms_norm of a sum", **_norms(_rms, rms_norm, rms_norm_plain), inputs=_norm_and_sum, grads=3),
    Operator(
        "layer_norm of a sum",
        **_norms(_layer, layer_norm, layer_norm_plain),
        inputs=_layer_norm_and_sum,
        grads=4,
    ),
    Operator("bias_gelu", **_pair(bias_gelu, bias_gelu_plain, approximate="none"), inputs=_biased, grads=2),
    Operator(
        "bias_gelu, tanh", **_pair(bias_gelu, bias_gelu_plain, approximate="tanh"), inputs=_biased, grads=2
    ),
    Operator(
        "bias_dropout_add",
        **_pair(bias_dropout_add, bias_dropout_add_plain, **DROPPED),
        inputs=_residual,
        grads=3,
    ),
    Operator(
        "masked_softmax, causal",
        **_pair(masked_softmax, masked_softmax_plain, causal=True, scale=0.125),
        inputs=_scores,
        grads=1,
    ),
    Operator("geglu", **_pair(geglu, geglu_plain, approximate="tanh"), inputs=_gated, grads=2),
    Operator("rotary, neighbours", **_pair(rotary, rotary_plain, interleaved=True), inputs=_turned, grads=1),
    Operator(
        "attention, causal",
        partial(F.scaled_dot_product_attention, is_causal=True),
        _attention_plain,
        _attended,
        grads=3,
        is_ours=False,
    ),
)


def maker(device: str, dtype: torch.dtype, seed: int = 0, layout: str = "as it is") -> Callable[..., Tensor]:
    """Normal numbers, rounded to `dtype`, in memory as `layout` says; the same on every device."""
    generator = torch.Generator(device).manual_seed(seed)

    def make(*shape: int) -> Tensor:
        if layout == "sliced":
            return torch.randn(*shape[:-1], 2 * shape[-1], device=device, generator=generator).to(dtype)[
                ..., ::2
            ]
        if layout == "transposed" and len(shape) > 1:
            turned = torch.randn(*shape[:-2], shape[-1], shape[-2], device=device, generator=generator).to(
                dtype
            )
            return turned.transpose(-1, -2)
        if (
            layout == "expanded" and len(shape) > 2
        ):  # values, over their batch; of equal weights gradients may be zero
            return torch.randn(1, *shape[1:], device=device, generator=generator).to(dtype).expand(shape)
        return torch.randn(*shape, device=device, generator=generator).to(dtype)

    return make


def leaves(tensors: Sequence[Maybe], grads: int) -> list[Maybe]:
    """The inputs with gradients wanted of the first ones."""
    return [x.detach().requires_grad_() if x is not None and i < grads else x for i, x in enumerate(tensors)]


def outputs(found: Any) -> list[Tensor]:
    return [one for one in (found if isinstance(found, tuple) else (found,)) if one is not None]


def cotangents(found: Sequence[Tensor]) -> list[Tensor]:
    """Random ones in each result's dtype, of numbers that bf16 has, so that every dtype is given the same."""
    generator = torch.Generator(found[0].device).manual_seed(9)
    return [torch.randn(x.shape, device=x.device, generator=generator).bfloat16().to(x.dtype) for x in found]


def run(form: Callable[..., Any], tensors: Sequence[Maybe], grads: int) -> list[Tensor]:
    """Forward and backward: results, then gradients."""
    given = leaves(tensors, grads)
    found = outputs(form(*given))
    torch.autograd.backward(found, cotangents(found))
    return [x.detach() for x in found] + [
        x.grad for x in given[:grads] if x is not None and x.grad is not None
    ]


def least_bytes(operator: Operator, tensors: Sequence[Maybe]) -> int:
    """What forward and backward move at least.

    Forward reads inputs and writes results; backward reads cotangents and inputs, and writes gradients. Of a head with
    its loss inputs and gradients only, as the logits need not be.
    """
    with torch.no_grad():
        made = sum(x.nbytes for x in outputs(operator.fused(*tensors)))
    read = sum(x.nbytes for x in tensors if x is not None)
    gradients = sum(x.nbytes for x in tensors[: operator.grads] if x is not None)
    return 2 * read + 2 * made + gradients


def flops(operator: Operator, sizes: Sizes) -> float:
    """Of its matrix products, forward and backward; 0 for what has none."""
    if operator.name == "linear_cross_entropy":
        return 6.0 * sizes.tokens * sizes.h * sizes.vocab
    if operator.name.startswith("attention"):
        products = 2 + 5  # forward; backward, which makes the scores again
        return products * math.prod(
            (sizes.b, sizes.heads, sizes.s, sizes.s, sizes.head_dim)
        )  # of each the causal half
    return 0.0
