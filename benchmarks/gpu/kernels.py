"""Section 3, Kernels: each fused operator forward and backward in bf16 at the sizes of known models, beside torch's.

Microseconds on the device, of a captured CUDA graph with the L2 cache flushed before each replay, so that nothing of
the host's time is in them; that stands beside. `share of bandwidth` is the least that the operator must move, over
its time, over what a copy moves in the same minute; `share of the GEMM ceiling` likewise of the one operator that is
mostly products. Rows with torch's compiler come behind those without: it takes seconds a row. `wins` is the time of
the fastest other form over ours: below 1.03 the fusion is not worth having there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autoptd.compat import mm_as
from autoptd.kernels.loss import linear_cross_entropy, linear_cross_entropy_plain
from benchmarks.gpu.device import Device, copy_rate, gemm_rate
from benchmarks.gpu.operators import (
    OPERATORS,
    SIZES,
    TOY,
    Maybe,
    Operator,
    Sizes,
    cotangents,
    flops,
    least_bytes,
    leaves,
    maker,
    outputs,
)
from benchmarks.gpu.rows import Found, Row, Setting

LLAMAS, GPTS = ("Llama 1.34B", "Llama 8B, t=8"), ("nanoGPT 124M", "GPT-3 175B, t=8")
USED: dict[str, Sequence[str]] = {  # where models have the operator
    "rms_norm": LLAMAS,
    "rms_norm of a sum": LLAMAS,
    "swiglu": LLAMAS,
    "rotary": LLAMAS,
    "rotary, neighbours": LLAMAS[1:],
    "geglu": LLAMAS[:1],
    "attention, causal": (LLAMAS[1], GPTS[0]),
    "linear_cross_entropy": (*LLAMAS, *GPTS),
}
LARGE = ("linear_cross_entropy", "masked_softmax", "attention")  # whose plain forms hold logits or scores
MIB = 1 << 20


def steps_of(
    form: Callable[..., Any], tensors: Sequence[Maybe], grads: int
) -> tuple[Callable[[], object], Callable[[], object]]:
    """(forward, forward and backward) of a form."""
    given = leaves(tensors, grads)
    wanted = [x for x in given[:grads] if x is not None]
    given_back = cotangents(outputs(form(*given)))

    def both() -> object:
        return torch.autograd.grad(outputs(form(*given)), wanted, given_back)

    return lambda: form(*given), both


def timed(device: Device, form: Callable[..., Any], tensors: Sequence[Maybe], grads: int) -> Found:
    forward, both = steps_of(form, tensors, grads)
    both()
    found = {**on_device(device, both), "us forward": on_device(device, forward)["us"]}
    return found | {"host, us each way": device.host_microseconds(both)}


def on_device(device: Device, run: Callable[[], object]) -> Found:
    """Microseconds of a call without the host's part; with it, and the reason, where the call cannot be captured."""
    seconds = 0.05 if device.is_cuda else 0.0
    try:
        return {"us": device.microseconds(device.capture(run), seconds)}
    except RuntimeError as exc:
        device.sync()
        return {
            "us": device.microseconds(run, seconds),
            "why": f"with the host's time: {str(exc).splitlines()[0][:100]}",
        }


def operator_row(operator: Operator, sizes: Sizes, with_compiler: bool, setting: Setting) -> Iterator[Found]:
    """Ours beside the plain form, as torch runs it; then beside torch's compiler."""
    device = setting.device
    tensors = operator.inputs(
        sizes, maker(setting.where, torch.float32 if setting.is_toy else torch.bfloat16)
    )
    nbytes, work = least_bytes(operator, tensors), flops(operator, sizes)
    rates = {"copy bytes/s": copy_rate(device)} | ({"GEMM FLOP/s": gemm_rate(device)} if work else {})
    plain: dict[str, Callable[..., Any]] = {"ours": operator.fused, "eager": operator.plain}
    if with_compiler:
        torch._dynamo.reset()
        backend: Any = "eager" if setting.is_toy else "inductor"
        plain["torch.compile"] = torch.compile(operator.plain, dynamic=False, backend=backend)
    forms: list[Found] = []
    for name, form in plain.items():
        found = {"form": name, "sizes": sizes.name} | timed(device, form, tensors, operator.grads)
        found["share of bandwidth"] = nbytes / (1e-6 * found["us"]) / rates["copy bytes/s"]
        if work:
            found["share of the GEMM ceiling"] = work / (1e-6 * found["us"]) / rates["GEMM FLOP/s"]
        forms.append(found)
        others = [one["us"] for one in forms[1:]]
        wins = {"wins": min(others) / forms[0]["us"]} if others else {}
        yield {**rates, "least bytes": nbytes, **wins, "forms": forms}


