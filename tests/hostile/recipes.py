"""What hostile models are made of: tables of lines of source, by family. Nothing here knows what AutoPTD does with them.

A `Recipe` fills the holes of one small decoder (generate.py). `loads`: the state of another variant of the model is loaded.
`meddles`: lines that are run between the gradients and the optimizer's step, on the ranks' side with `pm`, on one device with
`model`.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass

LOOP = ("h = h + layer(h)",)
LOSS = "F.cross_entropy(logits.flatten(0, 1), y.flatten())"


@dataclass(frozen=True)
class Recipe:
    """One model; `loads` and `meddles` are above."""

    family: str
    name: str
    top: tuple[str, ...] = ()  # beside the class
    init: tuple[str, ...] = ()  # end of __init__; `variant` is 0 or 1
    start: tuple[str, ...] = ("h = self.emb(x)",)
    loop: tuple[str, ...] = LOOP
    end: tuple[str, ...] = ()
    loss: str = LOSS
    call: str = "x, y"  # of the model, with what `batch` makes: x, y, mask, values, sign
    takes: str = "x, y"
    loads: bool = False
    meddles: tuple[str, str] = ("", "")  # of pm, of the model


NUMBERS = [
    "i",
    "i + 1",
    "-(i + 1)",
    "2 * i - 1",
    "i - 3",
    "(i + 1) * 0.5",
    "-0.25 * (i + 1)",
    "1 / (i + 1)",
    "i % 2 == 0",
]
NUMBERS += ["self.numbers[i]", "(3, 1, 2, 5)[i]", "10**-i", "1 + (i == 2)"]
PLACES = [
    "h + layer(h) * ({c})",
    "h + ({c}) * layer(h)",
    "h * ({c}) + layer(h)",
    "layer(h) - ({c})",
    "({c}) - layer(h) + h",
    "h + layer(h) / ({c} + 7)",
    "h + ({c} + 7) / (layer(h).square() + 1)",
    "h + (layer(h).square() + 1) ** ({c})",
    "h + (abs({c}) + 1) ** layer(h).tanh()",
    "h + torch.tanh(layer(h) / (10 + {c})) * (10 + {c})",
    "(h + ({c})) * ({c} + 2) - ({c})",
    "h - -layer(h) * -({c})",
    "h + layer(h) * ({c}) ** 2",
    "h + layer(h * ({c} + 8) / ({c} + 9))",
    "torch.add(h, layer(h), alpha={c})",
    "torch.sub(h, layer(h), alpha={c})",
    "torch.rsub(layer(h), h, alpha={c})",
    "torch.addcmul(h, layer(h), h, value={c})",
    "torch.lerp(h, layer(h), float({c}))",
    "h.mul({c}).add(layer(h))",
    "h + F.leaky_relu(layer(h), 0.1 * ({c}))",
    "h + F.elu(layer(h), alpha=({c} + 7))",
    "h + layer(h).clamp(-abs({c}) - 0.1, abs({c}) + 0.1)",
    "h + torch.where(layer(h) > ({c}), h, -h)",
    "h + layer(h) % ({c} + 7)",
    "h + layer(h).roll(int({c}), 1)",
    "h + torch.full_like(h, {c}) * layer(h)",
    "h + torch.tensor(float({c})) * layer(h)",
    "h + layer(h) * math.cos({c}) - math.exp({c} / 9)",
    "h + F.layer_norm(layer(h), (WIDTH,), eps=abs({c}) + 1e-5)",
]


def numbers() -> Iterator[Recipe]:
    """Numbers of a layer's own, of every kind and in every place."""
    for number, place in itertools.product(NUMBERS, PLACES):
        init = ("self.numbers = [3, -1, 0.5, 2]",) if "numbers" in number else ()
        yield Recipe(
            "numbers", f"{number} in {place}", init=init, loop=(f"h = {place.replace('{c}', number)}",)
        )


