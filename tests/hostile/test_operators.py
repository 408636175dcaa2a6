"""Operators of every kind over microbatches, replicas, tensor ranks and stages: the model's numbers, or one clear error."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_ as clip

import autoptd
from autoptd.errors import PlanError
from autoptd.ir.operators.record import Link, Member, Operator
from autoptd.ir.operators.table import TABLE
from tests.hostile.against_torch import assert_near, assert_parity, refusal

Head = Callable[["Body", Tensor, Tensor], Tensor]
MESHES: list[dict[str, Any]] = [
    {"num_microbatches": 4},
    {"d": 2, "num_microbatches": 4},  # one row in every microbatch
    {"t": 2, "d": 2, "num_microbatches": 2},
    {"t": 2, "p": 2, "num_microbatches": 2},
]


class Body(nn.Module):
    """Hidden states [b, 6, 16] of ids, and a head that makes the loss of them and of labels [b] in 0 ... 5."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.head, self.emb = head, nn.Embedding(32, 16)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)
        )
        self.w, self.c, self.bias = (
            nn.Parameter(torch.randn(16)),
            nn.Parameter(torch.randn(())),
            nn.Parameter(torch.randn(16)),
        )
        self.square = nn.Parameter(0.3 * torch.randn(16, 16))
        self.bn = nn.BatchNorm1d(16).eval()
        self.bn.running_mean.normal_(), self.bn.running_var.uniform_(0.5, 2.0)
        self.gru = nn.GRU(16, 5, 2, batch_first=True)
        self.lstm = nn.LSTM(16, 5, 3, batch_first=True, bidirectional=True, proj_size=3)
        self.rnn = nn.RNN(16, 5)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        h = self.emb(ids)
        for layer in self.layers:
            h = h + layer(h)
        return self.head(self, torch.tanh(h), labels)


def data(seed: int) -> tuple[Tensor, Tensor]:
    source = torch.Generator().manual_seed(seed)
    return torch.randint(0, 32, (8, 6), generator=source), torch.randint(0, 6, (8,), generator=source)


def rows(h: Tensor) -> Tensor:
    return torch.arange(h.shape[0])


def signs(y: Tensor) -> Tensor:
    return (y > 2) * 2.0 - 1.0


def preferred(s: Body, h: Tensor, y: Tensor) -> Tensor:
    rewards = F.linear(h, s.w, s.c)
    return -F.logsigmoid(rewards[:, -1] - rewards[:, 0]).mean()


def two_tokens(s: Body, h: Tensor, y: Tensor) -> Tensor:
    return h[rows(h)[:, None], torch.stack([y, (y + 1) % 6], 1)].square().mean()


def log_probabilities(s: Body, h: Tensor, y: Tensor) -> Tensor:
    return -h.log_softmax(-1)[rows(h)[:, None], torch.arange(6), y[:, None] + torch.arange(6)].mean()


def fourier_mixing(s: Body, h: Tensor, y: Tensor) -> Tensor:
    return (
        (
            torch.fft.fft(torch.fft.fft(h, dim=-1), dim=-2).real
            + torch.fft.rfft(h * s.w, dim=1).abs().sum((1, 2), keepdim=True)
        )
        .square()
        .mean()
    )


