"""Labels and class weights that are made of sums over the batch; evaluations with other numbers of rows; odd names."""

# ruff: noqa: E501, RUF001  (lines of other sources)

from __future__ import annotations

from tests.hostile.second.source import Part

CE = "F.cross_entropy(logits.flatten(0, 1), {y}.flatten(){more})"


def loss(name: str, lines: str, **slots: object) -> Part:
    return Part(name, loss=lines, **slots)  # type: ignore[arg-type]


COUNT = "n = F.one_hot(y, V).sum((0, 1)).double()\n"
LABELS = [
    loss("weights by inverse frequency", COUNT + "return " + CE.format(y="y", more=", weight=1 / (1 + n)")),
    loss(
        "weights, normed",
        COUNT + "w = n.sum() / (V * (n + 1))\nreturn " + CE.format(y="y", more=", weight=w / w.mean()"),
    ),
    loss(
        "weights by bincount",
        "n = torch.bincount(y.flatten(), minlength=V)\nreturn "
        + CE.format(y="y", more=", weight=1 / (1.0 + n.double())"),
    ),
    loss(
        "weights, effective number",
        COUNT + "return " + CE.format(y="y", more=", weight=(1 - 0.9) / (1 - 0.9 ** (n + 1))"),
    ),
    loss(
        "weights and ignored",
        COUNT + "return " + CE.format(y="y", more=", weight=1 / (1 + n), ignore_index=2"),
    ),
    loss(
        "weights, smoothed",
        COUNT + "return " + CE.format(y="y", more=", weight=1 / (1 + n), label_smoothing=0.1"),
    ),
    loss(
        "weights, sum divided by hand",
        COUNT
        + "w = 1 / (1 + n)\nreturn "
        + CE.format(y="y", more=", weight=w, reduction='sum'")
        + " / w[y].sum()",
    ),
    loss("rare classes ignored", COUNT + "return " + CE.format(y="torch.where(n[y] < 2, -100, y)", more="")),
    loss(
        "labels above the mean ignored",
        "m = y.double().mean()\nreturn " + CE.format(y="torch.where(y > m, -100, y)", more=""),
    ),
    loss(
        "labels masked_fill by the kept mean",
        "m = (y * keep).sum() / keep.sum()\nreturn " + CE.format(y="y.masked_fill(y < m, -100)", more=""),
    ),
    loss(
        "the most frequent class ignored",
        COUNT + "return " + CE.format(y="y.masked_fill(y == n.argmax(), -100)", more=""),
    ),
    loss(
        "class zero where few",
        COUNT + "return " + CE.format(y="torch.where(n.max() > 3, y, torch.zeros_like(y))", more=""),
    ),
    loss(
        "logit adjustment",
        COUNT + "return F.cross_entropy((logits + (n / n.sum() + 1e-3).log()).flatten(0, 1), y.flatten())",
    ),
    loss(
        "focal, balanced",
        COUNT
        + "p = -F.cross_entropy(logits.mT, y, reduction='none')\nreturn (-(1 - p.exp()) ** 2 * p / (1 + n[y])).mean()",
    ),
    loss(
        "nll_loss, weighted",
        COUNT + "return F.nll_loss(logits.log_softmax(-1).flatten(0, 1), y.flatten(), weight=1 / (1 + n))",
    ),
    loss(
        "binary, pos_weight",
        "t = (y > V // 2).double()\npos = t.sum() + 1\nreturn F.binary_cross_entropy_with_logits(logits[..., 0], t, pos_weight=(t.numel() - pos + 2) / pos)",
    ),
    loss(
        "binary, weight by the mean",
        "t = (y > V // 2).double()\nreturn F.binary_cross_entropy_with_logits(logits[..., 0], t, weight=t * t.mean() + 0.1)",
    ),
    loss(
        "targets centred",
        "t = y.double()\nreturn F.mse_loss(logits.mean(-1), (t - t.mean()) / (t.std() + 1e-3))",
    ),
    loss("targets whitened by a norm", "t = y.double()\nreturn F.mse_loss(logits.mean(-1), t / t.norm())"),
    loss(
        "soft labels of frequency",
        COUNT
        + "q = 0.9 * F.one_hot(y, V) + 0.1 * n / n.sum()\nreturn F.cross_entropy(logits.flatten(0, 1), q.flatten(0, 1))",
    ),
    loss(
        "ignored where not kept, divided by kept",
        "t = y.masked_fill(keep == 0, -100)\nreturn "
        + CE.format(y="t", more=", reduction='sum'")
        + " / keep.sum().clamp(min=1)",
    ),
    loss(
        "two losses, weights of one batch",
        COUNT
        + "w = 1 / (1 + n)\nreturn "
        + CE.format(y="y", more=", weight=w")
        + " + 0.1 * F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten(), weight=w)",
    ),
    loss(
        "a count of a count",
        COUNT + "few = (n > 0).sum()\nreturn " + CE.format(y="torch.where(y < few, y, -100)", more=""),
    ),
    loss(
        "weights by sample",
        "s = keep.sum(1)\nl = F.cross_entropy(logits.mT, y, reduction='none').mean(1)\nreturn (l * s).sum() / s.sum()",
    ),
    loss(
        "weights by sample, softmax over the batch",
        "s = keep.sum(1).softmax(0)\nl = F.cross_entropy(logits.mT, y, reduction='none').mean(1)\nreturn (l * s).sum()",
    ),
    loss(
        "longest row",
        "s = keep.sum(1) / keep.sum(1).max()\nl = F.cross_entropy(logits.mT, y, reduction='none').mean(1)\nreturn (l * s).mean()",
    ),
    loss(
        "weights of ids",
        "n = torch.bincount(ids.flatten(), minlength=V).double()\nl = F.cross_entropy(logits.mT, y, reduction='none')\nreturn (l / (1 + n[ids])).mean()",
    ),
    loss(
        "weights as a unique count",
        "u, n = y.unique(return_counts=True)\nreturn " + CE.format(y="y", more=""),
    ),
    Part("sums in the start", start="share = keep.mean()", end="h = h * share"),
    Part(
        "sums in the start and labels", start="top = ids.double().mean()\ny = torch.where(y > top, -100, y)"
    ),
    Part(
        "weights in the start, as a parameter's gradient",
        init="self.prior = nn.Parameter(torch.zeros(V))",
        start="n = F.one_hot(y, V).sum((0, 1)).double()",
        loss="return F.cross_entropy((logits + self.prior * (1 + n).log()).flatten(0, 1), y.flatten(), weight=1 / (1 + n))",
    ),
]
EVALS = [
    Part("mean"),
    loss("ignored", "return " + CE.format(y="y", more=", ignore_index=1")),
    loss("ignored by the mask", "return " + CE.format(y="y.masked_fill(keep == 0, -100)", more="")),
    loss("sum", "return " + CE.format(y="y", more=", reduction='sum'")),
    loss(
        "sum over kept",
        "l = F.cross_entropy(logits.mT, y, reduction='none')\nreturn (l * keep).sum() / keep.sum()",
    ),
    loss(
        "mean of rows' means",
        "l = F.cross_entropy(logits.mT, y, reduction='none')\nreturn ((l * keep).sum(1) / keep.sum(1)).mean()",
    ),
    loss(
        "sum over number of rows", "return " + CE.format(y="y", more=", reduction='sum'") + " / ids.shape[0]"
    ),
    loss(
        "view by B",
        "return F.cross_entropy(logits.view(ids.shape[0] * L, V), y.reshape(-1), label_smoothing=0.1)",
    ),
    loss("class weights", "w = torch.arange(1.0, V + 1)\nreturn " + CE.format(y="y", more=", weight=w")),
    loss("class weights of the batch", COUNT + "return " + CE.format(y="y", more=", weight=1 / (1 + n)")),
    loss("shifted", "return F.cross_entropy(logits[:, :-1].flatten(0, 1), y[:, 1:].flatten())"),
    loss("mse", "return F.mse_loss(logits.softmax(-1), F.one_hot(y, V).double())"),
    Part(
        "dropout off in eval",
        init="self.drop = nn.Dropout(0.0)",
        end="h = self.drop(h)\nif not self.training:\n    h = h * 1.5",
    ),
    Part(
        "counter in training only",
        init="self.register_buffer('n', torch.zeros(()))",
        end="if self.training:\n    self.n += 1\nh = h * (1 + 0.1 * self.n)",
    ),
    Part("batch norm", init="self.bn = nn.BatchNorm1d(W)", end="h = self.bn(h.mT).mT"),
    Part(
        "mean of the batch in a buffer",
        init="self.register_buffer('m', torch.zeros(W))",
        end="h = h - self.m\nif self.training:\n    self.m.lerp_(h.detach().mean((0, 1)), 0.1)",
    ),
    loss(
        "aux of rows", "return " + CE.format(y="y", more="") + " + 0.01 * logits.logsumexp(-1).pow(2).mean()"
    ),
    loss(
        "contrastive, all rows",
        "z = F.normalize(h.mean(1), dim=-1)\nreturn F.cross_entropy(z @ z.T, torch.arange(z.shape[0]))",
    ),
    loss(
        "pairs",
        "a, b = F.cross_entropy(logits.mT, y, reduction='none').mean(1).view(-1, 2).unbind(1)\nreturn -F.logsigmoid(b - a).mean()",
    ),
]
ODD = [
    "class",
    "lambda",
    "self",
    "forward_",
    "a b",
    "it's",
    'say "x"',
    "a)b(",
    "{x}",
    "{0}",
    "%s",
    "#hash",
    "back\\slash",
    "two\nlines",
    "tab\tx",
    "é",
    "名",
    "🙂",
    "x" * 130,
    "0",
    "007",
    "-",
    "a-b",
    "a/b",
    "[0]",
    "*",
    "?",
    "__x__",
    "_",
    "None",
    "True",
    "torch",
    "rt",
    "math",
    "'''",
    '"""',
    "\\",
    "\\n",
    "$HOME",
    "`x`",
    "a,b",
    "x=1",
    "\u202e",
    "\x00z",
    "\r",
    "\u2028",
    "ﬁ",
    "𝐱",
    "print",
    "h",
    "y",
    "loss",
    "ids",
    "p_x",
    "b_x",
    "args_0",
    "<img src=x>",
    "&amp;",
    "a:b",
    "weight",
    "bias",
    "(",
    ")",
    "((",
    "end\\",
    "{",
    "}",
    "f'{1/0}'",
    "x;import os",
    "..",
    "%(x)s",
    "letter",
    "\\u0041",
]