FLAT = ("flat = 0.3 * torch.randn(VOCAB * WIDTH + WIDTH)",)
STORAGE: dict[str, tuple[str, ...]] = {
    "tie": ("self.head.weight = self.emb.weight",),
    "tie the other way": ("self.emb.weight = self.head.weight",),
    "tie by data": ("self.head.weight.data = self.emb.weight.data",),
    "tie by view": ("self.head.weight = nn.Parameter(self.emb.weight.data.view(VOCAB, WIDTH))",),
    "tie by detach": ("self.head.weight = nn.Parameter(self.emb.weight.detach())",),
    "tie by set_": ("self.head.weight.data.set_(self.emb.weight.data)",),
    "tied copy": ("self.head.weight = nn.Parameter(self.emb.weight.detach().clone())",),
    "overlap": (
        *FLAT,
        "self.emb.weight = nn.Parameter(flat[WIDTH:].view(VOCAB, WIDTH))",
        "self.head.weight = nn.Parameter(flat[:-WIDTH].view(VOCAB, WIDTH))",
    ),
    "one flat buffer, apart": (
        "flat = 0.3 * torch.randn(2, VOCAB, WIDTH)",
        "self.emb.weight, self.head.weight = nn.Parameter(flat[0]), nn.Parameter(flat[1])",
    ),
    "columns of one matrix": (
        "flat = 0.3 * torch.randn(VOCAB, 2 * WIDTH)",
        "self.emb.weight, self.head.weight = nn.Parameter(flat[:, :WIDTH]), nn.Parameter(flat[:, WIDTH:])",
    ),
    "expanded": ("self.head.weight = nn.Parameter(torch.randn(1, WIDTH).expand(VOCAB, WIDTH))",),
    "transposed": ("self.head.weight = nn.Parameter(0.3 * torch.randn(WIDTH, VOCAB).t())",),
    "layers by data": (
        "for layer in self.layers[1:]:",
        "    layer[1].weight.data = self.layers[0][1].weight.data",
    ),
    "layers tied": ("for layer in self.layers[1:]:", "    layer[1].weight = self.layers[0][1].weight"),
    "biases by data": ("self.layers[3][3].bias.data = self.layers[0][3].bias.data",),
    "norms by data": ("self.norm.weight.data = self.layers[0][0].weight.data",),
    "bias in a weight": ("self.norm.bias = nn.Parameter(self.norm.weight.data)",),
    "one block": ("self.layers = nn.ModuleList([self.layers[0]] * 4)",),
    "two blocks in turn": ("self.layers = nn.ModuleList([self.layers[0], self.layers[1]] * 2)",),
    "there and back": ("self.layers = nn.ModuleList([*self.layers[:2], self.layers[1], self.layers[0]])",),
    "frozen tie": ("self.head.weight = self.emb.weight", "self.layers[0].requires_grad_(False)"),
    "half of a block": ("for layer in self.layers:", "    layer[3] = self.layers[0][3]"),
    "a weight within a block": ("self.layers[0][1].weight = self.layers[0][1].weight",),
}
USES: dict[str, tuple[tuple[str, ...], str]] = {  # init, what is added to the last hidden
    "buffer": (("self.register_buffer('kept', self.emb.weight.data)",), "self.kept[y]"),
    "buffer of a row": (("self.register_buffer('kept', self.emb.weight.data[0])",), "self.kept"),
    "attribute": (("self.kept = self.emb.weight.data",), "self.kept[y]"),
    "attribute in a list": (("self.kept = [self.emb.weight.data]",), "self.kept[0][y]"),
    "detached in forward": ((), "self.emb.weight.detach()[y]"),
    "data in forward": ((), "self.emb.weight.data[y]"),
    "clone as buffer": (("self.register_buffer('kept', self.emb.weight.data.clone())",), "self.kept[y]"),
    "buffers that overlap": (
        (
            "table = torch.randn(2, WIDTH)",
            "self.register_buffer('a', table)",
            "self.register_buffer('kept', table[0])",
        ),
        "(self.a[1] + self.kept)",
    ),
    "parameter in a list": (("self.kept = [nn.Parameter(torch.randn(WIDTH))]",), "self.kept[0]"),
    "parameter of another module in a list": (("self.kept = [self.emb]",), "self.kept[0](y)"),
    "global tensor": ((), "TABLE[y]"),
    "global parameter": ((), "PARAMETER"),
    "transposed view of a parameter": (
        ("self.register_buffer('kept', self.head.weight.data.t())",),
        "self.kept[:, 0]",
    ),
}


def storage() -> Iterator[Recipe]:
    """Parameters, buffers and attributes that share their storage, or look as if they did."""
    for name, init in STORAGE.items():
        yield Recipe("storage", name, init=init)
        if "block" not in name:
            yield Recipe("storage", f"{name}, read again", init=init, end=("h = h + 0.1 * self.emb(y)",))
    top = ("TABLE = torch.randn(VOCAB, WIDTH)", "PARAMETER = nn.Parameter(torch.randn(WIDTH))")
    for name, (init, value) in USES.items():
        yield Recipe("storage", name, top=top, init=init, end=(f"h = h + 0.5 * {value}",))
        yield Recipe(
            "storage", f"{name}, in layers", top=top, init=init, loop=(f"h = h + layer(h + {value})",)
        )