VECTORS: dict[str, Head] = {
    "linear": lambda s, h, y: F.linear(h, s.w).mean(),
    "linear with bias": lambda s, h, y: F.linear(h, s.w, s.c).square().mean(),
    "preferences": preferred,
    "matmul right": lambda s, h, y: (h @ s.w).square().mean(),
    "matmul left": lambda s, h, y: (s.w @ h.transpose(1, 2)).square().mean(),
    "mv": lambda s, h, y: torch.mv(h[:, 0], s.w).square().mean(),
    "mv of parameters": lambda s, h, y: torch.mv(s.square, s.w).sum() * h.mean(),
    "dot": lambda s, h, y: torch.dot(s.w, s.bias) * h.mean(),
    "vdot": lambda s, h, y: torch.vdot(s.w, s.bias) * h.mean(),
    "dot over the batch": lambda s, h, y: torch.dot(h[:, 0, 0], h[:, 1, 1]) / 48,
    "einsum": lambda s, h, y: torch.einsum("bsi,i->bs", h, s.w).square().mean(),
    "einsum without an arrow": lambda s, h, y: torch.einsum("bsi,i", h, s.w).square().mean(),
    "einsum of all": lambda s, h, y: torch.einsum("bsi,i->", h, s.w),
    "einsum with dots": lambda s, h, y: torch.einsum("...i,i->...", h, s.w).tanh().mean(),
    "einsum turned": lambda s, h, y: torch.einsum("i,bsi->sb", s.w, h).tanh().mean(),
    "einsum with a number": lambda s, h, y: torch.einsum("bsi,->bsi", h, s.c).tanh().mean(),
    "inner": lambda s, h, y: torch.inner(h, s.w).tanh().mean(),
    "tensordot": lambda s, h, y: torch.tensordot(h, s.w, 1).tanh().mean(),
    "vecdot": lambda s, h, y: torch.linalg.vecdot(h, s.w).tanh().mean(),
    "addmv": lambda s, h, y: torch.addmv(h[:, 1, 1], h[:, 0], s.w).tanh().mean(),
}
AFFINE: dict[str, Head] = {
    "plus": lambda s, h, y: h.square().mean() + 0.5,
    "one minus": lambda s, h, y: 1 - h.square().mean(),
    "minus": lambda s, h, y: h.square().sum() - 3,
    "negative": lambda s, h, y: -h.square().mean() * 2,
    "alpha": lambda s, h, y: torch.add(h.mean(), 2, alpha=3) - torch.rsub(h.mean(), 1, alpha=2),
    "chain": lambda s, h, y: ((1 - h.mean()) * s.c + 0.25) / 3 + s.c,
    "of a vector": lambda s, h, y: (h.sum(0) + 1).sum(),
    "of a stack": lambda s, h, y: torch.stack([h.mean(), 1 - h.mean()]).sum() + 1,
    "view to a scalar": lambda s, h, y: h.mean().view(1).view(()) + s.c.expand(()),
    "reshape to a scalar": lambda s, h, y: h.mean().reshape(1, 1).reshape(()),
}
INDEXED: dict[str, Head] = {
    "last token": lambda s, h, y: h[rows(h), y].square().mean(),
    "from the end": lambda s, h, y: h[rows(h), y - 6].square().mean(),
    "the last": lambda s, h, y: h[rows(h), -1].square().mean(),
    "time first": lambda s, h, y: h.transpose(0, 1)[y, rows(h)].square().mean(),
    "two tokens": two_tokens,
    "log probabilities": log_probabilities,
    "token of the largest": lambda s, h, y: h[rows(h), h[..., 0].argmax(1)].square().mean(),
    "of heads": lambda s, h, y: (
        h.view(h.shape[0], 6, 4, 4)[torch.arange(0, h.shape[0]), y.int()].square().mean()
    ),
}
OTHERS: dict[str, Head] = {
    "batch norm in eval mode": lambda s, h, y: s.bn(h.transpose(1, 2)).square().mean(),
    "batch norm of rows": lambda s, h, y: s.bn(h.flatten(0, 1)).square().mean(),
    "gru": lambda s, h, y: sum(one.square().mean() for one in s.gru(h)),  # type: ignore[return-value]
    "gru with a state": lambda s, h, y: (
        s.gru(h, h[:, :2, :5].transpose(0, 1).contiguous())[0].square().mean()
    ),
    "lstm": lambda s, h, y: s.lstm(h)[0][:, -1].square().mean() + s.lstm(h)[1][1].mean(),
    "rnn": lambda s, h, y: s.rnn(h.transpose(0, 1))[0].square().mean(),
    "rrelu": lambda s, h, y: F.rrelu(h, training=False).mean(),
    "fourier": fourier_mixing,
    "inverse fourier": lambda s, h, y: (
        torch.fft.irfft(torch.fft.rfft(h, dim=1) * s.c, n=6, dim=1).square().mean()
    ),
    "logcumsumexp": lambda s, h, y: h.logcumsumexp(1).mean(),
    "matrix_exp": lambda s, h, y: torch.matrix_exp(h[:, :, :6]).mean(),
    "orthogonal": lambda s, h, y: (h @ torch.matrix_exp(s.square - s.square.T)).square().mean(),
    "variance": lambda s, h, y: (h / (1 + h.var(1, unbiased=False, keepdim=True))).square().mean(),
    "deviation": lambda s, h, y: (h / (1 + h.std(-1, True)[..., None])).square().mean(),
    "variance of parameters": lambda s, h, y: h.mean() * s.w.var(unbiased=False) + s.w.std(True) * h.sum(),
    "bits": lambda s, h, y: (h * (h.view(torch.int64) > 0)).mean(),
    "repeats": lambda s, h, y: (
        h.repeat_interleave(torch.tensor([1, 2, 0, 1, 1, 3]), 1, output_size=8).tanh().mean()
    ),
    "gradient": lambda s, h, y: sum(one.square().mean() for one in torch.gradient(h, dim=(1, 2))),  # type: ignore[return-value]
    "gradient along one dim": lambda s, h, y: torch.gradient(h, dim=1)[0].square().mean(),
    "one piece": lambda s, h, y: (h.chunk(1, -1)[0] * h[:, :1].unbind(1)[0][:, None]).square().mean(),
}
LOSSES: dict[str, Head] = {
    "triplet": lambda s, h, y: F.triplet_margin_loss(h[:, 0], h[:, 1], h[:, 2]),
    "triplet summed": lambda s, h, y: F.triplet_margin_loss(
        *h[:, :3].unbind(1), reduction="sum", swap=True, p=1.5
    ),
    "triplet with distance": lambda s, h, y: F.triplet_margin_with_distance_loss(h[:, 0], h[:, 1], h[:, 2]),
    "ranking": lambda s, h, y: F.margin_ranking_loss(h[:, 0, 0], h[:, 1, 0], signs(y), margin=0.1),
    "poisson": lambda s, h, y: F.poisson_nll_loss(h[:, 0, 0], y * 1.0, full=True),
    "hinge": lambda s, h, y: F.hinge_embedding_loss(h[:, 0, 0], signs(y)),
    "cosine": lambda s, h, y: F.cosine_embedding_loss(h[:, 0], h[:, 1], signs(y), margin=0.2),
    "multi margin": lambda s, h, y: F.multi_margin_loss(h[:, 0], y),
    "multi label": lambda s, h, y: F.multilabel_margin_loss(h[:, 0], (y[:, None] + torch.arange(16)) % 16),
    "soft multi label": lambda s, h, y: F.multilabel_soft_margin_loss(h[:, 0], (h[:, 1] > 0) * 1.0),
    "distance": lambda s, h, y: F.pairwise_distance(h[:, 0], h[:, 1]).mean(),
}
KINDS = {"vector": VECTORS, "affine": AFFINE, "index": INDEXED, "other": OTHERS, "loss": LOSSES}
ALL = {f"{kind}: {name}": head for kind, heads in KINDS.items() for name, head in heads.items()}
EVERY = [(name, MESHES[(k + i) % 4]) for k, name in enumerate(ALL) for i in range(4)]


