"""The casts of `torch.autocast` in a trace: which operators are cast, and to what; regions; what is shared."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autoptd import trace
from autoptd.compat import enable_python_dispatcher
from autoptd.errors import TraceError
from autoptd.ir.notes import note, op_name, ops, placeholders, value
from autoptd.trace.autocast import Autocast, Casting, CastingMode
from autoptd.trace.differences import Reference
from autoptd.trace.faithful import compare, run_graph

BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CPU, CUDA = (Autocast(device, BF16) for device in ("cpu", "cuda"))
IDS = torch.arange(8).reshape(2, 4)


def x(*sizes: int, dtype: torch.dtype = F32) -> Tensor:
    """Positive numbers below 1, which every operator below takes."""
    count = torch.Size(sizes).numel()
    return (torch.arange(1, count + 1) / (count + 2)).reshape(sizes).to(dtype)


def low(*sizes: int) -> Tensor:
    return x(*sizes, dtype=BF16)


def labels(rows: int) -> Tensor:
    return torch.arange(rows) % 3


# {name: (a call, the dtype of its result under autocast on the CPU, and on CUDA)}: torch's documentation of autocast
# lists the operators.
Call = Callable[[], Any]
CALLS: dict[str, tuple[Call, torch.dtype, torch.dtype]] = {
    "linear": (lambda: F.linear(x(2, 3, 4), x(5, 4), x(5)), BF16, BF16),
    "matmul": (lambda: x(2, 3, 4) @ x(4, 5), BF16, BF16),
    "mm": (lambda: torch.mm(x(3, 4), x(4, 5)), BF16, BF16),
    "bmm": (lambda: torch.bmm(x(2, 3, 4), x(2, 4, 5)), BF16, BF16),
    "addmm": (lambda: torch.addmm(x(3, 5), x(3, 4), x(4, 5)), BF16, BF16),
    "baddbmm": (lambda: torch.baddbmm(x(2, 3, 5), x(2, 3, 4), x(2, 4, 5)), BF16, BF16),
    "addbmm": (lambda: torch.addbmm(x(3, 5), x(2, 3, 4), x(2, 4, 5)), BF16, BF16),
    "mv": (lambda: torch.mv(x(3, 4), x(4)), F32, BF16),
    "einsum": (lambda: torch.einsum("bsi,io->bso", x(2, 3, 4), x(4, 5)), BF16, BF16),
    "conv1d": (lambda: F.conv1d(x(2, 4, 8), x(6, 4, 3), x(6)), BF16, BF16),
    "conv2d": (lambda: F.conv2d(x(2, 4, 8, 8), x(6, 4, 3, 3)), BF16, BF16),
    "conv_transpose1d": (lambda: F.conv_transpose1d(x(2, 4, 8), x(4, 6, 3)), BF16, BF16),
    "prelu": (lambda: F.prelu(x(2, 4), x(4)), BF16, BF16),
    "attention": (lambda: F.scaled_dot_product_attention(*[x(2, 2, 4, 8)] * 3), BF16, BF16),
    "exp": (lambda: low(3).exp(), BF16, F32),
    "log": (lambda: low(3).log(), BF16, F32),
    "log1p": (lambda: low(3).log1p(), BF16, F32),
    "pow": (lambda: low(3) ** 2, BF16, F32),
    "rsqrt": (lambda: low(3).rsqrt(), BF16, F32),
    "reciprocal": (lambda: low(3).reciprocal(), BF16, F32),
    "tan": (lambda: low(3).tan(), BF16, F32),
    "softplus": (lambda: F.softplus(low(3)), BF16, F32),
    "softmax": (lambda: low(2, 3).softmax(-1), BF16, F32),
    "log_softmax": (lambda: low(2, 3).log_softmax(-1), BF16, F32),
    "layer_norm": (lambda: F.layer_norm(low(2, 4), [4], x(4), x(4)), BF16, F32),
    "rms_norm": (lambda: F.rms_norm(low(2, 4), [4], x(4)), BF16, F32),
    "group_norm": (lambda: F.group_norm(low(2, 4), 2, low(4), low(4)), BF16, F32),
    "sum": (lambda: low(2, 3).sum(), BF16, F32),
    "sum of a dim": (lambda: low(2, 3).sum(-1), BF16, F32),
    "mean": (lambda: low(2, 3).mean(-1), BF16, BF16),
    "prod": (lambda: low(2, 3).prod(-1), F32, F32),
    "cumsum": (lambda: low(2, 3).cumsum(-1), BF16, F32),
    "cumprod": (lambda: low(2, 3).cumprod(-1), BF16, F32),
    "norm": (lambda: torch.linalg.vector_norm(low(2, 3), dim=-1), BF16, F32),
    "logsumexp": (lambda: low(2, 3).logsumexp(-1), BF16, F32),
    "cosine_similarity": (lambda: F.cosine_similarity(low(2, 3), low(2, 3)), BF16, F32),
    "cross_entropy": (lambda: F.cross_entropy(low(4, 3), labels(4)), F32, F32),
    "nll_loss": (lambda: F.nll_loss(low(4, 3), labels(4)), F32, F32),
    "mse_loss": (lambda: F.mse_loss(low(4), low(4)), F32, F32),
    "l1_loss": (lambda: F.l1_loss(low(4), low(4)), F32, F32),
    "smooth_l1_loss": (lambda: F.smooth_l1_loss(low(4), low(4)), F32, F32),
    "huber_loss": (lambda: F.huber_loss(low(4), low(4)), F32, F32),
    "kl_div": (lambda: F.kl_div(low(4), low(4), reduction="sum"), F32, F32),
    "bce": (lambda: F.binary_cross_entropy_with_logits(low(4), low(4)), F32, F32),
    "cat": (lambda: torch.cat([x(2, 3), low(2, 3)]), F32, F32),
    "stack": (lambda: torch.stack([x(2, 3), low(2, 3)]), F32, F32),
    "addcmul": (lambda: torch.addcmul(x(3), low(3), low(3)), F32, F32),
    "add": (lambda: x(3) + low(3), F32, F32),
    "gelu": (lambda: F.gelu(low(3)), BF16, BF16),
    "silu": (lambda: F.silu(low(3)), BF16, BF16),
    "relu": (lambda: low(3).relu(), BF16, BF16),
    "tanh": (lambda: low(3).tanh(), BF16, BF16),
    "embedding": (lambda: F.embedding(labels(4), x(3, 4)), F32, F32),
    "where": (lambda: torch.where(x(3) > 0.5, low(3), low(3)), BF16, BF16),
    "float64": (lambda: F.linear(x(2, 4).double(), x(5, 4).double()), F64, F64),
}


def with_casts(device_type: str, call: Call) -> Tensor:
    """Call with the casts of a device type, while torch's own autocast is off."""
    always: Any = SimpleNamespace(dtype_now=BF16, device_type=device_type)
    with enable_python_dispatcher(), CastingMode(Casting(always)):
        return call()  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", CALLS)
