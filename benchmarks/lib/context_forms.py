"""examples/gpt.py with its tokens over the ranks of a group, written by hand: Ulysses, and torch's own ring attention.

In: the GPT, a group, and how attention sees all tokens. Out: `step(ids, targets) -> loss` on whole rows, of which each rank
takes its tokens. Gradients are summed over the group in one all-reduce.

- `ulysses`: an all-to-all of the fused q, k and v before attention, one of its result behind it; a rank has a run of tokens.
- `torch_ring`: `_templated_ring_attention`, on which torch's `context_parallel` stands, with the kernel for CPUs, which the
  latter does not know. Tokens are in zigzag order (torch: head-tail), or each rank has a run of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.tensor.experimental._context_parallel._attention as ring
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.experimental import context_parallel

from examples.gpt import GPT, CausalSelfAttention

aten = torch.ops.aten
# From fused q, k, v [b, tokens of a rank, 3 h] and the number of heads to attention's result [b, tokens of a rank, h].
Attend = Callable[[Tensor, int], Tensor]


class Trainer:
    """The GPT of a rank, which has the tokens `places` of every row."""

    def __init__(self, model: GPT, group: dist.ProcessGroup, attend: Attend, places: Tensor) -> None:
        self.model, self.group, self.attend, self.places = model, group, attend, places

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        """Loss of the whole batch; gradients as those of one device."""
        ids, own = ids[:, self.places], targets[:, self.places]
        body = self.model.transformer
        x = body.wte(ids) + body.wpe(self.places)
        for block in body.h:
            x = x + self._attention(block.attn, block.ln_1(x))
            x = x + block.mlp(block.ln_2(x))
        logits = self.model.lm_head(body.ln_f(x))
        loss = F.cross_entropy(logits.flatten(0, 1), own.flatten(), reduction="sum") / targets.numel()
        loss.backward()  # type: ignore[no-untyped-call]
        self._sum([p.grad for p in self.model.parameters() if p.grad is not None])
        loss = loss.detach()
        dist.all_reduce(loss, group=self.group)
        return loss

    def _attention(self, layer: CausalSelfAttention, x: Tensor) -> Tensor:
        y: Tensor = layer.c_proj(self.attend(layer.c_attn(x), layer.n_head))
        return y

    def _sum(self, gradients: list[Tensor]) -> None:
        flat = torch.cat([gradient.flatten() for gradient in gradients])
        dist.all_reduce(flat, group=self.group)
        for gradient, summed in zip(gradients, flat.split([one.numel() for one in gradients]), strict=True):
            gradient.copy_(summed.view_as(gradient))


def run_of(length: int, group: dist.ProcessGroup) -> Tensor:
    """Places of a rank's run of tokens."""
    return torch.arange(length).chunk(group.size())[group.rank()]


def pieces_of(length: int, group: dist.ProcessGroup) -> Tensor:
    """Places of a rank's two pieces, as far from either end."""
    pieces = torch.arange(length).chunk(2 * group.size())
    return torch.cat((pieces[group.rank()], pieces[-1 - group.rank()]))


class _Exchange(torch.autograd.Function):
    """Send part i of a tensor's dim 0 to rank i; backward sends it back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        y = torch.empty_like(x)
        dist.all_to_all_single(y, x.contiguous(), group=group)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grad.contiguous(), ctx.group), None  # type: ignore[no-untyped-call]


def ulysses(group: dist.ProcessGroup) -> Attend:
    """All tokens of a part of the heads."""
    c = group.size()

    def attend(qkv: Tensor, heads: int) -> Tensor:
        b, s, width = qkv.shape
        size = width // 3 // heads
        # [ranks, b, s, 3, heads of a rank, size]: to each rank its heads.
        parts = qkv.view(b, s, 3, c, heads // c, size).permute(3, 0, 1, 2, 4, 5)
        whole = _Exchange.apply(parts.contiguous(), group)  # type: ignore[no-untyped-call]
        # [3, b, heads of a rank, all tokens, size]
        q, k, v = whole.permute(3, 1, 4, 0, 2, 5).reshape(3, b, heads // c, c * s, size)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        back = y.view(b, heads // c, c, s, size).permute(2, 0, 3, 1, 4).contiguous()
        own = _Exchange.apply(back, group)  # type: ignore[no-untyped-call]
        return own.permute(1, 2, 0, 3, 4).reshape(b, s, width // 3)  # type: ignore[no-any-return]

    return attend


class _Ring(torch.autograd.Function):
    """torch's ring attention with the kernel for CPUs."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: dist.ProcessGroup) -> Tensor:
        forward = aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = ring._templated_ring_attention(group, 2, forward, q, k, v, is_causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.group = group
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        backward = aten._scaled_dot_product_flash_attention_for_cpu_backward.default
        how = {"query": q, "key": k, "value": v, "out": out, "logsumexp": lse, "is_causal": True}
        grads = ring._templated_ring_attention_backward(
            ctx.group, 2, backward, grad_out=grad, grad_out_name="grad_out", dropout_p=0.0, **how
        )
        return (*grads[:3], None)


def torch_ring(group: dist.ProcessGroup, is_zigzag: bool) -> Attend:
    """Keys and values go around; `is_zigzag`: of tokens in that order."""

    def attend(qkv: Tensor, heads: int) -> Tensor:
        b, s, width = qkv.shape
        q, k, v = qkv.view(b, s, 3, heads, width // 3 // heads).permute(2, 0, 3, 1, 4)
        # Read by each call, forward and backward, which is in the same step.
        ring._cp_options.enable_load_balance = is_zigzag
        y: Tensor = _Ring.apply(q, k, v, group)  # type: ignore[no-untyped-call]
        return y.transpose(1, 2).reshape(b, s, width // 3)

    return attend


def contenders(model: Callable[[], GPT], group: dist.ProcessGroup, length: int) -> dict[str, Trainer]:
    """All forms, each of a model of its own."""
    run, pieces = run_of(length, group), pieces_of(length, group)
    return {
        "hand-written Ulysses": Trainer(model(), group, ulysses(group), run),
        "torch's ring, contiguous": Trainer(model(), group, torch_ring(group, False), run),
        "torch's ring, zigzag": Trainer(model(), group, torch_ring(group, True), pieces),
    }


def why_not_context_parallel(group: dist.ProcessGroup) -> str:
    """What torch's `context_parallel` says on CPUs; "" where it runs. A collective."""
    mesh = DeviceMesh("cpu", list(range(group.size())))
    q, k, v = (torch.randn(1, 2, 16, 8) for _ in range(3))
    try:
        with context_parallel(mesh, buffers=[q, k, v], buffer_seq_dims=[2, 2, 2]):
            q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
            F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    return ""


__all__ = ["Trainer", "contenders", "why_not_context_parallel"]
