"""A causal language model of transformers, trained in parallel in the ways that its users have.

In: the model, whole and equal on all ranks; a mesh; the global batch as an example. Out: a `Form`: a training step on the rows
of this rank's replica, and the weights after it. Every function of `FORMS` is the code that a user writes, next to
`one_device`, the loop that it starts from; `lines_of` counts the difference.

DeepSpeed and NeMo Automodel are no dependencies: `pip install --no-deps` them, with hjson, py-cpuinfo, msgpack, einops and
ninja, into an environment of your own (DS_BUILD_OPS=0; deepspeed 0.19.8 and nemo-automodel 0.7.0 were tried).
"""

from __future__ import annotations

import inspect
import shutil
import tempfile
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, SplitPoint, pipeline
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import autoptd
from benchmarks.lib.lines import code_lines

SGD = {"lr": 0.1}


class Case(NamedTuple):
    """A mesh, and m microbatches of a replica."""

    t: int = 1
    p: int = 1
    d: int = 1
    m: int = 1

    def __str__(self) -> str:
        return " ".join(f"{name}={n}" for name, n in self._asdict().items() if n > 1 and name != "m")


class Form(NamedTuple):
    """One way to train: a step on this rank's rows, with its update, which returns the loss where the rank has one.

    `weights`: name -> tensor, of all that this rank trains, sharded tensors as what they are. `is_mean`: the loss is that of
    the global batch, not of a replica.
    """

    step: Callable[[Tensor], Tensor | None]
    weights: Callable[[], dict[str, Tensor]]
    is_mean: bool = False


def one_device(model: Any, case: Case, ids: Tensor) -> Form:
    optimizer = torch.optim.SGD(model.parameters(), **SGD)

    def step(ids: Tensor) -> Tensor:
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Form(step, lambda: dict(model.named_parameters()))


# AutoPTD


def ours(model: Any, case: Case, ids: Tensor) -> Form:
    return _ours(model, case, ids, zero=0)


def ours_sharded(model: Any, case: Case, ids: Tensor) -> Form:
    return _ours(model, case, ids, zero=1)


def _ours(model: Any, case: Case, ids: Tensor, zero: int) -> Form:
    mesh = {"t": case.t, "p": case.p, "d": case.d, "zero": zero, "num_microbatches": case.m, "fuse": False}
    pm = autoptd.parallelize(model, **mesh, example_inputs={"input_ids": ids, "labels": ids})
    optimizer = pm.optimizer(torch.optim.SGD, **SGD)

    def step(ids: Tensor) -> Tensor:
        loss = pm.step(input_ids=ids, labels=ids)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return Form(step, pm.state_dict, is_mean=True)


# Data parallel


def ddp(model: Any, case: Case, ids: Tensor) -> Form:
    model = nn.parallel.DistributedDataParallel(model)
    return one_device(model, case, ids)


def fsdp2(model: Any, case: Case, ids: Tensor) -> Form:
    for block in blocks(model):
        fully_shard(block)
    fully_shard(model)
    return one_device(model, case, ids)


def transformers_fsdp(model: Any, case: Case, ids: Tensor) -> Form:
    model = loaded(model, fsdp_size=case.d)
    return one_device(model, case, ids)


def transformers_tp(model: Any, case: Case, ids: Tensor) -> Form:
    model = loaded(model, tp_size=case.t)
    return one_device(model, case, ids)


def transformers_pp(model: Any, case: Case, ids: Tensor) -> Form:
    model = loaded(model, pp_size=case.p)
    return one_device(model, case, ids)


def loaded(model: Any, **sizes: int) -> Any:
    """Load the model from a folder, as on one device, with the argument that divides it."""
    from transformers.distributed import DistributedConfig

    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder)
    model.save_pretrained(folder[0])  # rank 0 writes
    dist.barrier()
    config = DistributedConfig(**sizes)
    made = type(model).from_pretrained(folder[0], distributed_config=config, dtype=model.dtype)
    dist.barrier()
    shutil.rmtree(folder[0], ignore_errors=True)
    return made