def name_parts() -> list[Part]:
    found = []
    for i in range(0, len(ODD), 2):
        a, b = ODD[i], ODD[(i + 1) % len(ODD)]
        if ".." in (a, b):
            a, b = "dot", "dots"
        found.append(
            Part(
                f"modules {a!r} and {b!r}",
                init=f"self.odd = nn.ModuleDict({{{a!r}: nn.Linear(W, W), {b!r} + '_': nn.Sequential(nn.Linear(W, W), nn.Tanh())}})",
                end=f"h = h + self.odd[{b!r} + '_'](self.odd[{a!r}](h))",
            )
        )
        found.append(
            Part(
                f"parameter {a!r}, buffer {b!r}",
                layer_init=f"self.register_parameter('p' + {a!r}, nn.Parameter(torch.randn(W, W) / 4))\nself.register_buffer('b' + {b!r}, torch.ones(W) * 0.5)",
                layer_end=f"h = h @ getattr(self, 'p' + {a!r}) * getattr(self, 'b' + {b!r})",
            )
        )
        found.append(
            Part(
                f"a counter {a!r}, updated by the batch in {b!r}",
                init=f"self.odd2 = nn.ModuleDict({{{a!r}: nn.Module()}})\nself.inner = self.odd2[{a!r}]\nself.inner.register_buffer('m' + {b!r}, torch.zeros(W))",
                end=f"m = getattr(self.inner, 'm' + {b!r})\nh = h - m\nm.lerp_(h.detach().mean((0, 1)), 0.3)",
            )
        )
        if a.strip():
            found.append(
                Part(
                    f"class {a!r}",
                    top=f"def forward(self, h):\n    return h + self.l(h)\n\n\ndef init(self):\n    nn.Module.__init__(self)\n    self.l = nn.Linear(W, W)\n\n\nOdd = type({a.replace(chr(0), '')!r}, (nn.Module,), {{'forward': forward, '__init__': init}})\nOdd.__module__ = {b!r}",
                    init="self.strange = Odd()\nself.strange.l.weight.data.mul_(0.5)",
                    end="h = self.strange(h)",
                )
            )
    return found


INPUTS = "self_ rt torch b world loss args kwargs rank labels input x_1 é h out print".split()
INPUTS += "scale stage batch data p module fn params micro F nn math add view mul_1 arange".split()
NAMES = name_parts() + [
    Part(
        f"inputs {a}, {b}",
        more=f"class Odd(Net):\n    def forward(self, {a}, {b}, keep):\n        return super().forward({a}, {b}, keep)\n\n\ndef make(variant=0):\n    torch.manual_seed(3)\n    return Odd()",
    )
    for a, b in zip(INPUTS[::2], INPUTS[1::2], strict=True)
]
