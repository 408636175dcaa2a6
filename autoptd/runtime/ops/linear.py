"""`F.linear` as an autograd function of the runtime, emitted where the compiler hooks into its backward.

In: the arguments of `F.linear`, and the hooks. Out: the same values and the same gradients. Each hook works without
the others:

- `overlap=tp`: the input is of type I, and f (I -> R) is part of this function: the input's gradient is all-reduced while
  the weight's is computed (Narayanan et al., SC'21, section 4; Megatron's asynchronous all-reduce).
- an input from `rt.all_gather_again`: its shard is saved, and gathered again for the weight's gradient (Korthikanti et al.
  2022, section 4.2.2). All GEMMs that use the value share one such gather.
- `wgrad=self.main_grads`: backward adds the weight's gradient to the sum over microbatches, in the dtype of that sum.
- `wgrad=self.deferred`: backward appends the GEMM of the weight's gradient to a list, which action W runs.

    ln_1 = rt.all_gather_again(ln_1, tp, dim=1, gemms=3, site="h.0.attn")      # S -> R
    q, k, v = rt.linear(ln_1, w.q), rt.linear(ln_1, w.k), rt.linear(ln_1, w.v)
    c_fc = rt.linear(ln_2, w.c_fc.weight, w.c_fc.bias, overlap=tp, wgrad=self.main_grads)

With a `wgrad`, autograd does not see the weight at all: otherwise it would add the gradient a second time. The weight
must then be a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from autoptd.compat import add_mm
from autoptd.errors import InternalError
from autoptd.ir.types import Outer
from autoptd.kernels.loss import WeightSum
from autoptd.runtime.ops.conversions import gather, gather_start, s_to_r, scatter_start
from autoptd.runtime.world.world import Group, Pending

Tensor = torch.Tensor


class WeightGemm(NamedTuple):
    """The GEMM of a weight's gradient: `output_grad^T input`, or its transpose for a weight stored as [in, out].

    It holds the tensors that autograd passed, not views: autograd reuses the memory of a gradient in place when it
    holds the only reference to it.
    """

    weight: Tensor
    input: Tensor | Regather
    output_grad: Tensor
    is_transposed: bool

    def factors(self) -> tuple[Tensor, Tensor]:
        """Return two matrices (a, b) whose product a @ b is the gradient."""
        x = self.input.take() if isinstance(self.input, Regather) else self.input
        rows, grads = _rows(x), _rows(self.output_grad)
        return (rows.t(), grads) if self.is_transposed else (grads.t(), rows)

    def add_to(self, grad: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Run the GEMM and return its result in `dtype`, added in place to `grad` if there is one."""
        return add_mm(grad, *self.factors(), dtype)


# A `WeightSum` comes from a head that is one operator with its loss.
WeightTerm = WeightGemm | WeightSum
WeightGradient = Callable[[WeightTerm], None]


class Deferred:
    """The GEMMs that one backward left; the executor takes them and runs them at the action W."""

    def __init__(self) -> None:
        self.gemms: list[WeightTerm] = []

    def __call__(self, gemm: WeightTerm) -> None:
        self.gemms.append(gemm)

    def take(self) -> list[WeightTerm]:
        """Return the GEMMs collected since the last call, and forget them."""
        gemms, self.gemms = self.gemms, []
        return gemms


def linear(
    x: Tensor | RegatheredInput,
    weight: Tensor,
    bias: Tensor | None = None,
    *,
    overlap: Group | None = None,
    wgrad: WeightGradient | None = None,
    transposed: bool = False,
    site: str = "",
) -> Tensor:
    """Return `F.linear(x, weight, bias)`; `transposed` for a weight stored as [in, out]. See the module for the hooks."""
    regather = whole = None
    if isinstance(x, RegatheredInput):
        regather = x.regather
        if x.shard is None:
            x = x.x
        else:
            whole, x = x.x, x.shard
    if not torch.is_grad_enabled():
        return F.linear(x if whole is None else whole, weight.t() if transposed else weight, bias)
    hidden = weight if wgrad is not None and weight.requires_grad else None
    wants_input_grad = x.requires_grad
    if hidden is not None and not wants_input_grad:
        # Autograd calls our backward only if one of the inputs that it sees needs a gradient.
        x = x.detach().requires_grad_()
    visible = weight if hidden is None else None
    hooks = _Hooks(hidden, wants_input_grad, overlap, wgrad, regather, whole is not None, transposed, site)
    return _Linear.apply(x, whole, visible, bias, hooks)  # type: ignore[no-any-return, no-untyped-call]


class _Hooks(NamedTuple):
    """`hidden` is the weight, where autograd must not see it; `reduces`: backward reduce-scatters the input's gradient."""

    hidden: Tensor | None
    wants_input_grad: bool
    overlap: Group | None
    wgrad: WeightGradient | None
    regather: Regather | None
    reduces: bool
    is_transposed: bool
    site: str