BUFFERS: dict[str, tuple[str, str]] = {  # value by variant, what is done with it
    "scale": ("torch.tensor(1.0 + variant)", "h * self.kept"),
    "mean": ("torch.full((WIDTH,), float(variant))", "h - self.kept"),
    "zeros": ("torch.zeros(WIDTH) + variant", "h + self.kept"),
    "ones": ("torch.ones(WIDTH) - 0.5 * variant", "h * self.kept"),
    "equal rows": ("torch.ones(LENGTH, WIDTH) + variant * torch.arange(LENGTH)[:, None]", "h * self.kept"),
    "equal columns": ("torch.ones(WIDTH) + variant * torch.arange(WIDTH)", "h * self.kept"),
    "matrix": ("torch.eye(WIDTH) + variant * torch.ones(WIDTH, WIDTH) / 9", "h @ self.kept"),
    "tokens": ("torch.arange(LENGTH).flip(0) if variant else torch.arange(LENGTH)", "h[:, self.kept]"),
    "channels": ("torch.arange(WIDTH).flip(0) if variant else torch.arange(WIDTH)", "h[..., self.kept]"),
    "rows of a table": ("(torch.arange(LENGTH) + variant) % VOCAB", "h + self.emb(self.kept)"),
    "keep": ("torch.arange(LENGTH) >= 2 * variant", "h * self.kept[:, None]"),
    "masked_fill": ("torch.arange(WIDTH) < 3 * variant", "h.masked_fill(self.kept, 0.5)"),
    "where": ("torch.arange(WIDTH) < 3 * variant", "torch.where(self.kept, h, -h)"),
    "causal": ("causal(6 - 4 * variant)", "attend(h, self.kept)"),
    "causal, added": ("causal(6 - 4 * variant).double().log()", "attend(h, self.kept)"),
    "causal, all seen": (
        "causal(6) if variant else torch.ones(6, 6, dtype=torch.bool)",
        "attend(h, self.kept)",
    ),
    "causal, by hand": ("causal(6 - 4 * variant)", "by_hand(h, self.kept)"),
    "causal, by hand, as floats": ("causal(6 - 4 * variant).double()", "by_hand(h, self.kept == 1)"),
    "rotary": (
        "torch.outer(torch.arange(6.0), 10.0 ** -torch.arange(6.0) * (1 + variant))",
        "turn(h, self.kept)",
    ),
    "temperature": ("torch.tensor(2.0 + variant)", "(h / self.kept).softmax(-1)"),
    "whole number": ("torch.tensor(2 + variant)", "h * self.kept"),
    "eps": (
        "torch.tensor(1e-3 * (1 + 9 * variant))",
        "h * (h.square().mean(-1, keepdim=True) + self.kept).rsqrt()",
    ),
}
CAUSAL = (
    "def causal(window):",
    "    mask = torch.ones(6, 6, dtype=torch.bool).tril()",
    "    return mask & ~mask.tril(-window)",
    "",
    "def attend(h, mask):",
    "    q = h.unflatten(-1, (6, 2)).transpose(1, 2)",
    "    return F.scaled_dot_product_attention(q, q, q, attn_mask=mask).transpose(1, 2).flatten(2)",
    "",
    "def by_hand(h, mask):",
    "    scores = (h @ h.mT).masked_fill(~mask, float('-inf'))",
    "    return scores.softmax(-1) @ h",
    "",
    "def turn(h, angles):",
    "    a, b = h.chunk(2, -1)",
    "    return torch.cat((a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()), -1)",
)


def buffers() -> Iterator[Recipe]:
    """Persistent buffers that a state dict changes, wherever a compiler could have read them."""
    for name, (value, use) in BUFFERS.items():
        init = (f"self.register_buffer('kept', {value})",)
        for is_layer, loads in itertools.product((False, True), (False, True)):
            where = (
                {"loop": (f"h = h + layer({use})",)}
                if is_layer
                else {"start": ("h = self.emb(x)", f"h = {use}")}
            )
            title = f"{name}{' in layers' * is_layer}{', loaded' * loads}"
            yield Recipe("buffers", title, top=CAUSAL, init=init, loads=loads, **where)  # type: ignore[arg-type]
    weights = ("self.register_buffer('kept', torch.ones(VOCAB) + variant * torch.arange(VOCAB))",)
    loss = "F.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=self.kept)"
    yield Recipe("buffers", "class weights, loaded", init=weights, loss=loss, loads=True)
    yield Recipe("buffers", "class weights", init=weights, loss=loss)


