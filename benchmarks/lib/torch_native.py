"""examples/gpt.py trained by what torch brings along, written as its users write it.

In: the GPT's config and its weights. Out: objects with `step(ids, targets) -> loss` (None where the rank has none) and
`parameters`: DTensor's parallelize_module over t, torch.distributed.pipelining over p, DistributedDataParallel over d.

What the model must be rewritten for: q, k and v as three modules, because DTensor would cut the fused one across them; heads
counted by -1; stages that may lack their ends; tied weights summed by hand, because the pipeline's two copies drift apart.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

from examples.gpt import GPTConfig

State = dict[str, Tensor]


class Attention(nn.Module):
    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.q, self.k, self.v, self.proj = (nn.Linear(h, h) for _ in range(4))
        self.head_dim = h // heads

    def forward(self, x: Tensor) -> Tensor:
        b, s, _ = x.shape
        q, k, v = (one(x).view(b, s, -1, self.head_dim).transpose(1, 2) for one in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.proj(y.transpose(1, 2).reshape(b, s, -1))


class MLP(nn.Module):
    def __init__(self, h: int) -> None:
        super().__init__()
        self.fc, self.proj = nn.Linear(h, 4 * h), nn.Linear(4 * h, h)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    def __init__(self, h: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.attn, self.ln_2, self.mlp = (
            nn.LayerNorm(h),
            Attention(h, heads),
            nn.LayerNorm(h),
            MLP(h),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class Embeddings(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = nn.Embedding(config.vocab_size, config.n_embd)
        self.wpe = nn.Embedding(config.block_size, config.n_embd)

    def forward(self, ids: Tensor) -> Tensor:
        return self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))


class StageGPT(nn.Module):
    """Layers `first` to `last` of the GPT, with the embeddings if it begins, norm and head if it ends."""

    def __init__(self, config: GPTConfig, state: State, first: int, last: int) -> None:
        super().__init__()
        h = config.n_embd
        self.embeddings = Embeddings(config) if first == 0 else None
        self.h = nn.ModuleDict({str(i): Block(h, config.n_head) for i in range(first, last)})
        self.ln_f = nn.LayerNorm(h) if last == config.n_layer else None
        self.lm_head = nn.Linear(h, config.vocab_size, bias=False) if last == config.n_layer else None
        self.load_state_dict({name: x for name, x in renamed(state).items() if name in self.state_dict()})
        self.tie()

    def tie(self) -> None:
        if self.embeddings is not None and self.lm_head is not None:
            self.lm_head.weight = self.embeddings.wte.weight

    def forward(self, x: Tensor) -> Tensor:
        if self.embeddings is not None:
            x = self.embeddings(x)
        for block in self.h.values():
            x = block(x)
        return x if self.lm_head is None else self.lm_head(self.ln_f(x))


def renamed(state: State) -> State:
    """The weights of examples/gpt.py under this model's names."""
    found: State = {}
    for name, x in state.items():
        name = name.removeprefix("transformer.").replace("c_proj", "proj").replace("c_fc", "fc")
        if "c_attn" in name:
            found |= {name.replace("c_attn", one): part for one, part in zip("qkv", x.chunk(3), strict=True)}
        else:
            found[f"embeddings.{name}" if name.startswith("w") else name] = x
    return found