def loss_chunks(sizes: Sizes, setting: Setting) -> Iterator[Found]:
    """The head and its loss by the bytes of logits that are held at a time: time and peak memory."""
    device = setting.device
    dtype = torch.float32 if setting.is_toy else torch.bfloat16
    tensors = next(one for one in OPERATORS if one.name == "linear_cross_entropy").inputs(
        sizes, maker(setting.where, dtype)
    )
    kept = 2 if dtype == torch.bfloat16 else 4
    forms = []
    for mib in (64, 256, 512, None):
        rows = sizes.tokens if mib is None else max(128, mib * MIB // (sizes.vocab * kept))
        if mib is not None and rows >= sizes.tokens and not setting.is_toy:
            continue
        fused = partial(linear_cross_entropy, backend="triton", chunk=min(rows, sizes.tokens))
        forms.append(_loss_form(f"ours, {'whole' if mib is None else f'{mib} MiB'}", fused, tensors, device))
        yield {"vocabulary": sizes.vocab, "forms": forms}
    forms.append(_loss_form("eager", linear_cross_entropy_plain, tensors, device))
    yield {"vocabulary": sizes.vocab, "forms": forms}


def _loss_form(name: str, form: Callable[..., Any], tensors: Sequence[Maybe], device: Device) -> Found:
    _, both = steps_of(form, tensors, 2)
    both()
    return {
        "form": name,
        "us": device.microseconds(both, 0.05 * device.is_cuda),
        "peak bytes": device.peak(both),
    }


def weight_gradient(setting: Setting) -> Iterator[Found]:
    """A weight's gradient added to a sum in float32: a product and an addition, or the product added in place."""
    device = setting.device
    rows, n, k = (16, 8, 24) if setting.is_toy else (2048, 12288, 6144)
    make = maker(setting.where, torch.bfloat16)
    grads, x, total = make(rows, n), make(rows, k), torch.zeros(n, k, device=setting.where)
    calls: dict[str, Callable[[], object]] = {
        "mm, add_": lambda: total.add_(mm_as(grads.t(), x, torch.float32))
    }
    if device.is_cuda:
        addmm = torch.ops.aten.addmm.dtype_out
        calls["addmm in place"] = lambda: addmm(total, grads.t(), x, torch.float32, out=total)
    forms: list[Found] = []
    for name, call in calls.items():
        try:
            forms.append({"form": name, **on_device(device, call), "peak bytes": device.peak(call)})
        except RuntimeError as exc:  # this build has no such product
            forms.append({"form": name, "why": str(exc).splitlines()[0][:120]})
        yield {"sizes": f"[{n}, {rows}] x [{rows}, {k}]", "forms": forms}


def odd_heads(setting: Setting) -> Iterator[Found]:
    """Products of a head whose shard of the vocabulary is odd, beside a rounded one: forward and both of backward."""
    device = setting.device
    make = maker(setting.where, torch.bfloat16)
    forms = []
    for columns in (11, 16) if setting.is_toy else (6283, 6336, 25129, 25152, 50257, 50304):
        rows, h = (8, 16) if setting.is_toy else (4096, 4096)
        x, weight = make(rows, h).requires_grad_(), make(columns, h).requires_grad_()
        grad = make(rows, columns)

        def both(x: Tensor = x, weight: Tensor = weight, grad: Tensor = grad) -> object:
            return torch.autograd.grad(F.linear(x, weight), (x, weight), grad)

        found = on_device(device, both)
        forms.append(
            {"form": f"{columns} columns", **found, "us a thousand columns": 1000 * found["us"] / columns}
        )
        yield {"sizes": f"[{rows}, {h}]", "forms": forms}
    for columns in (11,) if setting.is_toy else (50257, 50304):
        x, weight = make(rows, h), make(columns, h)
        targets = torch.randint(0, columns, (rows,), device=setting.where)
        fused = "eager" if setting.is_toy else "triton"
        for name, form in (
            ("plain", linear_cross_entropy_plain),
            ("ours", partial(linear_cross_entropy, backend=fused)),
        ):
            _, both = steps_of(form, (x, weight, targets), 2)
            found = on_device(device, both)
            told = {"form": f"{columns} columns and the loss, {name}", **found}
            forms.append(told | {"us a thousand columns": 1000 * found["us"] / columns})
            yield {"sizes": f"[{rows}, {h}]", "forms": forms}


def attention_backends(setting: Setting) -> Iterator[Found]:
    """Torch's attention by backend, head sizes 64 and 128, and with keys that several queries share."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    device, forms = setting.device, []
    make = maker(setting.where, torch.bfloat16)
    b, s = (2, 8) if setting.is_toy else (2, 4096)
    backends = (
        ["FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION"]
        if device.is_cuda
        else ["MATH", "FLASH_ATTENTION"]
    )
    for heads, kv, size in (
        ((4, 4, 8), (4, 2, 8)) if setting.is_toy else ((32, 32, 64), (32, 32, 128), (32, 8, 128))
    ):
        q, k, v = (make(b, s, n, size).transpose(1, 2).requires_grad_() for n in (heads, kv, kv))
        grad = make(b, s, heads, size).transpose(1, 2)

        def both(
            q: Tensor = q, k: Tensor = k, v: Tensor = v, grad: Tensor = grad, shared: bool = kv != heads
        ) -> object:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=shared)
            return torch.autograd.grad(y, (q, k, v), grad)

        for name in backends:
            one: Found = {
                "form": name.removesuffix("_ATTENTION").lower(),
                "heads": heads,
                "key heads": kv,
                "head size": size,
            }
            try:
                with sdpa_kernel(getattr(SDPBackend, name)):
                    one |= on_device(device, both)
                one["FLOP/s"] = 7 * b * heads * s * s * size / (1e-6 * one["us"])
            except RuntimeError as exc:  # it has no kernel for this
                one["why"] = str(exc).splitlines()[0][:120]
            forms.append(one)
        yield {"rows": b, "tokens": s, "forms": forms}


def _operator_rows(with_compiler: bool) -> list[Row]:
    found = []
    for operator in OPERATORS:
        for sizes in SIZES:
            if sizes.name in USED.get(operator.name, GPTS):
                name = f"{operator.name}, {sizes.name}{', with torch.compile' if with_compiler else ''}"
                room = 24 if operator.name.startswith(LARGE) else 4
                found.append(Row(name, partial(_at_size, operator, sizes, with_compiler), 40, room, False))
    return found


def _at_size(operator: Operator, sizes: Sizes, with_compiler: bool, setting: Setting) -> Iterator[Found]:
    return operator_row(operator, TOY[0] if setting.is_toy else sizes, with_compiler, setting)


def _head(index: int, setting: Setting) -> Iterator[Found]:
    return loss_chunks(TOY[0] if setting.is_toy else SIZES[index], setting)


ROWS = [
    *_operator_rows(False),
    Row("attention by backend", attention_backends, seconds=30, gigabytes=12),
    Row("the loss in chunks, nanoGPT 124M", partial(_head, 1), seconds=30, gigabytes=20, is_short=False),
    Row("the loss in chunks, Llama 1.34B", partial(_head, 0), seconds=30, gigabytes=30, is_short=False),
    Row("a weight's gradient in float32", weight_gradient, seconds=20, gigabytes=4),
    Row("heads of odd sizes", odd_heads, seconds=20, gigabytes=8),
    *_operator_rows(True),
]
SHORT = ("swiglu, Llama 1.34B",)
ROWS = [row if row.name not in SHORT else Row(row.name, row.run, row.seconds, row.gigabytes) for row in ROWS]