@pytest.mark.one_in(96)
@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize(("name", "mesh"), EVERY, ids=[f"{name} {mesh}" for name, mesh in EVERY])
def test_the_models_numbers(name: str, mesh: dict[str, Any]) -> None:
    assert_parity(Body(ALL[name]), [data(0), data(1)], **mesh)


@pytest.mark.parametrize(
    "hooks",
    [
        {"accumulate_allreduce_grads_in_fp32": True},
        {"async_tensor_model_parallel_allreduce": True},
        {"schedule": "zb_h1"},
    ],
)
def test_a_linear_by_a_vector_beside_the_hooks_of_gemms(hooks: dict[str, Any]) -> None:
    head = VECTORS["linear"]
    assert_parity(
        Body(head), [data(0), data(1)], t=2, p=2 if "schedule" in hooks else 1, num_microbatches=2, **hooks
    )


REFUSED: dict[str, tuple[Head, str]] = {
    "nan_to_num": (lambda s, h, y: h.mean().nan_to_num(), "nan_to_num of a sum over samples.*nan='ignore'"),
    "clamp": (lambda s, h, y: h.mean().clamp(min=0), "clamp of a sum over samples"),
    "variance of all": (lambda s, h, y: h.var(unbiased=False), "var mixes the samples"),
    "fourier over the batch": (
        lambda s, h, y: torch.fft.fft(h, dim=0).abs().mean(),
        "the transform needs it whole",
    ),
    "batch norm in training": (
        lambda s, h, y: F.batch_norm(h[:, 0], None, None, training=True).exp().mean(),
        "batch norm in training",
    ),
    "gradient over the batch": (lambda s, h, y: torch.gradient(h)[1].mean(), "gradient"),
    "embedding_bag": (lambda s, h, y: F.embedding_bag(y[:, None], s.emb.weight).mean(), "embedding_bag"),
    "vmap": (lambda s, h, y: torch.vmap(lambda x: x @ s.w)(h).mean(), "vmap.*cannot be traced"),
    "func.grad": (
        lambda s, h, y: torch.func.grad(lambda w: (h @ w).mean())(s.w).sum(),
        "cannot be traced|requires a gradient",
    ),
    "func.jvp": (lambda s, h, y: torch.func.jvp(torch.tanh, (h,), (h,))[1].mean(), "cannot be traced"),
    "sparse": (lambda s, h, y: h.to_sparse().to_dense().mean(), "a torch.sparse_coo tensor"),
    "rows by an index tensor": (lambda s, h, y: h[y % h.shape[0]].mean(), "mixes the samples|number of rows"),
    "class weights of parameters": (
        lambda s, h, y: F.cross_entropy(h[:, 0], y, weight=s.w.detach().square()),
        "labels or class weights are computed from parameters.*class weights in a buffer",
    ),
    "dropout between layers": (lambda s, h, y: between(s.gru, h), "random operator|read from a list"),
}