def test_casts_are_those_of_autocast(name: str) -> None:
    """To the bit what torch computes on the CPU; on CUDA by what torch's documentation says."""
    call, on_cpu, on_cuda = CALLS[name]
    with torch.autocast("cpu", BF16):
        wanted = call()
    found = with_casts("cpu", call)
    assert found.dtype == wanted.dtype == on_cpu and torch.equal(found, wanted)
    assert with_casts("cuda", call).dtype == on_cuda


def test_an_operator_that_casts_within_itself_is_float32() -> None:
    """torch's GRU under autocast has products in bf16 and gates in float32."""
    layer = nn.GRU(4, 4)
    with torch.autocast("cpu", BF16):
        wanted = layer(x(3, 2, 4))[0]
    found = with_casts("cpu", lambda: layer(x(3, 2, 4))[0])
    assert found.dtype == wanted.dtype == F32
    torch.testing.assert_close(found, wanted, rtol=0.02, atol=0.02)


def test_what_torch_itself_refuses_is_one_error() -> None:
    """The CPU's list lacks scatter_add, which takes no operands of two dtypes; on CUDA they are cast to the widest."""

    def scatter() -> Tensor:
        return torch.scatter_add(x(4), 0, labels(4), low(4))

    with pytest.raises(TraceError, match="cannot be run under autocast on cpu"):
        with_casts("cpu", scatter)
    assert with_casts("cuda", scatter).dtype == F32


