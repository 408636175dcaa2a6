"""Models that keep state, share memory, or lose something in tracing: right numbers, or one clear error before the start."""

from __future__ import annotations

import collections
import itertools
import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import autoptd
from autoptd.errors import PlanError, TraceError

IDS = torch.randint(0, 32, (8, 6), generator=torch.Generator().manual_seed(0))
MESH: dict[str, Any] = {"d": 2, "backend": "local"}


class Model(nn.Module):
    """A table and a matrix; `forward` is the test's."""

    def __init__(self, forward: Callable[..., Tensor], **attributes: Any) -> None:
        super().__init__()
        self.emb, self.head = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self._forward = forward
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forward(self, *args, **kwargs)


def token_loss(self: Any, x: Tensor) -> Tensor:
    return F.cross_entropy(self.head(torch.tanh(self.emb(x))).flatten(0, 1), x.flatten())


def trained(model: nn.Module, *args: Any, steps: int = 3, mesh: dict[str, Any] = MESH, **kwargs: Any) -> None:
    """Train model and ParallelModel side by side in float64; every loss and every parameter must be equal."""
    model = model.double()
    example = kwargs or args
    theirs = torch.optim.SGD(model.parameters(), lr=0.1)
    pm = autoptd.parallelize(model, **mesh, example_inputs=example)
    try:
        ours = pm.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(steps):
            loss = model(*args, **kwargs)
            loss.backward()
            assert torch.allclose(pm.step(*args, **kwargs), loss.detach(), rtol=1e-12)
            for one in (theirs, ours):
                one.step()
                one.zero_grad()
        state = pm.state_dict()
        for name, one in model.named_parameters():
            assert torch.allclose(state[name], one.detach(), rtol=1e-9, atol=1e-12), name
    finally:
        pm.close()


def refused(model: nn.Module, *args: Any, match: str, **keywords: Any) -> None:
    """One clear error, from parallelize and from verify alike, which leaves the model as it was."""
    for run in (autoptd.parallelize, autoptd.verify):
        with pytest.raises((TraceError, PlanError), match=match):
            run(model, **{**MESH, **keywords}, example_inputs=args)


# Memory that parameters share.


def tied_by_storage() -> nn.Module:
    model = Model(token_loss)
    model.head.weight.data = model.emb.weight.data
    return model


def overlapping_views() -> nn.Module:
    flat, model = torch.randn(700), Model(token_loss)
    model.emb.weight, model.head.weight = (nn.Parameter(flat[at : at + 512].view(32, 16)) for at in (0, 100))
    return model


def interleaved_overlap() -> nn.Module:
    table, model = torch.randn(32, 24), Model(token_loss)
    model.emb.weight, model.head.weight = nn.Parameter(table[:, :16]), nn.Parameter(table[:, 8:])
    return model


def buffer_of_a_parameter() -> nn.Module:
    model = Model(lambda self, x: token_loss(self, x) + F.mse_loss(self.emb(x), self.targets[x]))
    model.register_buffer("targets", model.emb.weight.data)
    return model


def attribute_of_a_parameter() -> nn.Module:
    model = Model(lambda self, x: token_loss(self, x) + F.mse_loss(self.emb(x), self.targets[x]))
    model.targets = model.emb.weight.detach()
    return model


def listed_view_of_a_parameter() -> nn.Module:
    model = Model(lambda self, x: token_loss(self, x) + F.mse_loss(self.emb(x), self.targets["table"][x]))
    model.targets = {"table": model.emb.weight.data[:]}
    return model


@pytest.mark.parametrize(
    ("make", "names"),
    [
        (tied_by_storage, "head.weight.*emb.weight"),
        (overlapping_views, "head.weight.*emb.weight"),
        (interleaved_overlap, "head.weight.*emb.weight"),
        (buffer_of_a_parameter, "targets.*emb.weight"),
        (attribute_of_a_parameter, "targets.*emb.weight"),
        (listed_view_of_a_parameter, "targets.*table.*emb.weight"),
    ],
)
def test_shared_memory_is_refused(make: Callable[[], nn.Module], names: str) -> None:
    refused(make(), IDS, match=names)