def between(gru: nn.GRU, h: Tensor) -> Tensor:
    state = torch.zeros(2, h.shape[0], 5).to(h)
    return torch.ops.aten.gru.input(h, state, gru._flat_weights, True, 2, 0.5, True, False, True)[0].mean()


@pytest.mark.parametrize("name", REFUSED)
def test_one_clear_error(name: str) -> None:
    head, fact = REFUSED[name]
    text = refusal(Body(head), data(0), d=2, num_microbatches=2)
    assert re.search(fact, text), text


WITHOUT_ELEMENTS: dict[str, Head] = {
    "not used": lambda s, h, y: h.mean(),
    "summed": lambda s, h, y: h.mean() + s.none[0].sum(),
    "joined": lambda s, h, y: torch.cat([h, s.none[0].expand(*h.shape[:2], 0)], -1).square().mean(),
    "a product over it": lambda s, h, y: (
        (h + F.linear(F.linear(h, s.none[1]), s.none[2], s.bias)).square().mean()
    ),
}


@pytest.mark.one_in(1)
@pytest.mark.parametrize("name", WITHOUT_ELEMENTS)
def test_parameters_without_elements(name: str, tmp_path: Path) -> None:
    """They train nothing, whatever the mesh, and checkpoints that another mesh reads have them."""
    model = Body(WITHOUT_ELEMENTS[name]).double()
    model.none = nn.ParameterList([torch.empty(0), torch.empty(0, 16), torch.empty(16, 0)]).double()
    reference, states = copy.deepcopy(model), []
    theirs = torch.optim.AdamW(reference.parameters(), lr=0.1)
    for mesh in ({"t": 2, "d": 2, "zero": 1}, {"p": 2, "t": 2}):
        pm = autoptd.parallelize(
            copy.deepcopy(model), **mesh, backend="local", num_microbatches=2, example_inputs=data(0)
        )
        ours = pm.optimizer(torch.optim.AdamW, lr=0.1)
        if states:
            pm.load(tmp_path / "saved", ours)
        pm.step(*data(0))
        reference(*data(0)).backward()
        assert_near({"norm": pm.clip_grad_norm_(0.1)}, {"norm": clip(reference.parameters(), 0.1)}, 1e-3)
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
        pm.save(tmp_path / "saved", ours)
        states.append(pm.state_dict())
        assert_near(states[-1], dict(reference.state_dict()), 1e-3)
        pm.close()


def test_class_weights_of_parameters_keep_the_tokens_whole() -> None:
    """No batch to divide, and tokens that tp would rather split: what the mean divides by is not known before the forward."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.emb, self.norm, self.head = nn.Embedding(32, 16), nn.LayerNorm(16), nn.Linear(16, 32)
            self.classes = nn.Parameter(torch.rand(32))

        def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
            logits = self.head(self.norm(self.emb(ids)))
            return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), weight=self.classes.detach())

    source = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, 32, (8, 8), generator=source) for _ in range(2))
    quick = autoptd.Machine(latency=1e-9)
    assert_parity(Weighted(), [(ids, labels)], t=4, num_microbatches=1, sequence_parallel=True, machine=quick)


def test_a_sum_over_the_batch_must_have_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever rule takes another dim for the batch: linear by a vector under the letters of linear by a matrix."""

    def wrong(node: Any) -> list[Link]:
        return [
            Link(".1", {0: Member((1,))}, Member((0,))),
            Link(".0", {0: Member((0,))}, None),
        ]

    monkeypatch.setitem(TABLE, "aten.linear", Operator("aten.linear", links=wrong))
    model = Body(lambda s, h, y: F.linear(h, s.w).mean())
    model.layers = nn.ModuleList()
    with pytest.raises(PlanError, match="depends on the batch size, which its rules do not explain"):
        autoptd.compile(model, d=2, example_inputs=data(0))
