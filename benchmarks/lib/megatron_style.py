"""examples/gpt.py written by hand for t tensor ranks, as Megatron-LM's users write it: the ceiling of eager code.

In: the whole model's weights and a process group. Out: a module with local shapes whose forward and backward hold the
collectives of Shoeybi et al. 2019: f before a column-split GEMM, g after a row-split one, the latter's bias added after g.
The vocabulary is split as well ("vocab"), or whole and only the logits' GEMM split ("gathered"), whichever is faster at a size.

    model = ParallelGPT(config, whole.state_dict(), dist.group.WORLD)
    loss = model(ids, targets); loss.backward(); model.sum_shared_gradients()
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from examples.gpt import GPTConfig

State = dict[str, Tensor]


class _F(torch.autograd.Function):
    """Forward: nothing. Backward: all-reduce."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.contiguous()
        dist.all_reduce(grad, group=ctx.group)
        return grad, None


class _G(torch.autograd.Function):
    """Forward: all-reduce, in place as Megatron-LM does. Backward: nothing."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class _GatherColumns(torch.autograd.Function):
    """Forward: all-gather of the last dim. Backward: this rank's slice, every rank having the whole gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, -1)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.chunk(ctx.group.size(), -1)[ctx.group.rank()].contiguous(), None


class _CrossEntropy(torch.autograd.Function):
    """Mean cross-entropy of logits [n, V/t] that are split by columns: three reductions of n numbers."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, group: dist.ProcessGroup) -> Tensor:
        top = logits.amax(1)
        dist.all_reduce(top, dist.ReduceOp.MAX, group=group)
        logits = logits - top.unsqueeze(1)
        local = targets - group.rank() * logits.shape[1]
        elsewhere = (local < 0) | (local >= logits.shape[1])
        local = local.masked_fill(elsewhere, 0)
        picked = logits.gather(1, local.unsqueeze(1)).squeeze(1).masked_fill(elsewhere, 0.0)
        dist.all_reduce(picked, group=group)
        p = logits.exp()
        total = p.sum(1)
        dist.all_reduce(total, group=group)
        ctx.save_for_backward(p.div_(total.unsqueeze(1)), local, elsewhere)
        return (total.log() - picked).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        p, local, elsewhere = ctx.saved_tensors
        p.scatter_add_(1, local.unsqueeze(1), (elsewhere.to(p.dtype) - 1).unsqueeze(1))
        return p.mul_(grad / len(p)), None, None


def _rows(x: Tensor, group: dist.ProcessGroup, blocks: int = 1) -> nn.Parameter:
    """This rank's part of dim 0, of each of `blocks` blocks."""
    parts = [block.chunk(group.size())[group.rank()] for block in x.chunk(blocks)]
    return nn.Parameter(torch.cat(parts).clone())


class ColumnLinear(nn.Module):
    """[..., h] whole to [..., n/t]; `blocks` are fused matrices, each split by itself (q, k, v)."""

    def __init__(self, state: State, name: str, group: dist.ProcessGroup, blocks: int = 1) -> None:
        super().__init__()
        self.weight, self.bias = (_rows(state[f"{name}.{one}"], group, blocks) for one in ("weight", "bias"))
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(_F.apply(x, self.group), self.weight, self.bias)


class RowLinear(nn.Module):
    """[..., n/t] to [..., h], whole on every rank."""

    def __init__(self, state: State, name: str, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.weight = nn.Parameter(state[f"{name}.weight"].chunk(group.size(), 1)[group.rank()].contiguous())
        self.bias = nn.Parameter(state[f"{name}.bias"].clone())
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        return _G.apply(F.linear(x, self.weight), self.group) + self.bias


class LayerNorm(nn.LayerNorm):
    def __init__(self, state: State, name: str) -> None:
        super().__init__(len(state[f"{name}.weight"]))
        self.load_state_dict({one: state[f"{name}.{one}"] for one in ("weight", "bias")})


class ParallelBlock(nn.Module):
    """One layer: attention on a/t heads, then the MLP."""

    def __init__(self, config: GPTConfig, state: State, name: str, group: dist.ProcessGroup) -> None:
        super().__init__()
        self.heads = config.n_head // group.size()
        self.ln_1, self.ln_2 = LayerNorm(state, f"{name}.ln_1"), LayerNorm(state, f"{name}.ln_2")
        self.c_attn = ColumnLinear(state, f"{name}.attn.c_attn", group, blocks=3)
        self.attn_proj = RowLinear(state, f"{name}.attn.c_proj", group)
        self.c_fc = ColumnLinear(state, f"{name}.mlp.c_fc", group)
        self.mlp_proj = RowLinear(state, f"{name}.mlp.c_proj", group)

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (
            one.view(b, s, self.heads, -1).transpose(1, 2) for one in self.c_attn(self.ln_1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attn_proj(y.transpose(1, 2).reshape(b, s, -1))
        return x + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x))))


class ParallelGPT(nn.Module):
    """The GPT of examples/gpt.py on t ranks, embeddings and head tied. `head`: "vocab" or "gathered", see the module."""

    def __init__(
        self, config: GPTConfig, state: State, group: dist.ProcessGroup, head: str = "vocab"
    ) -> None:
        super().__init__()
        self.group, self.head = group, head
        wte = state["transformer.wte.weight"]
        self.wte = _rows(wte, group) if head == "vocab" else nn.Parameter(wte.clone())
        self.wpe = nn.Parameter(state["transformer.wpe.weight"].clone())
        self.h = nn.ModuleList(
            ParallelBlock(config, state, f"transformer.h.{i}", group) for i in range(config.n_layer)
        )
        self.ln_f = LayerNorm(state, "transformer.ln_f")
        self.register_buffer("positions", torch.arange(config.block_size))

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x = self._embed(ids) + F.embedding(self.positions[: ids.shape[1]], self.wpe)
        for block in self.h:
            x = block(x)
        x = _F.apply(self.ln_f(x), self.group)
        if self.head == "vocab":
            logits = F.linear(x, self.wte)
            return _CrossEntropy.apply(logits.view(-1, logits.shape[-1]), targets.view(-1), self.group)
        rows = self.wte.chunk(self.group.size())[self.group.rank()]
        logits = _GatherColumns.apply(F.linear(x, rows), self.group)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]), targets.view(-1))

    def sum_shared_gradients(self) -> None:
        """Sum what each rank has a part of: of a whole tied weight, of which each computes the logits of its rows."""
        if self.head == "gathered":
            dist.all_reduce(self.wte.grad, group=self.group)

    def _embed(self, ids: Tensor) -> Tensor:
        if self.head == "gathered":
            x = F.embedding(ids, self.wte)
            return (
                x if self.group.rank() == 0 else x.detach()
            )  # the whole gradient is everyone's: count it once
        local = ids - self.group.rank() * len(self.wte)
        elsewhere = (local < 0) | (local >= len(self.wte))
        x = F.embedding(local.masked_fill(elsewhere, 0), self.wte)
        return _G.apply(x.masked_fill(elsewhere.unsqueeze(-1), 0.0), self.group)