def test_memory_side_by_side_is_not_shared() -> None:
    flat, model = torch.randn(1024, dtype=torch.float64), Model(token_loss)
    model.emb.weight, model.head.weight = (nn.Parameter(flat[at : at + 512].view(32, 16)) for at in (0, 512))
    table = torch.randn(32, 32, dtype=torch.float64)
    columns = Model(token_loss)
    columns.emb.weight, columns.head.weight = nn.Parameter(table[:, :16]), nn.Parameter(table[:, 16:])
    trained(model, IDS)
    trained(columns, IDS)


def test_frozen_views_of_one_memory_are_one_parameter() -> None:
    model = tied_by_storage().requires_grad_(False)
    model.scale = nn.Parameter(torch.ones(16))
    model._forward = lambda self, x: F.cross_entropy(
        self.head(self.emb(x) * self.scale).flatten(0, 1), x.flatten()
    )
    program = autoptd.compile(model, d=2, example_inputs=(IDS,))
    assert ("emb.weight", "head.weight") in [spec.aliases for spec in program.params]


# Python state.


class ByClass(nn.Linear):
    calls = 0


STEPS = 0


def counts_in_a_global(self: Any, x: Tensor) -> Tensor:
    global STEPS
    STEPS += 1
    return token_loss(self, x) * (1.0 if STEPS < 50 else 2.0)


def counts_unless_traced(self: Any, x: Tensor) -> Tensor:
    if not torch.compiler.is_compiling():
        self.calls += 1
    return token_loss(self, x) * (1.0 if self.calls < 50 else 2.0)


def counted(name: str, count: Callable[[Any], Any], **attributes: Any) -> Any:
    def forward(self: Any, x: Tensor) -> Tensor:
        count(self)
        return token_loss(self, x)

    return pytest.param(forward, attributes, id=name)


class Holder:
    def __init__(self) -> None:
        self.step, self.history = 0, collections.deque([1.0], maxlen=3)


class Slots:
    __slots__ = ("n",)

    def __init__(self) -> None:
        self.n = 0


def add_one(holder: Any, name: str) -> None:
    setattr(holder, name, getattr(holder, name) + 1)
    # Read: what only counts is a warning.
    assert getattr(holder, name) < 1000


STATE = [
    counted("a number", lambda self: add_one(self, "calls"), calls=0),
    counted("a submodule's", lambda self: add_one(self.head, "in_features")),
    counted("a container's", lambda self: self.seen.append(len(self.seen)), seen=[]),
    counted(
        "a nested dict's",
        lambda self: self.cfg["a"].update(n=(self.cfg["a"]["n"] + 1) % 99),
        cfg={"a": {"n": 0}},
    ),
    counted("an object's", lambda self: add_one(self.holder, "step"), holder=Holder()),
    counted(
        "a deque of an object",
        lambda self: self.holder.history.append(self.holder.history[-1] * 2),
        holder=Holder(),
    ),
    counted("slots", lambda self: add_one(self.holder, "n"), holder=Slots()),
    counted("a set", lambda self: self.seen.add(len(self.seen)), seen=set()),
    counted("a class's", lambda self: add_one(type(self.extra), "calls"), extra=ByClass(2, 2)),
    counted("itertools", lambda self: next(self.numbers), numbers=itertools.count()),
    counted("a switch", lambda self: setattr(self, "odd", not self.odd), odd=False),
    counted("random", lambda self: random.random()),
    counted("its own random", lambda self: self.draw.random(), draw=random.Random(0)),
    pytest.param(counts_in_a_global, {}, id="a global"),
    pytest.param(counts_unless_traced, {"calls": 0}, id="where it is not traced"),
]


@pytest.mark.parametrize(("forward", "attributes"), STATE)
def test_python_state_is_refused(forward: Callable[..., Tensor], attributes: dict[str, Any]) -> None:
    refused(Model(forward, **attributes), IDS, match=r"(changed|taken from) by the forward|draws from")


def test_counters_around_the_forward_are_refused() -> None:
    calls = {"n": 0}

    class Closed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.emb, self.head = nn.Embedding(32, 16), nn.Linear(16, 32)

        def forward(self, x: Tensor) -> Tensor:
            calls["n"] += 1
            return token_loss(self, x) * (1.0 if calls["n"] < 50 else 2.0)

    refused(Closed(), IDS, match=r"calls\['n'\] \(test_trace.py:\d+\): is changed by the forward")
    hooked = Model(token_loss)
    hooked.head.register_forward_pre_hook(lambda module, args: calls.update(n=(calls["n"] + 1) % 99))
    refused(hooked, IDS, match=r"calls\['n'\] \(test_trace.py:\d+\): is changed by the forward")


