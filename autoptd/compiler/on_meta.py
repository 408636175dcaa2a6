"""Run attention on the meta device with the kernel that a CPU would choose, as it determines the saved
tensors.

On meta tensors torch decomposes attention into products and a softmax, and would save scores that CPUs and
GPUs do not.

    with AsOnCpu():
        F.scaled_dot_product_attention(q, k, v, is_causal=True).grad_fn
        # ScaledDotProductFlashAttentionForCpuBackward0
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from autoptd.compat import FakeTensorMode, without_modes

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu


class AsOnCpu(TorchFunctionMode):
    """A `with` block in which attention on meta tensors runs as on a CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        run = _attention if func is F.scaled_dot_product_attention and args[0].is_meta else func
        return run(*args, **(kwargs or {}))


def _attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    how = {"scale": scale, "enable_gqa": enable_gqa}
    if not _is_flash((q, k, v, attn_mask), dropout_p, is_causal, how):
        return F.scaled_dot_product_attention(q, k, v, attn_mask, dropout_p, is_causal, **how)  # type: ignore[arg-type, call-arg]
    # As torch does before the kernel.
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.zeros_like(attn_mask, dtype=q.dtype).masked_fill_(~attn_mask, -torch.inf)
    return FLASH(q, k, v, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)[0]  # type: ignore[no-any-return]


def _is_flash(
    operands: Sequence[Tensor | None], dropout_p: float, is_causal: bool, how: Mapping[str, Any]
) -> bool:
    """Tell whether a CPU would choose its flash kernel, for which torch has no public function."""
    with without_modes(), FakeTensorMode(), torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
        fakes = [None if x is None else _fake(x) for x in operands]
        # Torch shows the kernel only as the name of the autograd node.
        fakes[0].requires_grad_()  # type: ignore[union-attr]
        made = F.scaled_dot_product_attention(*fakes, dropout_p, is_causal, **how)  # type: ignore[arg-type, call-arg]
        return "FlashAttentionForCpu" in made.grad_fn.name()  # type: ignore[union-attr]


def _as_it_is(x: Tensor) -> Tensor:
    """Shadow the saved-tensor hooks of the caller: this tensor does not count as saved."""
    return x


def _fake(x: Tensor) -> Tensor:
    like = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="cpu")
    return like.requires_grad_(x.requires_grad)


__all__ = ["AsOnCpu"]