def split_tensors(model: StageGPT, mesh: DeviceMesh, *, sequence: bool) -> None:
    """Tensor parallelism of a stage (of all of the model if `sequence`), by DTensor's plan."""
    norm: Any = SequenceParallel() if sequence else None
    along: Any = Shard(1) if sequence else Replicate()
    columns, rows = ColwiseParallel(), RowwiseParallel(output_layouts=along)
    gathered = PrepareModuleInput(input_layouts=(along,), desired_input_layouts=(Replicate(),))
    plan: dict[str, Any] = {"attn": gathered, "mlp": gathered, "ln_1": norm, "ln_2": norm}
    plan |= {"attn.q": columns, "attn.k": columns, "attn.v": columns, "attn.proj": rows, "mlp.fc": columns}
    plan |= {"mlp.proj": rows}
    for block in model.h.values():
        parallelize_module(block, mesh, {name: one for name, one in plan.items() if one is not None})
    if model.embeddings is not None:
        ends: dict[str, Any] = {"wte": RowwiseParallel(input_layouts=Replicate())}
        parallelize_module(model.embeddings, mesh, ends)
        if sequence:
            out = PrepareModuleOutput(output_layouts=(Replicate(),), desired_output_layouts=(along,))
            parallelize_module(model.embeddings, mesh, out)
    if model.lm_head is not None:
        head = ColwiseParallel(input_layouts=along, output_layouts=Replicate())
        parallelize_module(model, mesh, {"lm_head": head} | ({"ln_f": norm} if sequence else {}))
    model.tie()


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Whole:
    """Tensor or data parallel: one model, microbatches in a loop."""

    def __init__(
        self,
        config: GPTConfig,
        state: State,
        *,
        tp: dist.ProcessGroup | None = None,
        d: int = 1,
        m: int = 1,
        sequence: bool = False,
    ) -> None:
        model = StageGPT(config, state, 0, config.n_layer)
        if tp is not None:
            split_tensors(model, DeviceMesh.from_group(tp, "cpu"), sequence=sequence)
        self.m, self.model = m, nn.parallel.DistributedDataParallel(model) if d > 1 else model

    def step(self, ids: Tensor, targets: Tensor) -> Tensor:
        total = torch.zeros(())
        pieces = list(zip(ids.chunk(self.m), targets.chunk(self.m), strict=True))
        for i, (x, y) in enumerate(pieces):
            if isinstance(self.model, nn.parallel.DistributedDataParallel):
                self.model.require_backward_grad_sync = i + 1 == self.m  # as no_sync() does
            loss = cross_entropy(self.model(x), y) / self.m
            loss.backward()
            total += loss.detach()
        return total

    def parameters(self) -> list[nn.Parameter]:
        return list(self.model.parameters())


class Pipeline:
    """p pipeline ranks of v chunks, each split over t; 1F1B, interleaved for v > 1. `ids` and `targets` are on every rank."""

    def __init__(
        self, config: GPTConfig, state: State, *, p: int, v: int = 1, t: int = 1, m: int = 4
    ) -> None:
        mesh = dist.init_device_mesh("cpu", (p, t), mesh_dim_names=("pp", "tp"))
        self.rank, self.p, group = mesh.get_local_rank("pp"), p, mesh.get_group("pp")
        count, each = p * v, config.n_layer // (p * v)
        indices = range(self.rank, count, p)
        self.stages = [StageGPT(config, state, i * each, (i + 1) * each) for i in indices]
        if t > 1:
            for stage in self.stages:
                split_tensors(stage, mesh["tp"], sequence=False)
        made = [
            PipelineStage(stage, i, count, torch.device("cpu"), group=group)
            for i, stage in zip(indices, self.stages, strict=True)
        ]
        schedule: Any = Schedule1F1B(made[0], m, cross_entropy) if v == 1 else None
        self.schedule: Any = schedule or ScheduleInterleaved1F1B(made, m, cross_entropy)
        self.tied = [
            one.embeddings.wte if one.embeddings else one.lm_head for one in (self.stages[0], self.stages[-1])
        ]
        self.ends = group  # first and last rank are all of them at p=2
        assert p == 2, "tied weights: make a group of the first and the last rank"

    def step(self, ids: Tensor, targets: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        is_last, inputs = self.rank == self.p - 1, (ids,) if self.rank == 0 else ()
        self.schedule.step(*inputs, **({"target": targets, "losses": losses} if is_last else {}))
        weight = (self.tied[0] if self.rank == 0 else self.tied[1]).weight
        if isinstance(weight, DTensor):  # an embedding's gradient comes out whole, a linear layer's split
            weight.grad = weight.grad.redistribute(weight.device_mesh, weight.placements)
        dist.all_reduce(
            weight.grad.to_local() if isinstance(weight, DTensor) else weight.grad, group=self.ends
        )
        return torch.stack(losses).mean() if losses else None

    def parameters(self) -> list[nn.Parameter]:
        return [one for stage in self.stages for one in stage.parameters()]
