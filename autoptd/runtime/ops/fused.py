"""The fused operators of a stage, bound to a backend; emitted files call `self.fused.rms_norm(x, weight, eps=1e-6)`."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from autoptd.kernels.activations import bias_gelu, geglu, swiglu
from autoptd.kernels.loss import linear_cross_entropy
from autoptd.kernels.norms import layer_norm, rms_norm
from autoptd.kernels.rotary import rotary
from autoptd.kernels.softmax import masked_softmax
from autoptd.runtime.ops.dropout import bias_dropout_add
from autoptd.runtime.ops.vocab import vocab_parallel_linear_cross_entropy


class Fused:
    """The operators of autoptd/kernels with one backend: "triton" for tensors on CUDA devices, else torch's operators."""

    def __init__(self, backend: str = "eager") -> None:
        # `fuse` may also be "inductor": torch's compiler fuses the eager forms by itself.
        self.backend = "triton" if backend == "triton" else "eager"
        self.masked_softmax = partial(masked_softmax, backend=self.backend)
        self.bias_gelu = partial(bias_gelu, backend=self.backend)
        self.swiglu = partial(swiglu, backend=self.backend)
        self.geglu = partial(geglu, backend=self.backend)
        self.layer_norm = partial(layer_norm, backend=self.backend)
        self.rms_norm = partial(rms_norm, backend=self.backend)
        self.rotary = partial(rotary, backend=self.backend)
        self.bias_dropout_add = partial(bias_dropout_add, backend=self.backend)
        # What backward starts from, where that is not 1: the heads below compute gradients before it does.
        self.loss_scale: float | None = None

    def linear_cross_entropy(self, *args: Any, **options: Any) -> torch.Tensor:
        return linear_cross_entropy(*args, **options, loss_scale=self.loss_scale, backend=self.backend)

    def vocab_parallel_linear_cross_entropy(self, *args: Any, **options: Any) -> torch.Tensor:
        return vocab_parallel_linear_cross_entropy(
            *args, **options, loss_scale=self.loss_scale, backend=self.backend
        )