class _Linear(torch.autograd.Function):
    """`x` is the input. Where `whole` is given, that is the input, and `x` its shard, which gets the gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, whole: Tensor | None, weight: Tensor | None, bias: Tensor | None, hooks: _Hooks
    ) -> Tensor:
        x = x if whole is None else whole
        ctx.hooks, ctx.shape = hooks, x.shape
        ctx.wants_weight_grad = hooks.hidden is not None or ctx.needs_input_grad[2]
        used: Tensor = hooks.hidden if weight is None else weight  # type: ignore[assignment]
        saved = x if ctx.wants_weight_grad and hooks.regather is None else None
        ctx.save_for_backward(saved, used)
        return F.linear(x, used.t() if hooks.is_transposed else used, bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, Tensor | None, Tensor | None, None]:
        hooks: _Hooks = ctx.hooks
        x, weight = ctx.saved_tensors
        # A deferred GEMM gathers at its W: started here, the whole value would be held until then.
        if hooks.regather is not None and ctx.wants_weight_grad and not isinstance(hooks.wgrad, Deferred):
            hooks.regather.start()
        input_grad = weight_grad = bias_grad = pending = None
        if hooks.wants_input_grad:
            # dL/dx = dL/dy w, communicated while dL/dw = (dL/dy)^T x is computed.
            input_grad = (_rows(grad) @ (weight.t() if hooks.is_transposed else weight)).view(ctx.shape)
            if hooks.overlap is not None:
                pending = hooks.overlap.all_reduce_start(input_grad, f"{hooks.site} backward")
            elif hooks.reduces:
                pending = hooks.regather.reduce_start(input_grad)  # type: ignore[union-attr]
        if ctx.wants_weight_grad:
            # The leaf itself, which identifies the gradient: saved-tensor hooks return another tensor.
            leaf = weight if hooks.hidden is None else hooks.hidden
            gemm = WeightGemm(leaf, hooks.regather or x, grad, hooks.is_transposed)
            if hooks.hidden is None:
                weight_grad = torch.mm(*gemm.factors())
            else:
                hooks.wgrad(gemm)  # type: ignore[misc]
        if ctx.needs_input_grad[3]:
            bias_grad = _rows(grad).sum(0)
        if pending is not None:
            input_grad = pending.wait()
        return input_grad, None, weight_grad, bias_grad, None


def all_gather_again(
    x: Tensor,
    group: Group,
    dim: int,
    blocks: Outer = 1,
    *,
    gemms: int = 1,
    overlap: bool = False,
    site: str = "",
) -> RegatheredInput:
    """Gather the shard `x` (S -> R) for `rt.linear` only; `gemms` counts the GEMMs whose weight has a gradient.

    Forward: all-gather. Backward: all-gather again, reduce-scatter. See `s_to_r` for `dim` and `blocks`. With `overlap` the
    shards are gathered again while the input's gradient is computed; with one GEMM as well, which promises that no other
    GEMM reads the value, the GEMM reduce-scatters this gradient itself while the weight's gradient is computed.
    """
    # Nothing would be saved, so nothing has to be gathered again.
    if group.size == 1 or not gemms or not torch.is_grad_enabled():
        return RegatheredInput(s_to_r(x, group, dim, blocks, site=site), None)
    regather = Regather(x, group, dim, blocks, gemms, site, overlap)
    if overlap and gemms == 1:
        # Not s_to_r: autograd would wait for its reduce-scatter, while `rt.linear` starts one asynchronously.
        return RegatheredInput(gather(x.detach(), group, dim, blocks, site=site), regather, x)
    return RegatheredInput(s_to_r(x, group, dim, blocks, site=site), regather)


class RegatheredInput:
    """The whole value `x` of the forward, and `regather`, which makes it again in backward (None: x itself is saved).

    `shard` is set where a single GEMM uses `x` and reduces the gradient itself: it receives this gradient.
    """

    def __init__(self, x: Tensor, regather: Regather | None, shard: Tensor | None = None) -> None:
        self.x, self.regather, self.shard = x, regather, shard

    def reshape(self, *sizes: int) -> RegatheredInput:
        """Fold the leading dims, as `Tensor.reshape` does."""
        return RegatheredInput(self.x.reshape(*sizes), self.regather, self.shard)


class Regather:
    """The gather of one backward: done at the first of `uses` calls of `take`, its result freed at the last.

    With `overlap`, the first `start` begins the gather, so that it overlaps other work.
    """

    def __init__(
        self,
        shard: Tensor,
        group: Group,
        dim: int,
        blocks: Outer,
        uses: int,
        site: str,
        overlap: bool = False,
    ) -> None:
        # Detached: the second gather needs the values only, and must not keep the graph before it alive.
        self._shard, self._group, self._split, self._site = shard.detach(), group, (dim, blocks), site
        self._uses_left, self._overlap = uses, overlap
        self._pending: Pending | None = None
        self._whole: Tensor | None = None

    def start(self) -> None:
        """Announce that `take` will be called soon."""
        if self._overlap and self._whole is None and self._pending is None:
            self._pending = gather_start(
                self._shard, self._group, *self._split, site=f"{self._site} backward"
            )

    def take(self) -> Tensor:
        """Return the whole value; each use calls this once."""
        if not self._uses_left:
            raise InternalError(self._site, "is gathered again by more GEMMs than were counted")
        if self._pending is not None:
            self._whole, self._pending = self._pending.wait(), None
        elif self._whole is None:
            self._whole = gather(self._shard, self._group, *self._split, site=f"{self._site} backward")
        self._uses_left -= 1
        # The caller's reference is then the last one: its GEMM frees the value.
        whole = self._whole
        if not self._uses_left:
            self._whole = None
        return whole

    def reduce_start(self, grad: Tensor) -> Pending:
        """Start the reduce-scatter of the whole value's gradient, whose leading dims may be folded."""
        # `rt.linear` computes in matrices [rows, h]: back to the dims in which the shard was cut.
        sizes = list(self._shard.shape)
        sizes[self._split[0]] *= self._group.size
        return scatter_start(grad.view(sizes), self._group, *self._split, site=f"{self._site} backward")


def _rows(x: Tensor) -> Tensor:
    """View [..., n] as a matrix [rows, n]."""
    return x.reshape(-1, x.shape[-1])