# Numbers of torch.rand are of streams of AutoPTD's own: tests/parity/test_noise.py.
STATE: dict[str, tuple[tuple[str, ...], str]] = {  # init, a factor
    "counter": (("self.calls = 0",), "(1.0 + (self.count() > 3))"),
    "late counter": (("self.calls = 0",), "(1.0 + (self.count() > 9))"),
    "counter in a list": (
        ("self.calls = 0", "self.seen = []"),
        "(1.0 + 0.1 * (self.seen.append(0) or len(self.seen)))",
    ),
    "counter in a dict": (
        ("self.seen = {'n': 0}",),
        "(1.0 + self.seen.update(n=self.seen['n'] + 1) or self.seen['n'])",
    ),
    "global counter": ((), "(1.0 + 0.1 * next(COUNT))"),
    "random": ((), "(1.0 + (random.random() < 0.3))"),
    "rare random": ((), "(1.0 + (random.random() < 0.02))"),
    "own random": (("self.random = random.Random(1)",), "(1.0 + (self.random.random() < 0.3))"),
    "numpy": ((), "(1.0 + (numpy.random.rand() < 0.3))"),
    "item of random": ((), "(1.0 + torch.rand(()).item())"),
    "buffer in place": (("self.register_buffer('n', torch.zeros(()))",), "(1.0 + self.n.add_(0.1))"),
    "buffer assigned": (("self.register_buffer('n', torch.zeros(()))",), "(1.0 + self.assign())"),
    "moving average": (
        ("self.register_buffer('n', torch.zeros(WIDTH))",),
        "(1.0 + self.n.lerp_(h.detach().mean((0, 1)), 0.1))",
    ),
    "first call is kept": (("self.first = None",), "(1.0 + self.remember(h))"),
    "training": ((), "(1.0 + self.training)"),
    "no grad": ((), "(1.0 + torch.is_grad_enabled())"),
    "a flag that is set": (("self.was_called = False",), "(1.0 + self.flag())"),
    "time": ((), "(1.0 + (time.time() % 1))"),
    "rows": ((), "(1.0 + h.shape[0] % 2)"),
    "many rows": ((), "(1.0 + (h.shape[0] > 4))"),
    "rows as a number": ((), "(1.0 + 1 / h.shape[0])"),
    "length": ((), "(1.0 + 1 / h.shape[1])"),
    "value decides": ((), "(1.0 + bool(h.sum() > 0))"),
    "label decides": ((), "(1.0 + bool((y == 3).any()))"),
    "max of labels": ((), "(1.0 + int(y.max()))"),
    "hook counts": (
        ("self.calls = 0", "self.emb.register_forward_hook(lambda *_: self.count())"),
        "(1.0 + (self.calls > 5))",
    ),
    "hook of a gradient": (("self.emb.weight.register_hook(lambda g: g * 2)",), "1.0"),
    "hook of a hidden": ((), "self.hooked(h)"),
    "hook of a module's output": (
        ("self.layers[0].register_forward_hook(lambda m, a, out: out * 2)",),
        "1.0",
    ),
    "backward hook": (("self.layers[0].register_full_backward_hook(lambda m, a, b: (a[0] * 2,))",), "1.0"),
    "dropout of zero": (("self.drop = nn.Dropout(0.0)",), "self.drop(h)"),
    "dropout in eval": (("self.drop = nn.Dropout(0.5).eval()",), "self.drop(h)"),
    "compiling": ((), "(1.0 + torch.compiler.is_compiling())"),
}
METHODS = (
    "def count(self):",
    "    self.calls += 1",
    "    return self.calls",
    "",
    "def assign(self):",
    "    self.n = self.n + 0.1",
    "    return self.n",
    "",
    "def remember(self, h):",
    "    if self.first is None:",
    "        self.first = float(h.detach().mean())",
    "    return self.first",
    "",
    "def flag(self):",
    "    before, self.was_called = self.was_called, True",
    "    return before",
    "",
    "def hooked(self, h):",
    "    h = h * 1.0",
    "    if h.requires_grad:",
    "        h.register_hook(lambda g: g * 1.001)",
    "    return h",
)


def state() -> Iterator[Recipe]:
    """Whatever may differ from one call to the next."""
    for name, (init, factor) in STATE.items():
        yield Recipe("state", name, init=init, start=("h = self.emb(x)", f"h = h * {factor}"))
        yield Recipe("state", f"{name}, in layers", init=init, loop=(f"h = h + layer(h) * {factor}",))
        of_loss = re.sub(r"\bh\b", "logits", factor)
        yield Recipe("state", f"{name}, of the loss", init=init, loss=f"({LOSS} * {of_loss}).mean()")