def automodel(model: Any, case: Case, ids: Tensor) -> Form:
    from nemo_automodel.components.distributed.config import FSDP2Config
    from nemo_automodel.components.distributed.mesh import MeshContext, ParallelismSizes
    from nemo_automodel.components.distributed.model_parallelizer import parallelize_model

    config = FSDP2Config(mp_policy=MixedPrecisionPolicy())
    sizes = ParallelismSizes(tp_size=case.t, dp_size=case.d)
    model = parallelize_model(model, MeshContext.build(config, sizes))
    optimizer = torch.optim.SGD(model.parameters(), foreach=False, **SGD)

    def step(ids: Tensor) -> Tensor:
        logits = model(input_ids=ids).logits
        loss = next_token_loss(logits.full_tensor() if isinstance(logits, DTensor) else logits, ids)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return Form(step, lambda: dict(model.named_parameters()))


# Tensor parallel


def dtensor(model: Any, case: Case, ids: Tensor) -> Form:
    split_tensors(model, dist.init_device_mesh("cpu", (case.t,)))
    return one_device(model, case, ids)


def split_tensors(model: Any, mesh: Any) -> None:
    if hasattr(model, "transformer"):
        parallelize_module(model, mesh, {"transformer.h.*.attn.c_attn": ColwiseParallel()})  # refused
    split_llama(model, mesh)