class Net(nn.Module):
    """Embedding and head are tied; `forward` gets the module and hidden states."""

    def __init__(self, forward: Callable[[Net, Tensor], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.first, self.second = nn.Embedding(8, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.LayerNorm(6)
        self.called = forward

    def forward(self, ids: Tensor) -> Tensor:
        hidden = self.called(self, self.embed(ids))
        logits = F.linear(hidden, self.embed.weight)
        return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def plain(self: Net, hidden: Tensor) -> Tensor:
    return self.second(self.norm(self.first(hidden)))  # type: ignore[no-any-return]


def reads_a_dtype(self: Net, hidden: Tensor) -> Tensor:
    found = self.first(hidden)
    return self.second(found.float().softmax(-1).to(found.dtype))  # type: ignore[no-any-return]


def with_a_region_off(self: Net, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, enabled=False):
        hidden = self.first(hidden)
    return self.second(hidden) * hidden  # type: ignore[no-any-return]


def with_a_region_on(self: Net, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, torch.float16):
        hidden = self.first(hidden)
    return self.second(hidden.float())  # type: ignore[no-any-return]


def reads_one_twice(self: Net, hidden: Tensor) -> Tensor:
    return self.first(self.first(hidden))  # type: ignore[no-any-return]


def without_grad(self: Net, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        seen = self.first(hidden)
    return self.second(hidden) + seen  # type: ignore[no-any-return]


def island(self: Net, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, BF16):
        hidden = self.first(hidden)
        with torch.autocast(hidden.device.type, enabled=False):
            hidden = hidden.float().softmax(-1)
        hidden = self.second(hidden)
    return hidden.float()


def table_without_grad(self: Net, hidden: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast(hidden.device.type, enabled=False):
        table = hidden.sin()
    return self.first(hidden) + table  # type: ignore[no-any-return]


def without_grad_in_a_region(self: Net, hidden: Tensor) -> Tensor:
    with torch.autocast(hidden.device.type, BF16, enabled=hidden.dtype == F32):
        with torch.no_grad():
            seen = self.second(hidden) * 0.003
        hidden = self.first(hidden) + seen
    return hidden.float()


def with_grad_in_a_region_without(self: Net, hidden: Tensor) -> Tensor:
    with torch.no_grad():
        seen = self.second(hidden) * 0.003
        with torch.enable_grad():
            hidden = self.first(hidden).sin() + seen
    return self.second(hidden).float()


MADE = (plain, reads_a_dtype, reads_one_twice, without_grad)
MADE += (without_grad_in_a_region, with_grad_in_a_region_without)
MADE += (with_a_region_off, with_a_region_on, island, table_without_grad)
FORWARDS = {made.__name__: made for made in MADE}


@pytest.mark.parametrize("dtype", [None, BF16, torch.float16], ids=str)
@pytest.mark.parametrize("forward", FORWARDS)
def test_a_trace_computes_what_the_model_does_under_autocast(forward: str, dtype: torch.dtype | None) -> None:
    model, autocast = Net(FORWARDS[forward]), Autocast("cpu", dtype)
    found = trace.capture(model, (IDS,), {}, None, autocast)
    parameters = dict(model.named_parameters())
    with autocast.around():
        loss = model(IDS)
    wanted = Reference(loss, parameters, share=1e-3)
    ours, leaves, _ = run_graph(found.graph, parameters, found.buffers, [IDS])
    assert max(wanted.differences(ours, leaves).values()) == 0.0


@pytest.mark.parametrize("forward", FORWARDS)
def test_a_second_trace_casts_as_the_first(forward: str) -> None:
    model = Net(FORWARDS[forward])
    first = trace.capture(model, (IDS,), {}, None, CPU)
    again = trace.capture_again(first, model, (IDS.repeat(3, 1),), {}, None, CPU)
    assert [value(node).dtype for node in ops(again)] == [value(node).dtype for node in ops(first.graph)]


def test_what_is_read_in_16_bits_alone_is_cast_once() -> None:
    found = trace.capture(Net(plain), (IDS,), {}, None, CPU).graph
    dtypes = {note(node).name: value(node).dtype for node in placeholders(found, "param")}
    assert dtypes["first.weight"] == dtypes["second.bias"] == BF16
    # Read by the embedding, and cast for the head; CPU's norms take what comes.
    assert dtypes["embed.weight"] == dtypes["norm.weight"] == F32
    # What the first layer reads, the head's weight, the logits.
    assert len([node for node in ops(found) if op_name(node) == "aten.to"]) == 3


def test_what_depends_on_values_is_said_as_without_autocast() -> None:
    model = Net(lambda self, hidden: self.first(hidden) * self.first.weight.sum().item())
    with pytest.raises(TraceError, match="becomes a Python number"):
        trace.capture(model, (IDS,), {}, None, CPU)


def test_a_small_wrong_gradient_is_found() -> None:
    """Twice what it should be, and a fiftieth of the largest: rounding to 16 bits must not hide it."""
    model = Net(lambda self, hidden: self.first(hidden) + 0.02 * self.second(hidden))
    found = trace.capture(model, (IDS,), {}, None, CPU)
    compare(model, None, found.graph, found.buffers, (IDS,), {}, CPU)
    scaled = next(node for node in ops(found.graph) if op_name(node) == "aten.mul")
    scaled.args = (scaled.args[0], 0.04)
    with pytest.raises(TraceError, match="gradient of"):
        compare(model, None, found.graph, found.buffers, (IDS,), {}, CPU)