LOSSES = [  # of logits, h, x, y, values [b, s], mask [b, s], sign [b]: of what torch has and of what people write
    "F.cosine_embedding_loss(h.mean(1), self.emb(y).mean(1), sign)",
    "F.cosine_embedding_loss(h.mean(1), self.emb(y).mean(1), sign, margin=0.3, reduction='sum')",
    "F.margin_ranking_loss(h.mean((1, 2)), self.emb(y).mean((1, 2)), sign)",
    "F.hinge_embedding_loss(h.mean(-1), sign[:, None].expand(-1, LENGTH))",
    "F.soft_margin_loss(h.mean((1, 2)), sign)",
    "F.triplet_margin_loss(h.mean(1), self.emb(x).mean(1), self.emb(y).mean(1))",
    "F.gaussian_nll_loss(h.mean(-1), values, values.square() + 1)",
    "F.poisson_nll_loss(h.mean(-1), values.abs())",
    "F.huber_loss(h.mean(-1), values)",
    "F.smooth_l1_loss(h.mean(-1), values, beta=0.3)",
    "F.l1_loss(h.mean(-1), values, reduction='sum')",
    "F.mse_loss(h.mean(-1), values)",
    "F.kl_div(logits.log_softmax(-1), logits.detach().flip(-1).softmax(-1), reduction='batchmean')",
    "F.kl_div(logits.log_softmax(-1), logits.detach().flip(-1).softmax(-1), reduction='sum') / x.shape[0]",
    "F.kl_div(logits.log_softmax(-1), logits.detach().flip(-1).softmax(-1))",
    "F.binary_cross_entropy_with_logits(h.mean(-1), mask)",
    "F.binary_cross_entropy_with_logits(h.mean(-1), mask, pos_weight=torch.tensor(3.0))",
    "F.binary_cross_entropy_with_logits(h.mean(-1), mask, weight=values.square())",
    "F.binary_cross_entropy(h.mean(-1).sigmoid(), mask)",
    "F.multilabel_soft_margin_loss(h.mean(-1), mask)",
    "F.multi_margin_loss(logits[:, 0], y[:, 0])",
    "F.multi_margin_loss(logits.flatten(0, 1), y.flatten(), p=2)",
    "F.cross_entropy(logits.mT, y)",
    "F.cross_entropy(logits[:, -1], y[:, -1])",
    "F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=3)",
    "F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=3, label_smoothing=0.2)",
    "F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction='sum') / y.numel()",
    "F.cross_entropy(logits.flatten(0, 1), y.flatten(), reduction='sum') / (y != 3).sum()",
    "F.cross_entropy(logits.flatten(0, 1), F.one_hot(y, VOCAB).double().flatten(0, 1))",
    "F.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=torch.arange(VOCAB).double() + 1)",
    "(F.cross_entropy(logits.mT, y, reduction='none') * mask).sum() / mask.sum()",
    "(F.cross_entropy(logits.mT, y, reduction='none') * mask).mean()",
    "(F.cross_entropy(logits.mT, y, reduction='none') * mask).sum(1).mean()",
    "((F.cross_entropy(logits.mT, y, reduction='none') * mask).sum(1) / mask.sum(1).clamp(min=1)).mean()",
    "F.cross_entropy(logits.mT, y, reduction='none')[mask > 0].mean()",
    "F.cross_entropy(logits.mT, y, reduction='none').sum(1).max()",
    "F.cross_entropy(logits.mT, y, reduction='none').mean(1).median()",
    "F.cross_entropy(logits.mT, y, reduction='none').logsumexp((0, 1))",
    "F.cross_entropy(logits.mT, y, reduction='none').square().mean().sqrt()",
    "F.cross_entropy(logits.mT, y, reduction='none').topk(2).values.mean()",
    "F.cross_entropy(logits.mT, y).exp()",
    "F.cross_entropy(logits.mT, y).square()",
    "F.cross_entropy(logits.mT, y) + 0.5",
    "1 - F.cross_entropy(logits.mT, y)",
    "F.cross_entropy(logits.mT, y).double() * 3 / 2",
    "F.cross_entropy(logits.mT, y).nan_to_num()",
    "F.cross_entropy(logits.mT, y).clamp(max=2.0)",
    "F.cross_entropy(logits.mT, y).view(1).view(())",
    "F.cross_entropy(logits.mT, y) * F.mse_loss(h.mean(-1), values)",
    "F.cross_entropy(logits.mT, y) / F.mse_loss(h.mean(-1), values).detach()",
    "F.cross_entropy(logits.mT, y) + 0.1 * h.var()",
    "F.cross_entropy(logits.mT, y) + 0.1 * h.std(unbiased=False)",
    "F.cross_entropy(logits.mT, y) + 0.1 * h.norm()",
    "F.cross_entropy(logits.mT, y) + 0.1 * h.mean((0, 1)).square().sum()",
    "F.cross_entropy(logits.mT, y) + 0.1 * (h.softmax(-1).mean((0, 1)) * h.mean((0, 1))).sum()",
    "F.cross_entropy(logits.mT, y) + 0.1 * sum(p.square().sum() for p in self.parameters())",
    "F.cross_entropy(logits.mT, y) + 0.1 * self.emb.weight.norm()",
    "F.cross_entropy(h.mean(1) @ self.emb(y).mean(1).T, torch.arange(x.shape[0]))",
    "F.logsigmoid(h.mean((1, 2))[::2] - h.mean((1, 2))[1::2]).mean()",
    "F.linear(h, self.emb.weight[0]).mean()",
    "F.linear(h, self.emb.weight[0]).square().sum()",
    "F.linear(h.mean(1), self.emb.weight[0]).sum()",
    "(h @ self.emb.weight[0]).tanh().mean()",
    "F.mse_loss(torch.zeros_like(h) + h, h.detach().flip(1))",
    "torch.zeros(()) + h.square().sum((1, 2)).mean(0)",
    "h.square().flatten().mean(0)",
    "torch.stack([h.mean(), logits.mean()]).square().sum()",
    "(h.sum(-1) * values).sum() / values.square().sum()",
    "h.abs().amax((1, 2)).mean()",
    "-torch.distributions.Normal(h.mean(-1), 1.0).log_prob(values).mean()",
    "-torch.distributions.Categorical(logits=logits).log_prob(y).mean()",
    "F.cross_entropy(logits.mT, y, reduction='none').mean(dtype=torch.float32)",
    "F.cross_entropy(logits.mT, y, reduction='none').sum(dtype=torch.float64)",
]
OPERATORS = [  # of h [b, s, 12]; no casts to coarser dtypes, which round the parts of a sum and not the sum
    "torch.special.erf(h)",
    "torch.special.erfcx(h)",
    "torch.special.expit(h)",
    "torch.special.i0e(h)",
    "torch.special.log_ndtr(h)",
    "torch.special.sinc(h)",
    "torch.special.psi(h)",
    "torch.special.ndtr(h)",
    "h.frac()",
    "h.fmod(0.7)",
    "torch.hypot(h, h.flip(-1))",
    "torch.atan2(h, h.roll(1, -1))",
    "h.lgamma()",
    "torch.xlogy(h, h.abs() + 1)",
    "torch.logaddexp(h, h.flip(-1))",
    "torch.copysign(h, h.roll(1, 1))",
    "h.nan_to_num()",
    "h.cumsum(1)",
    "h.cumsum(-1)",
    "h.cumsum(0)",
    "(h / 9).cumprod(1)",
    "h.cummax(1).values",
    "h.logcumsumexp(1)",
    "h.flip(1)",
    "h.flip(0)",
    "h.roll(1, 0)",
    "h.roll((1, 1), (1, 2))",
    "h.roll(3)",
    "h - h.mean(0)",
    "h / h.std(0)",
    "h.sort(-1).values",
    "h.sort(1).values",
    "h.sort(0).values",
    "h.topk(3, -1).values.mean(-1, keepdim=True) + h",
    "h.kthvalue(2, -1, keepdim=True).values + h",
    "h.median(1, keepdim=True).values + h",
    "h.quantile(0.5, -1, True) + h",
    "F.normalize(h, dim=-1)",
    "F.normalize(h, dim=1)",
    "F.normalize(h, dim=0)",
    "h.renorm(2, 0, 1.0)",
    "h / (1 + h.var())",
    "h / (1 + h.var(unbiased=False))",
    "h / (1 + h.var(-1, keepdim=True, correction=0))",
    "h / h.norm(dim=(1, 2), keepdim=True)",
    "F.group_norm(h.mT, 3).mT",
    "F.instance_norm(h)",
    "F.batch_norm(h.mT, None, None, training=True).mT",
    "F.batch_norm(h.mT, torch.zeros(12), torch.ones(12)).mT",
    "F.local_response_norm(h, 3)",
    "F.softmin(h, -1)",
    "F.avg_pool1d(h, 3, 1, 1)",
    "F.max_pool1d(h, 3, 1, 1)",
    "F.avg_pool1d(h.mT, 3, 1, 1).mT",
    "F.lp_pool1d(h, 2, 1)",
    "F.interpolate(h, scale_factor=2.0)[..., ::2]",
    "F.pad(h, (1, 1))[..., 2:]",
    "F.pad(h, (0, 0, 1, 0))[:, :-1]",
    "F.pad(h, (1, 1), mode='circular')[..., 2:]",
    "F.pixel_shuffle(h.view(-1, 6, 12, 1).transpose(1, 2)[:, :12], 1).mT[:, :, 0]",
    "h.unfold(1, 1, 1).squeeze(-1)",
    "F.unfold(h.unsqueeze(1), (1, 12)).mT",
    "h @ torch.linalg.inv(torch.eye(12) * 2)",
    "torch.linalg.solve(torch.eye(12) * 2, h.mT).mT",
    "torch.linalg.norm(h, dim=-1, keepdim=True) + h",
    "torch.matrix_exp(h @ h.mT / 99) @ h",
    "torch.fft.fft(h).real",
    "torch.fft.rfft(h, dim=1).abs().mean(1, keepdim=True) + h",
    "torch.fft.ifft(torch.fft.fft(h, dim=0), dim=0).real",
    "torch.diff(h, dim=1, prepend=h[:, :1])",
    "torch.cdist(h, h) @ h",
    "torch.einsum('bsh,bth->bst', h, h).softmax(-1) @ h",
    "torch.einsum('bsh,ash->bsh', h, h)",
    "torch.tensordot(h, torch.eye(12), 1)",
    "torch.baddbmm(h, h @ h.mT, h, alpha=0.1)",
    "h.gather(1, y.unsqueeze(-1).expand(-1, -1, 12) % 6)",
    "h.index_select(1, torch.tensor([5, 4, 3, 2, 1, 0]))",
    "h.index_select(0, torch.arange(h.shape[0]))",
    "h[torch.arange(h.shape[0]), y[:, 0] % 6].unsqueeze(1) + h",
    "h.take_along_dim(y.unsqueeze(-1) % 6, 1)",
    "h.scatter(1, (y % 6).unsqueeze(-1).expand(-1, -1, 12), h)",
    "h.scatter_add(1, (y % 6).unsqueeze(-1).expand(-1, -1, 12), h)",
    "h.index_add(1, torch.tensor([0, 1]), h[:, :2])",
    "h.masked_fill(mask.bool().unsqueeze(-1), 0.0)",
    "h[mask > 0].mean(0) + h",
    "h.masked_select(mask.bool().unsqueeze(-1)).mean() + h",
    "F.one_hot(y, VOCAB).double() @ self.emb.weight + h",
    "h * torch.bucketize(values, torch.linspace(-1, 1, 5)).unsqueeze(-1)",
    "h * h.argmax(-1, keepdim=True)",
    "h * (h > 0).sum(-1, keepdim=True)",
    "h.repeat_interleave(2, 1)[:, ::2]",
    "h.repeat(1, 2, 1)[:, 6:]",
    "h.tile(1, 1, 2)[..., 12:]",
    "torch.cat([h[:, 1:], h[:, :1]], 1)",
    "torch.cat([h[1:], h[:1]])",
    "torch.stack(h.unbind(1), 1)",
    "torch.stack(h.unbind(0))",
    "torch.cat(h.chunk(2, 0)[::-1])",
    "torch.cat(h.split([4, 8], -1)[::-1], -1)",
    "h.movedim(1, 0).movedim(0, 1)",
    "h.view(-1, 12).view(h.shape)",
    "h.reshape(-1, 6, 12)",
    "h.flatten().view(-1, 6, 12)",
    "h.view(-1, 3, 2, 12).transpose(1, 2).reshape(h.shape)",
    "h.contiguous().as_strided(h.shape, h.stride())",
    "h.clone().add_(h)",
    "h.detach() + h - h.detach()",
    "h.tril()",
    "h * torch.tril(torch.ones(6, 12))",
    "torch.triu(h, 1) + h",
    "h.diagonal(0, 1, 2).unsqueeze(1).mean(-1, True) + h",
    "F.bilinear(h, h, torch.ones(12, 12, 12) / 99)",
    "torch.kron(h, torch.ones(1, 1, 1))",
    "h.where(values.unsqueeze(-1) > 0, 0.5)",
    "torch.maximum(h, h.flip(-1))",
    "h.clamp(min=h.mean(-1, keepdim=True))",
    "torch.renorm(h, 2, 2, 1.0)",
    "F.embedding(y, self.emb.weight, max_norm=None, scale_grad_by_freq=False) + h",
    "F.embedding(y, self.emb.weight, padding_idx=3) + h",
    "F.embedding_bag(y, self.emb.weight).unsqueeze(1) + h",
    "F.conv1d(h.mT, torch.ones(12, 1, 3) / 9, padding=1, groups=12).mT",
    "torch.vmap(torch.sin)(h)",
    "torch.gradient(h, dim=1)[0] + h",
    "F.rrelu(h, training=False)",
    "h * h.new_tensor([2.0])",
    "h * h.numel()",
    "h * h.shape[0]",
    "h * len(h)",
]


