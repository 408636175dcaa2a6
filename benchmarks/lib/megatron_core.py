"""The GPT of megatron_style.py with Megatron-Core's own column and row linear layers; needs the package megatron-core.

It is no dependency: install it into an environment of your own (`pip install --no-deps megatron-core`; 0.16.1 was tried), put
that on PYTHONPATH, and peers.py measures it as well. Its layers run on CPUs over gloo, and give the right gradients there;
attention, norms and embedding are those of megatron_style.py.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.lib import megatron_style
from benchmarks.lib.megatron_style import ParallelGPT, State
from examples.gpt import GPTConfig


def is_installed() -> bool:
    return (
        importlib.util.find_spec("megatron") is not None
        and importlib.util.find_spec("megatron.core") is not None
    )


class Core(nn.Module):
    """A layer of Megatron-Core with the weights of the hand-written layer that it stands for."""

    def __init__(self, layer: Any, like: nn.Module) -> None:
        super().__init__()
        self.layer = layer
        self.layer.load_state_dict({"weight": like.weight.data, "bias": like.bias.data}, strict=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


def core_gpt(config: GPTConfig, state: State, group: dist.ProcessGroup) -> ParallelGPT:
    """Return the model, vocabulary split; `group` are the tensor ranks, all that there are."""
    from megatron.core import ModelParallelConfig, parallel_state
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

    t = group.size()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=t)
    common: dict[str, Any] = {
        "config": ModelParallelConfig(tensor_model_parallel_size=t, use_cpu_initialization=True),
        "init_method": nn.init.normal_,
        "tp_group": group,
    }
    model = ParallelGPT(config, state, group)
    for block in model.h:
        for name, like in list(block.named_children()):
            rows, columns = like.weight.shape if hasattr(like, "group") else (0, 0)
            if isinstance(like, megatron_style.ColumnLinear):
                layer = ColumnParallelLinear(columns, rows * t, gather_output=False, **common)
            elif isinstance(like, megatron_style.RowLinear):
                row: dict[str, Any] = {"bias": True, "input_is_parallel": True, "skip_bias_add": False}
                layer = RowParallelLinear(columns * t, rows, **row, **common)
            else:
                continue
            setattr(block, name, Core(layer, like))
    return model