def test_numpy_random_is_refused() -> None:
    numpy = pytest.importorskip("numpy")
    for draw in (numpy.random.rand, numpy.random.default_rng(0).random):
        forward = lambda self, x: token_loss(self, x) * (1.0 if self.draw() >= 0.0 else 2.0)  # noqa: E731
        model = Model(forward, draw=draw)
        refused(model, IDS, match="changed by the forward|draws from")


def test_layerdrop_of_python_is_refused_whatever_is_drawn() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return token_loss(self, x) * (2.0 if random.random() < 0.02 else 1.0)

    random.seed(4)
    refused(Model(forward), IDS, match="Python's random module")


def test_a_counter_of_the_loss_function_is_refused() -> None:
    calls = 0

    def loss_fn(output: Tensor, targets: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return output.mean() * (1.0 if calls < 50 else 2.0)

    model = Model(lambda self, x: self.head(self.emb(x)))
    with pytest.raises(TraceError, match=r"loss_fn\.calls"):
        autoptd.parallelize(model, loss_fn=loss_fn, **MESH, example_inputs={"x": IDS, "targets": IDS})


def test_a_tensor_that_is_read_and_replaced_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.emb(x)
        self.mean = 0.9 * self.mean + 0.1 * h.detach().mean()
        return (h - self.mean).square().mean()

    refused(Model(forward, mean=torch.zeros(())), IDS, match="mean: a tensor attribute")


@pytest.mark.parametrize("seed", range(4))
def test_what_the_first_batch_sets_for_ever_is_refused(seed: int) -> None:
    """Wherever in the batch its largest entry is."""
    torch.manual_seed(seed)

    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.emb(x)
        if not self.is_set:
            self.scale, self.is_set = h.detach().abs().amax(), True
        return self.head(h / self.scale).square().mean()

    # It is made of the weights as well.
    refused(
        Model(forward, is_set=False),
        IDS,
        match="(changed|computed from the weights once, and kept,) by the forward",
        d=1,
    )


# What looks like state and is none.


def lazy_mask(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "_mask"):
        self._mask = torch.tril(torch.ones(6, 6, dtype=torch.bool))
    h = self.emb(x)
    scores = (h @ h.transpose(1, 2)).masked_fill(~self._mask, float("-inf"))
    return self.head(scores.softmax(-1) @ h).square().mean()


def cache_by_length(self: Any, x: Tensor) -> Tensor:
    if x.shape[1] not in self.tables:
        self.tables[x.shape[1]] = torch.arange(x.shape[1], dtype=torch.float64).sin()[:, None]
    return self.head(self.emb(x) + self.tables[x.shape[1]]).square().mean()


def sizes_of_the_call(self: Any, x: Tensor) -> Tensor:
    self.batch, self.length = x.shape
    self.last = self.emb(x)
    return self.head(self.last).square().mean() * self.length


def lazy_buffer(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "table"):
        self.register_buffer("table", torch.arange(16, dtype=torch.float64), persistent=False)
    return self.head(self.emb(x) * self.table).square().mean()


@pytest.mark.parametrize(
    ("forward", "attributes"),
    [
        (lazy_mask, {}),
        (cache_by_length, {"tables": {}}),
        (sizes_of_the_call, {"last": None}),
        (lazy_buffer, {}),
    ],
)
def test_caches_are_no_state(forward: Callable[..., Tensor], attributes: dict[str, Any]) -> None:
    model = Model(forward, **attributes)
    before = {name: value for name, value in vars(model).items() if not name.startswith("_")}
    autoptd.parallelize(model.double(), **MESH, example_inputs=(IDS,)).close()
    assert {name: value for name, value in vars(model).items() if not name.startswith("_")} == before
    trained(model, IDS)


def test_a_tensor_attribute_in_float32_is_verified() -> None:
    model = Model(lambda self, x: self.head(self.emb(x) @ self.mix).square().mean(), mix=torch.randn(16, 16))
    autoptd.verify(model, t=2, d=2, example_inputs=(IDS,), steps=2)


# Parameters that are read but not registered.

GLOBAL = nn.Parameter(torch.ones(16))


def test_parameters_that_are_not_registered_are_refused() -> None:
    listed = Model(lambda self, x: self.head(self.emb(x) * self.scales[0]).square().mean())
    listed.scales = [nn.Parameter(torch.ones(16))]
    refused(listed, IDS, match=r"scales\[0\].*not a registered parameter")
    of_file = Model(lambda self, x: self.head(self.emb(x) * GLOBAL).square().mean())
    refused(of_file, IDS, match=r"a parameter of shape \(16,\).*test_trace.py.*not a registered parameter")


def test_a_registered_parameter_that_is_read_from_a_list_is_refused() -> None:
    model = Model(lambda self, x: token_loss(self, x) + self.listed[0].square().sum())
    model.listed = list(model.parameters())
    refused(model, IDS, match="emb.weight: is read from a list")


def test_parameters_of_a_loss_function_are_refused() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.t = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, targets: Tensor) -> Tensor:
            return (output * self.t).mean()

    owner = Scaled()
    model = Model(lambda self, x: self.head(self.emb(x)))
    for loss_fn, match in (
        (owner, "loss_fn.*parameters .t."),
        (lambda h, _: h.mean() * owner.t, "not a registered parameter"),
    ):
        with pytest.raises(TraceError, match=match):
            autoptd.parallelize(model, loss_fn=loss_fn, **MESH, example_inputs={"x": IDS, "targets": IDS})