def probes() -> Iterator[Recipe]:
    """Operators that no table lists, and losses: what is taken for a mean, a sum, or independent of the other samples."""
    for loss in LOSSES:
        yield Recipe(
            "probes",
            f"loss {loss}",
            loss=loss,
            call="x, y, mask, values, sign",
            takes="x, y, mask, values, sign",
        )
    for operator in OPERATORS:
        takes = "x, y, mask, values, sign"
        yield Recipe("probes", operator, end=(f"h = {operator}",), call=takes, takes=takes)
        yield Recipe(
            "probes", f"{operator} in layers", loop=(f"h = h + layer({operator})",), call=takes, takes=takes
        )


PARAMETERS = "w b F tp rt torch x y h nn self_ loss stage inputs _ A grad".split()
READS = [
    "h * self.{n}",
    "h * self.{n}.expand_as(h)",
    "h * self.{n}.view(1, 1, -1)",
    "h + self.{n}.double()[None]",
    "F.linear(h, self.{n})[..., None] + h",
]
CALLS = [  # how the model is called, what it takes
    ("x, None, y", "x, more, y"),
    ("None, x, y", "more, x, y"),
    ("x, 3, y", "x, more, y"),
    ("2, x, y", "more, x, y"),
    ("x, 0.5, y", "x, more, y"),
    ("x, True, y", "x, more, y"),
    ("x, 'mean', y", "x, more, y"),
    ("x, (None, y)", "x, pair"),
    ("x, (1, y, None)", "x, pair"),
    ("x, {'a': None, 'y': y}", "x, pair"),
    ("x, [y], 2", "x, pair, more"),
    ("x, y, torch.tensor(2.0)", "x, y, more"),
    ("torch.full((1,), 2.0), x, y", "more, x, y"),
    ("x, y=y", "x, y"),
    ("y=y, x=x", "x, y"),
    ("x, more=None, y=y", "x, y, more"),
    ("x, x", "x, y"),
    ("x, x[:, :4]", "x, short"),
]
WRITES = [
    "h.add_(1.0)",
    "h += layer(h).detach()",
    "h[:, 0] = 0.0",
    "h[:, 1:] += h[:, :-1].clone()",
    "h.view(-1, WIDTH)[:, 0].mul_(2.0)",
    "h.transpose(1, 2)[:, 0] = 1.0",
    "h.copy_(h.flip(1).clone())",
    "h.relu_()",
    "h.masked_fill_(h < 0, 0.0)",
    "h[0] = 0.0",
    "h[-1] *= 2.0",
    "h.select(1, 2).zero_()",
    "g = h.detach(); g.mul_(1.5)",
    "g = h.data; g += 1.0",
    "g = h; g *= 2.0",
    "h.unsqueeze_(0); h = h.squeeze(0)",
    "torch.add(h, 1.0, out=(h := h.clone().detach()))",
    "h = h.index_put((torch.tensor([0]),), torch.zeros(LENGTH, WIDTH))",
]