def split_llama(model: Any, mesh: Any) -> None:
    columns, rows = ColwiseParallel(), RowwiseParallel()
    plan = {
        "model.embed_tokens": RowwiseParallel(input_layouts=Replicate()),
        "model.layers.*.self_attn.q_proj": columns,
        "model.layers.*.self_attn.k_proj": columns,
        "model.layers.*.self_attn.v_proj": columns,
        "model.layers.*.self_attn.o_proj": rows,
        "model.layers.*.mlp.gate_proj": columns,
        "model.layers.*.mlp.up_proj": columns,
        "model.layers.*.mlp.down_proj": rows,
        "lm_head": ColwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(model, mesh, plan)
    if model.config.tie_word_embeddings:
        model.lm_head.weight = model.model.embed_tokens.weight


def deepspeed_tp(model: Any, case: Case, ids: Tensor) -> Form:
    import deepspeed

    config = {
        "train_micro_batch_size_per_gpu": len(ids),
        "tensor_parallel": {"autotp_size": case.t},
        "zero_optimization": {"stage": 0},
        "gradient_clipping": 0.0,  # 1.0 if left out
    }
    engine = deepspeed.initialize(
        model=model, config=config, optimizer=lambda parameters: torch.optim.SGD(parameters, **SGD)
    )[0]

    def step(ids: Tensor) -> Tensor:
        loss = engine(input_ids=ids, labels=ids).loss
        engine.backward(loss)
        engine.step()
        return loss.detach()

    return Form(step, lambda: dict(engine.module.named_parameters()))


# Pipelines


def next_token_loss(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten())


def traced_pipeline(model: Any, case: Case, ids: Tensor) -> Form:
    """`torch.distributed.pipelining.pipeline`: a trace of the model, cut in front of a named module."""
    half = len(blocks(model)) // 2
    middle = f"transformer.h.{half}" if hasattr(model, "transformer") else f"model.layers.{half}"
    microbatch = ids[: len(ids) // case.m]
    pipe = pipeline(model, (), {"input_ids": microbatch}, split_spec={middle: SplitPoint.BEGINNING})
    stage = pipe.build_stage(dist.get_rank(), torch.device("cpu"))
    schedule = Schedule1F1B(stage, case.m, next_token_loss)
    optimizer = torch.optim.SGD(stage.submod.parameters(), **SGD)

    def step(ids: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        if dist.get_rank() == 0:
            schedule.step(input_ids=ids)
        else:
            schedule.step(target=ids, losses=losses)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else None

    return Form(step, lambda: dict(stage.submod.named_parameters()))


class GPT2Stage(nn.Module):
    def __init__(self, model: Any, is_first: bool, is_last: bool) -> None:
        super().__init__()
        body, half = model.transformer, len(model.transformer.h) // 2
        self.wte, self.wpe = (body.wte, body.wpe) if is_first else (None, None)
        self.h = nn.ModuleList(body.h[:half] if is_first else body.h[half:])
        self.ln_f, self.lm_head = (body.ln_f, model.lm_head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.wte is not None and self.wpe is not None:
            x = self.wte(x) + self.wpe(torch.arange(x.shape[1], device=x.device))
        for block in self.h:
            x = block(x)
        return x if self.ln_f is None or self.lm_head is None else self.lm_head(self.ln_f(x))


class LlamaStage(nn.Module):
    def __init__(self, model: Any, is_first: bool, is_last: bool) -> None:
        super().__init__()
        body, half = model.model, len(model.model.layers) // 2
        self.embed_tokens, self.rotary = body.embed_tokens if is_first else None, body.rotary_emb
        self.layers = nn.ModuleList(body.layers[:half] if is_first else body.layers[half:])
        self.norm, self.lm_head = (body.norm, model.lm_head) if is_last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed_tokens is not None:
            x = self.embed_tokens(x)
        turn = self.rotary(x, position_ids=torch.arange(x.shape[1], device=x.device)[None])
        for layer in self.layers:
            x = layer(x, position_embeddings=turn)
        return x if self.norm is None or self.lm_head is None else self.lm_head(self.norm(x))


def pipeline_by_hand(model: Any, case: Case, ids: Tensor) -> Form:
    """Stages of our own, split by DTensor where t > 1; gradients of a tied weight are summed over the two stages."""
    mesh = dist.init_device_mesh("cpu", (case.p, case.t), mesh_dim_names=("pp", "tp"))
    if case.t > 1:
        split_tensors(model, mesh["tp"])
    rank, group = mesh.get_local_rank("pp"), mesh.get_group("pp")
    kind = GPT2Stage if hasattr(model, "transformer") else LlamaStage
    module = kind(model, rank == 0, rank == case.p - 1)
    stage = PipelineStage(module, rank, case.p, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, case.m, next_token_loss)
    optimizer = torch.optim.SGD(module.parameters(), foreach=False, **SGD)
    tied = model.lm_head.weight if model.config.tie_word_embeddings else None

    def step(ids: Tensor) -> Tensor | None:
        losses: list[Tensor] = []
        if rank == 0:
            schedule.step(ids)
        else:
            schedule.step(target=ids, losses=losses)
        if tied is not None:
            if isinstance(tied, DTensor):  # an embedding's gradient comes out whole, a linear layer's split
                tied.grad = tied.grad.redistribute(tied.device_mesh, tied.placements)
            dist.all_reduce(tied.grad.to_local() if isinstance(tied, DTensor) else tied.grad, group=group)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).mean() if losses else None

    return Form(step, lambda: of_stage(model, module))


def of_stage(model: Any, module: nn.Module) -> dict[str, Tensor]:
    """The parameters of a stage under the model's names."""
    mine = set(module.parameters())
    return {name: x for name, x in model.named_parameters(remove_duplicate=False) if x in mine}


def blocks(model: Any) -> Iterable[Any]:
    return model.transformer.h if hasattr(model, "transformer") else model.model.layers


FORMS: dict[str, dict[str, Callable[[Any, Case, Tensor], Form]]] = {
    "t=2": {
        "AutoPTD": ours,
        "torch DTensor": dtensor,
        "transformers, tp_size": transformers_tp,
        "DeepSpeed AutoTP": deepspeed_tp,
        "NeMo Automodel": automodel,
    },
    "p=2": {
        "AutoPTD": ours,
        "torch pipeline()": traced_pipeline,
        "torch stages by hand": pipeline_by_hand,
        "transformers, pp_size": transformers_pp,
    },
    "d=2": {
        "AutoPTD": ours,
        "AutoPTD, zero=1": ours_sharded,
        "torch DDP": ddp,
        "torch FSDP2": fsdp2,
        "transformers, fsdp_size": transformers_fsdp,
        "NeMo Automodel": automodel,
    },
    "t=2 p=2": {"AutoPTD": ours, "torch stages + DTensor": pipeline_by_hand},
}

# What a form's user writes besides the form.
PARTS: dict[Callable[..., Form], tuple[Any, ...]] = {
    dtensor: (split_llama,),
    automodel: (next_token_loss,),
    traced_pipeline: (next_token_loss,),
}


def lines_of(form: Callable[..., Form], model: Any, case: Case) -> int:
    """Count the lines of a form beyond those of the loop for one device."""
    if form is pipeline_by_hand:
        kind = GPT2Stage if hasattr(model, "transformer") else LlamaStage
        parts: tuple[Any, ...] = (next_token_loss, kind, *((split_llama,) if case.t > 1 else ()))
    else:
        parts = PARTS.get(form, ())
    written = _ours if form in (ours, ours_sharded) else form
    # A form that ends in the loop for one device has that instead of its own; its signature and the call do not count.
    has_loop = "def step" in inspect.getsource(written)
    beyond = code_lines(one_device) if has_loop else 2
    return code_lines(written, *parts) - beyond