def test_a_loss_function_may_read_the_models_parameters() -> None:
    model = Model(lambda self, x: self.head(self.emb(x))).double()
    pm = autoptd.parallelize(
        model,
        loss_fn=lambda h, targets: h.square().mean() + model.emb.weight.square().sum(),
        **MESH,
        example_inputs={"x": IDS, "targets": IDS},
    )
    with torch.no_grad():
        wanted = model(IDS).square().mean() + model.emb.weight.square().sum()
    assert torch.allclose(pm.step(x=IDS, targets=IDS), wanted)
    pm.close()


# State of a custom backward.


class AuxLoss(torch.autograd.Function):
    scale = 0.0

    @staticmethod
    def forward(ctx: Any, x: Tensor, aux: Tensor) -> Tensor:
        ctx.save_for_backward(aux)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return grad, torch.full_like(ctx.saved_tensors[0], AuxLoss.scale)


def test_a_backward_with_class_state_is_refused() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        h = self.emb(x)
        return self.head(AuxLoss.apply(h, h.square().mean())).square().mean()

    refused(Model(forward), IDS, match="AuxLoss.*AuxLoss.scale")


# What the trace loses is found at the precision of the model.


def hooked(self: Any, x: Tensor) -> Tensor:
    h = self.emb(x) * 1.0
    h.grad_fn.register_hook(lambda gin, gout: (gin[0] * 1.0005, *gin[1:]))  # type: ignore[union-attr]
    return self.head(h).square().mean()


def branches_on_tracing(self: Any, x: Tensor) -> Tensor:
    return token_loss(self, x) * (1.0 if torch.compiler.is_compiling() else 1.0001)


@pytest.mark.parametrize("forward", [hooked, branches_on_tracing])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_small_losses_of_tracing_are_found(forward: Callable[..., Tensor], dtype: torch.dtype) -> None:
    refused(Model(forward).to(dtype), IDS, match="the model give different values")


def test_half_precision_has_room_for_its_last_bit() -> None:
    autoptd.parallelize(Model(token_loss).bfloat16(), **MESH, example_inputs=(IDS,)).close()


@pytest.mark.parametrize("rows", [3, 5])
def test_a_number_that_follows_the_parity_of_the_batch_is_that_of_all_rows(rows: int) -> None:
    model = Model(lambda self, x: (self.emb(x) * (1 + x.shape[0] % 2)).square().mean())
    trained(model, IDS[:rows], mesh={"d": rows, "backend": "local"})


@pytest.mark.parametrize("rows", [3, 7])
def test_odd_batches_of_single_rows_train(rows: int) -> None:
    trained(Model(token_loss), IDS[:rows], mesh={"d": rows, "backend": "local"})


# Activation checkpoints.