def aliases() -> Iterator[Recipe]:
    """Names that the emitted code has too, calls with what is no tensor, values that are written to."""
    for name, read in itertools.product(PARAMETERS, READS):
        init = (f"self.{name} = nn.Parameter(torch.randn(WIDTH))",)
        use = read.replace("{n}", name)
        yield Recipe("aliases", f"parameter {name} in {read}", init=init, loop=(f"h = h + layer({use})",))
    for call, takes in CALLS:
        start = ["h = self.emb(x)"]
        start += [
            "y = pair[1] if isinstance(pair, tuple) else pair['y'] if isinstance(pair, dict) else pair[0]"
        ] * ("pair" in takes)
        start += ["h = h * (more if isinstance(more, (float, int, torch.Tensor)) else 1.0)"] * (
            "more" in takes
        )
        start += ["y = torch.cat((short, short[:, :2]), 1)"] * ("short" in takes)
        yield Recipe(
            "aliases",
            f"called with {call}",
            start=tuple(start),
            call=call,
            takes=takes.replace("more", "more"),
        )
    for write in WRITES:
        yield Recipe("aliases", write, loop=("h = h + layer(h)", write))
        yield Recipe("aliases", f"{write} before", start=("h = self.emb(x)", "layer = self.layers[0]", write))


