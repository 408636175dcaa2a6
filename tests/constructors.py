"""Constructors that do what constructors do: slices, copies, generators of their own, numbers that they read back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations


class Holder(nn.Module):
    """A module whose constructor is a function of it."""

    def __init__(self, build: Callable[[Any], None]) -> None:
        super().__init__()
        build(self)


def slices(m: Any) -> None:
    m.w = nn.Parameter(torch.empty(6, 4))
    with torch.no_grad():
        m.w[:2].normal_()
        m.w[2:4].uniform_(-1, 1)
        m.w[4:].zero_()
        m.w.data.mul_(2.0)
        m.w[:, 1] = m.w[:, 0]
        m.one = nn.Parameter(torch.randn(3, 3))
        m.one.fill_(m.one[1, 1])
    m.v = nn.Parameter(torch.randn(6, 4).t())
    m.v.data.copy_(m.w.t())
    m.v.data[0, :3] += 1


def replaced(m: Any) -> None:
    m.w = nn.Parameter(torch.empty(3, 3))
    m.w.data = torch.randn(4, 2)
    m.c = nn.Linear(3, 3)
    m.c.weight = nn.Parameter(m.c.weight.detach().clone().half())
    m.d = copy.deepcopy(m.c)
    m.e = nn.Embedding(5, 3, padding_idx=2)
    m.f = nn.Embedding.from_pretrained(torch.arange(6.0).view(3, 2), freeze=False)


def values_from_python(m: Any) -> None:
    m.register_buffer("table", torch.from_numpy(numpy.arange(6.0)).float())
    m.register_buffer("list", torch.tensor([1.0, 2.0, 3.0]), persistent=False)
    m.scale = nn.Parameter(torch.tensor(0.5))
    nn.init.constant_(m.scale, 0.25)
    m.old = nn.Parameter(torch.Tensor(3, 2))
    nn.init.xavier_normal_(m.old)
    m.filled = nn.Parameter(torch.FloatTensor(2, 2).fill_(3))
    m.rates = [x.item() for x in torch.linspace(0, 0.1, 4)]
    m.more = torch.linspace(0, 1, 3).tolist()
    m.array = float(torch.arange(3.0).numpy().sum()) + float(numpy.asarray(torch.arange(4)).sum())
    m.weights = nn.ParameterList([torch.randn(2) for _ in range(3)])


def buffers(m: Any) -> None:
    frequencies = 1.0 / (100.0 ** (torch.arange(0, 8, 2).float() / 8))
    m.register_buffer("angles", torch.outer(torch.arange(5).float(), frequencies))
    m.register_buffer("cis", torch.polar(torch.ones_like(m.angles), m.angles), persistent=False)
    m.conj = m.cis.conj()
    m.imaginary = m.cis.conj().imag
    m.register_buffer("mask", torch.triu(torch.full((4, 4), float("-inf")), 1))
    m.register_buffer("count", torch.tensor(3))
    m.register_buffer("noise", torch.rand(4))
    m.kept = {"x": [torch.randn(3)]}


def initializers(m: Any) -> None:
    shapes: dict[str, Callable[[Tensor], Any]] = {
        "trunc": nn.init.trunc_normal_,
        "narrow": lambda w: nn.init.trunc_normal_(w, 0.5, 2.0, 0.0, 0.2),
        "orthogonal": nn.init.orthogonal_,
        "sparse": lambda w: nn.init.sparse_(w, 0.3),
        "eye": nn.init.eye_,
        "kaiming": nn.init.kaiming_normal_,
        "exponential": lambda w: w.data.exponential_(),
        "integers": lambda w: w.data.random_(0, 9),
        "coin": lambda w: w.data.bernoulli_(0.4),
        "coins": lambda w: w.data.copy_(torch.bernoulli(torch.rand_like(w))),
        "cauchy": lambda w: w.data.cauchy_(),
        "permuted": lambda w: w.data.copy_(w.data[torch.randperm(7)]),
        "dropped": lambda w: w.data.copy_(nn.functional.dropout(torch.ones(7, 9), 0.5)),
        "choice": lambda w: w.data.copy_(torch.multinomial(torch.ones(63), 63).view(7, 9)),
        "normal": lambda w: w.data.copy_(torch.normal(torch.zeros(7, 9), torch.rand(7, 9))),
        "selected": lambda w: w.data[w.data > 0.1].zero_(),
        "largest": lambda w: w.data.div_(w.data.abs().max().item() + 1),
    }
    for name, init in shapes.items():
        parameter = nn.Parameter(torch.zeros(7, 9))
        m.register_parameter(name, parameter)
        with torch.no_grad():
            nn.init.uniform_(parameter)
            init(parameter)


def decided_by_values(m: Any) -> None:
    x = torch.randn(20)
    m.positive = nn.Parameter(x[x.nonzero()[:, 0]] if bool((x > 0).any()) else x)
    m.few = nn.Parameter(x[x > 0])
    m.same = torch.equal(x, x.clone())
    m.close = torch.allclose(x, x + 1)
    m.pairs = nn.Parameter(torch.unique(torch.randint(0, 5, (30,))).float())
    m.plain = nn.Parameter(torch.randn(4) / x.max())


def generators(m: Any) -> None:
    own = torch.Generator().manual_seed(11)
    m.a = nn.Parameter(torch.randn(33, generator=own))
    m.b = nn.Parameter(torch.randn(5))
    m.c = nn.Parameter(torch.empty(20).normal_(generator=own))
    own.manual_seed(11)
    m.again = nn.Parameter(torch.randn(33, generator=own))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        m.d = nn.Parameter(torch.randn(17))
        torch.manual_seed(3)
        m.e = nn.Parameter(torch.randn(17))
    m.f = nn.Parameter(torch.randn(6))
    m.t = nn.Parameter(nn.init.trunc_normal_(torch.empty(30), generator=own))
    state = torch.get_rng_state()
    m.g = nn.Parameter(torch.randn(4))
    torch.set_rng_state(state)
    m.h = nn.Parameter(torch.randn(4))
    m.seed = torch.initial_seed()


def dtypes(m: Any) -> None:
    m.a = nn.Linear(3, 4).bfloat16()
    torch.set_default_dtype(torch.float64)
    m.b = nn.Linear(3, 4)
    m.c = nn.Parameter(torch.arange(4) / 2)
    torch.set_default_dtype(torch.float32)
    m.d = nn.Linear(4, 3).to(torch.float16)
    m.to(torch.float64)
    m.a.float()


def shared(m: Any) -> None:
    both = torch.randn(4, 6)
    m.a = nn.Parameter(both + 1)
    m.b = nn.Parameter(both[:, :3] * 2)
    m.whole = torch.randn(3, 8)
    m.register_buffer("left", m.whole[:, :4])
    m.register_buffer("right", m.whole[:, 4:])
    m.one = nn.Linear(4, 4)
    m.two = nn.Linear(4, 4)
    m.two.weight = m.one.weight
    m.frozen = nn.Parameter(torch.randn(3), requires_grad=False)


def distributions(m: Any) -> None:
    m.gamma = nn.Parameter(torch.distributions.Gamma(torch.tensor([1.0, 2.0]), torch.ones(2)).sample((3,)))
    m.simplex = nn.Parameter(torch.distributions.Dirichlet(torch.ones(4)).sample())
    m.counts = nn.Parameter(torch.poisson(torch.ones(5) * 3))
    m.like = nn.Parameter(torch.randn_like(m.gamma) + torch.randint_like(m.gamma, 0, 5))


def parts_of_one(m: Any) -> None:
    fused = torch.empty(9, 4)
    q, k, v = fused.chunk(3)
    nn.init.xavier_uniform_(q)
    nn.init.normal_(k)
    nn.init.zeros_(v)
    m.fused = nn.Parameter(fused)
    table = torch.zeros(9, 4)
    table[torch.arange(3) * 2] = torch.randn(3, 4)
    table[table > 0.5] = 7
    m.table = nn.Parameter(table.scatter_(0, torch.randint(0, 9, (1, 4)), 1.0))
    m.more = nn.Parameter(torch.ones(3).resize_(6).clone()[:3])
    m.joined = torch.zeros(3)
    m.joined.set_(other := torch.randn(4))
    other.mul_(2)


def trained(m: Any) -> None:
    m.layer = nn.Linear(8, 1)
    optimizer = torch.optim.AdamW(m.layer.parameters())
    for _ in range(2):
        m.layer(torch.randn(5, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    m.scaled = nn.Linear(8, 8)
    x = torch.randn(16, 8)
    with torch.no_grad():
        while abs(m.scaled(x).std() - 1) > 0.05:
            m.scaled.weight /= m.scaled(x).std()


def arrays(m: Any) -> None:
    array = numpy.random.RandomState(0).randn(4, 3).astype(numpy.float32)
    m.w = nn.Parameter(torch.from_numpy(array.copy()))
    with torch.no_grad():
        m.w[:2].normal_()
    m.register_buffer("table", torch.as_tensor(array))
    m.register_buffer("again", torch.from_numpy(array))
    m.register_buffer("bytes", torch.frombuffer(bytearray(b"abcdefgh"), dtype=torch.uint8))


def matrices(m: Any) -> None:
    u, s, v = torch.linalg.svd(torch.randn(6, 4))
    m.u, m.s, m.v = nn.Parameter(u), nn.Parameter(s.diag()), nn.Parameter(v)
    m.complex = nn.Parameter(torch.randn(3, 4, dtype=torch.cfloat))
    m.spectrum = nn.Parameter(torch.fft.rfft(torch.randn(8)).abs())
    m.exponential = nn.Parameter(torch.matrix_exp(torch.randn(3, 3)))
    m.last = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)


def only_lists(m: Any) -> None:
    m.pair = (torch.randn(2), [torch.randn(3)])


KINDS: dict[str, Callable[[], nn.Module]] = {
    build.__name__: (lambda build=build: Holder(build))
    for build in (
        slices,
        replaced,
        values_from_python,
        buffers,
        initializers,
        decided_by_values,
        generators,
        dtypes,
        shared,
        distributions,
        parts_of_one,
        trained,
        arrays,
        matrices,
        only_lists,
    )
} | {
    "lstm": lambda: nn.LSTM(5, 6, 2, bidirectional=True),
    "encoder": lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 4, norm_first=True), 2),
    "weight_norm": lambda: parametrizations.weight_norm(nn.Linear(5, 6)),
    "spectral_norm": lambda: parametrizations.spectral_norm(nn.Linear(5, 6)),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Linear(5, 6)),
    "batch_norm": lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4)),
}