class Blocks(nn.Module):
    def __init__(self, **how: Any) -> None:
        super().__init__()
        self.emb, self.how = nn.Embedding(32, 16), how
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 16)) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.emb(x)
        for block in self.blocks:
            h = h + checkpoint(block, h, **self.how)
        return h.square().mean()


def test_checkpoints_with_dropout_are_computed_again() -> None:
    model = Blocks(use_reentrant=False)
    assert autoptd.verify(model, t=2, d=2, example_inputs=(IDS,), steps=2).passed
    for asked, count in ((None, 1), (False, 0)):
        program = autoptd.compile(model, t=2, recompute=asked, example_inputs=(IDS,))
        assert program.sources["stage_0.py"].count("_again(self") == count


def test_checkpoints_that_are_not_honoured_are_named() -> None:
    with pytest.warns(UserWarning, match=r"checkpointing in the model \(blocks.\*\) is not honored"):
        autoptd.compile(Blocks(use_reentrant=False), fuse="inductor", example_inputs=(IDS,))


def test_reentrant_checkpoints_are_refused_with_the_remedy() -> None:
    refused(Blocks(use_reentrant=True), IDS, match="blocks.0: reentrant.*use_reentrant=False")


@pytest.mark.parametrize("is_reentrant", [False, True])
def test_checkpoints_of_transformers(is_reentrant: bool) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "n_positions": 6, "vocab_size": 32, "use_cache": False}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": is_reentrant})
    call = {"input_ids": IDS, "labels": IDS}
    if is_reentrant:
        with pytest.raises(TraceError, match="use_reentrant=False"):
            autoptd.parallelize(model, **MESH, example_inputs=call)
        return
    autoptd.verify(model, p=2, example_inputs=call, steps=2)
    program = autoptd.compile(model, p=2, example_inputs=call)
    assert "self.again(" in program.sources["stage_0.py"]


# The arguments of the call.


def test_constants_may_stand_before_tensors() -> None:
    def forward(self: Any, x: Tensor, mask: Any, scale: float, flags: Any, name: str, y: Tensor) -> Tensor:
        assert mask is None
        assert name == "y"
        return (self.emb(x) - flags["k"] * self.emb(y)).square().mean() * scale

    trained(Model(forward), IDS, None, 2.0, {"flag": True, "k": 3}, "y", IDS.flip(0))


def test_a_temperature_before_the_batch_is_no_batch() -> None:
    def forward(self: Any, temperature: Tensor, x: Tensor) -> Tensor:
        return token_loss(self, x) / temperature.sum()

    trained(Model(forward), torch.full((1,), 2.0, dtype=torch.float64), IDS)
    with pytest.raises(PlanError, match=r"7 rows do not divide over d=2 .*tensor 0 has 1, tensor 1 has 7"):
        autoptd.parallelize(Model(forward), **MESH, example_inputs=(torch.ones(1), IDS[:7]))


# Values that become Python numbers.


def by_item(self: Any, x: Tensor) -> Tensor:
    return token_loss(self, x) * self.head.weight.max().item()


def by_int(self: Any, x: Tensor) -> Tensor:
    return token_loss(self, x) * int(x.max())


def by_float(self: Any, x: Tensor) -> Tensor:
    return token_loss(self, x) * float(self.scale)


def by_list(self: Any, x: Tensor) -> Tensor:
    return token_loss(self, x) * self.scale.tolist()[0]


@pytest.mark.parametrize("forward", [by_item, by_int, by_float, by_list])
def test_values_that_become_python_numbers_are_refused(forward: Callable[..., Tensor]) -> None:
    model = Model(forward)
    model.register_buffer("scale", torch.ones(1))
    refused(model, IDS, match="test_trace.py.*becomes a Python number")


@pytest.mark.parametrize(
    "read",
    [
        lambda w, i: w[i],
        lambda w, i: w[1, i],
        lambda w, i: w[:, i],
        lambda w, i: w[..., i],
        lambda w, i: w[None, ..., i],
        lambda w, i: w[i, 1:5],
        lambda w, i: w[i][None, 2:],
    ],
)
def test_an_index_of_one_position_is_a_gather(read: Callable[[Tensor, Tensor], Tensor]) -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        return (
            token_loss(self, x) + read(self.head.weight, self.head.weight[:, 0].argmax() % 16).square().sum()
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trained(Model(forward), IDS)