MEDDLES = {  # on all ranks' tensors through pm, on the model: the same where both are what a user means
    "clip": ("pm.clip_grad_norm_(0.1)", "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)"),
    "torch's clip": (
        "torch.nn.utils.clip_grad_norm_(pm.parameters(), 0.1)",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
    ),
    "torch's clip, a list": (
        "torch.nn.utils.clip_grad_norm_(list(pm.parameters()), 0.1)",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
    ),
    "torch's clip without foreach": (
        "torch.nn.utils.clip_grad_norm_(pm.parameters(), 0.1, foreach=False)",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)",
    ),
    "torch's clip by value": (
        "torch.nn.utils.clip_grad_value_(pm.parameters(), 1e-3)",
        "torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)",
    ),
    "torch's optimizer": (
        "torch.optim.SGD(pm.parameters(), lr=0.1).step()",
        "torch.optim.SGD(model.parameters(), lr=0.1).step()",
    ),
    "parameters in place": (
        "[p.data.mul_(0.9) for p in pm.parameters()]",
        "[p.data.mul_(0.9) for p in model.parameters()]",
    ),
    "parameters in place, no_grad": (
        "torch._foreach_mul_([p.detach() for p in pm.parameters()], 0.9)",
        "torch._foreach_mul_([p.detach() for p in model.parameters()], 0.9)",
    ),
    "gradients in place": (
        "[p.grad.mul_(0.5) for p in pm.parameters() if p.grad is not None]",
        "[p.grad.mul_(0.5) for p in model.parameters() if p.grad is not None]",
    ),
    "norm by hand": (
        "n = torch.stack([p.grad.norm() for p in pm.parameters()]).norm(); [p.grad.div_(n) for p in pm.parameters()]",
        "n = torch.stack([p.grad.norm() for p in model.parameters()]).norm(); [p.grad.div_(n) for p in model.parameters()]",
    ),
    "one rank's gradients": (
        "[p.grad.mul_(2.0) for p in pm.rank_parameters(0).values() if p.grad is not None]",
        "1 / 0",
    ),
    "one rank's parameters": ("[p.data.add_(0.1) for p in pm.rank_parameters(0).values()]", "1 / 0"),
    "the last rank's gradients": (
        "[p.grad.mul_(2.0) for p in pm.rank_parameters(pm.options.mesh.size - 1).values() if p.grad is not None]",
        "1 / 0",
    ),
    "zero_grad of the model": ("[setattr(p, 'grad', None) for p in pm.parameters()]", "model.zero_grad()"),
}


def ranks() -> Iterator[Recipe]:
    """A user changes what the ranks hold. "1 / 0" of the model: nothing of the kind exists there, so it is to be refused."""
    for name, meddles in MEDDLES.items():
        yield Recipe("ranks", name, meddles=meddles)
        yield Recipe("ranks", f"{name}, tied", init=STORAGE["tie"], meddles=meddles)


FAMILIES = {one.__name__: one for one in (numbers, storage, buffers, state, probes, aliases, ranks)}
