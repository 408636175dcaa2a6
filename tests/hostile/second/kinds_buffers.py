"""Buffers that a forward updates: each part is a model's own way to do it."""

# ruff: noqa: E501  (lines of other sources)

from __future__ import annotations

from tests.hostile.second.source import Part

ZEROS = "self.register_buffer('{}', torch.zeros({}))"
ROUTE = """\
self.route = nn.Linear(W, 4, bias=False)
self.experts = nn.ModuleList(nn.Linear(W, W) for _ in range(4))
self.register_buffer("bias", torch.zeros(4))"""
ROUTED = """\
scores = self.route(h).sigmoid()
top = (scores + self.bias).topk(2, -1).indices
gate = torch.zeros_like(scores).scatter(-1, top, scores.gather(-1, top))
h = h + sum(gate[..., e : e + 1] * expert(h) for e, expert in enumerate(self.experts))
"""


def z(name: str, *size: str) -> str:
    return f"self.register_buffer('{name}', torch.zeros({', '.join(size) or '()'}))"


BUFFERS = [
    Part("counter", "self.register_buffer('calls', torch.zeros((), dtype=torch.long))", "self.calls += 1"),
    Part(
        "counter, not persistent, read",
        "self.register_buffer('quiet', torch.zeros(()), persistent=False)",
        "self.quiet += 1",
        end="h = h / (1 + 0.1 * self.quiet)",
    ),
    Part(
        "counter, read before and after",
        z("ticks"),
        "a = 1 / (1 + self.ticks)\nself.ticks.add_(1)\nb = self.ticks * 0.1",
        end="h = h * (a + b)",
    ),
    Part(
        "counter of layers, across stages",
        layer_init=z("seen"),
        layer="self.seen += i + 1\nh = h * (1 + 0.01 * self.seen)",
    ),
    Part(
        "counter in a float32 buffer",
        "self.register_buffer('f32', torch.zeros((), dtype=torch.float32))",
        "self.f32 += 0.1",
        end="h = h + self.f32",
    ),
    Part(
        "counter in int32, modulo",
        "self.register_buffer('i32', torch.zeros((), dtype=torch.int32))",
        "self.i32.add_(3).remainder_(7)",
        end="h = h * (1 + self.i32)",
    ),
    Part(
        "flag",
        "self.register_buffer('on', torch.tensor(False))\nself.register_buffer('base', torch.zeros(W))",
        end="m = h.detach().mean((0, 1))\nh = h - torch.where(self.on, self.base, torch.zeros_like(self.base))\nself.base.copy_(torch.where(self.on, 0.9 * self.base + 0.1 * m, m))\nself.on.fill_(True)",
    ),
    Part(
        "mean of a weight",
        layer_init=z("norm_of_up"),
        layer_end="self.norm_of_up = 0.9 * self.norm_of_up + 0.1 * self.up.weight.detach().norm()\nh = h * (1 + 0.01 * self.norm_of_up)",
    ),
    Part(
        "shadow of a weight",
        layer_init=z("shadow", "2 * W", "W"),
        layer_end="self.shadow.lerp_(self.up.weight.detach(), 0.25)\nh = h + 0.1 * F.linear(h, self.shadow)[..., :W]",
    ),
    Part(
        "shadow of a weight, under no_grad, with .data",
        layer_init="self.register_buffer('teacher', self.down.weight.detach().clone())",
        layer="h = h + 0.1 * F.linear(torch.cat([h, h], -1), self.teacher)",
        layer_end="with torch.no_grad():\n    self.teacher.mul_(0.9).add_(self.down.weight.data, alpha=0.1)",
    ),
    Part(
        "mean of the batch",
        layer_init=z("mean_", "W"),
        layer="h = h - self.mean_",
        layer_end="self.mean_.lerp_(h.detach().mean((0, 1)), 0.1)",
    ),
    Part(
        "mean of the batch, read after it",
        layer_init=z("late", "W"),
        layer_end="self.late.lerp_(h.detach().mean((0, 1)), 0.1)\nh = h - self.late",
    ),
    Part(
        "mean of squares, root in the update",
        layer_init="self.register_buffer('rms', torch.ones(W))",
        layer="h = h / self.rms",
        layer_end="self.rms.copy_((0.9 * self.rms**2 + 0.1 * h.detach().pow(2).mean((0, 1))).sqrt())",
    ),
    Part(
        "by hand: sum over number of rows",
        z("by_hand", "W"),
        end="self.by_hand = 0.5 * self.by_hand + 0.5 * h.detach().sum((0, 1)) / (ids.shape[0] * ids.shape[1])\nh = h + 0.1 * self.by_hand.detach() * 0",
    ),
    Part("rows seen, a number", z("rows"), "self.rows += ids.shape[0]"),
    Part(
        "tokens seen, numel",
        "self.register_buffer('tokens', torch.zeros((), dtype=torch.long))",
        "self.tokens += ids.numel()",
        end="h = h * (1 + 1e-3 * len(ids))",
    ),
    Part("tokens kept", z("kept"), "self.kept += keep.sum()"),
    Part(
        "masked mean",
        z("masked", "W"),
        end="self.masked.mul_(0.9).add_((h.detach() * keep[..., None]).sum((0, 1)) / keep.sum() * 0.1)",
    ),
    Part("largest", z("top_"), end="self.top_ = torch.maximum(self.top_, h.detach().abs().max())"),
    Part("variance", z("var_", "W"), end="self.var_.lerp_(h.detach().var((0, 1)), 0.1)"),
    Part(
        "variance of means",
        z("var2", "W"),
        end="x = h.detach()\nself.var2.lerp_((x * x).mean((0, 1)) - x.mean((0, 1)) ** 2, 0.1)",
    ),
    Part(
        "covariance",
        "self.register_buffer('cov', torch.eye(W))",
        end="x = h.detach().flatten(0, 1)\nself.cov.mul_(0.9).add_(x.T @ x, alpha=0.1 / x.shape[0])\nh = h @ self.cov.diagonal().rsqrt().diag()",
    ),
    Part(
        "covariance, read before",
        "self.register_buffer('cov2', torch.eye(W))",
        end="x = h.detach().flatten(0, 1)\nh = h * self.cov2.diagonal().rsqrt()\nself.cov2.mul_(0.9).add_(x.T @ x / len(x), alpha=0.1)",
    ),
    Part(
        "updated twice",
        z("twice", "W"),
        end="m = h.detach().mean((0, 1))\nself.twice.add_(m)\nself.twice.mul_(0.5)",
    ),
    Part(
        "two of the batch, one of the other",
        z("first", "W") + "\n" + z("second", "W"),
        end="self.first.lerp_(h.detach().mean((0, 1)), 0.5)\nself.second.lerp_(self.first, 0.5)",
    ),
    Part(
        "exchange",
        "self.register_buffer('a_', torch.ones(3))\nself.register_buffer('b_', torch.arange(3.0))",
        "old = self.a_.clone()\nself.a_.copy_(self.b_)\nself.b_.copy_(old + 1)",
        end="h = h + self.a_.sum() * 0.01",
    ),
    Part(
        "history, rolled",
        z("history", "4"),
        end="self.history = torch.cat([h.detach().mean()[None], self.history[:-1]])",
    ),
    Part(
        "history, by slices",
        z("hist", "4"),
        end="self.hist[1:] = self.hist[:-1].clone()\nself.hist[0] = h.detach().pow(2).mean()",
    ),
    Part(
        "ring, by a counter",
        z("ring", "3") + "\nself.register_buffer('at', torch.zeros((), dtype=torch.long))",
        end="self.ring[self.at] = h.detach().mean()\nself.at.add_(1).remainder_(3)",
    ),
    Part(
        "classes seen, |=",
        "self.register_buffer('met', torch.zeros(V, dtype=torch.bool))",
        "self.met |= F.one_hot(y, V).bool().any(0).any(0)",
        loss="return F.cross_entropy((logits - 0.1 * self.met).flatten(0, 1), y.flatten())",
    ),
    Part(
        "a flag that only a later step sets, |=",
        z("age") + "\nself.register_buffer('old', torch.tensor(False))",
        end="h = h * (1 - 0.5 * self.old.double())\nself.old |= self.age > 0\nself.age += 1",
    ),
    Part(
        "bits, ^= and <<=",
        "self.register_buffer('bits', torch.ones(V, dtype=torch.long))",
        "self.bits <<= 1\nself.bits ^= F.one_hot(y, V).sum((0, 1)) % 2",
        end="h = h * (1 + 1e-3 * self.bits[1])",
    ),
    Part("classes seen, one_hot", z("classes", "V"), "self.classes += F.one_hot(y, V).sum((0, 1))"),
    Part(
        "classes seen, bincount",
        "self.register_buffer('counted', torch.zeros(V, dtype=torch.long))",
        "self.counted += torch.bincount(y.flatten(), minlength=V)",
    ),
    Part(
        "classes seen, scatter_add_",
        z("scattered", "V"),
        "self.scattered.scatter_add_(0, y.flatten(), torch.ones(y.numel()))",
    ),
    Part(
        "classes seen, index_add_ of keep",
        z("indexed", "V"),
        "self.indexed.index_add_(0, y.flatten(), keep.flatten())",
    ),
    Part(
        "class weights of the classes seen",
        "self.register_buffer('balance', torch.ones(V))",
        loss="loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=1 / self.balance)\nself.balance += F.one_hot(y, V).sum((0, 1))\nreturn loss",
    ),
    Part(
        "class weights, counted first",
        "self.register_buffer('balance1', torch.ones(V))",
        "self.balance1 += F.one_hot(y, V).sum((0, 1))",
        loss="return F.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=1 / self.balance1)",
    ),
    Part(
        "mean of the loss",
        "self.register_buffer('ema', torch.ones(()))",
        loss="loss = F.cross_entropy(logits.flatten(0, 1), y.flatten())\nscale = self.ema\nself.ema = 0.9 * self.ema + 0.1 * loss.detach()\nreturn loss / scale",
    ),
    Part(
        "mean of the loss with ignored labels",
        z("ema_i"),
        loss="loss = F.cross_entropy(logits.flatten(0, 1), y.flatten(), ignore_index=1)\nself.ema_i.lerp_(loss.detach(), 0.1)\nreturn loss",
    ),
    Part(
        "center of DINO",
        z("center", "V"),
        loss="t = (logits.detach() - self.center).softmax(-1)\nloss = -(t * logits.log_softmax(-1)).sum(-1).mean()\nself.center = self.center * 0.9 + logits.detach().mean(dim=(0, 1)) * 0.1\nreturn loss + F.cross_entropy(logits.flatten(0, 1), y.flatten())",
    ),
    Part(
        "codebook",
        "self.register_buffer('book', torch.randn(5, W))\nself.register_buffer('size', torch.ones(5))\nself.register_buffer('total', self.book.clone())",
        end="flat = h.detach().flatten(0, 1)\nnear = F.one_hot((flat[:, None] - self.book).pow(2).sum(-1).argmin(-1), 5).to(h.dtype)\nh = h + 0.1 * (near @ self.book).view_as(h)\nself.size.mul_(0.9).add_(near.sum(0), alpha=0.1)\nself.total.mul_(0.9).add_(near.T @ flat, alpha=0.1)\nself.book.copy_(self.total / self.size[:, None])",
    ),
    *(
        Part(f"experts, balanced by {name}", layer_init=ROUTE, layer=ROUTED + how)
        for name, how in {
            "one_hot": "if self.training:\n    counts = F.one_hot(top, 4).sum((0, 1, 2))\n    self.bias += 0.01 * torch.sign(counts.double().mean() - counts)",
            "bincount, copy_": "counts = torch.bincount(top.flatten(), minlength=4).to(h.dtype)\nwith torch.no_grad():\n    self.bias.copy_(self.bias + 0.01 * (counts.mean() - counts).sign())",
            "a mean of gates": "self.bias.sub_(0.01 * torch.sign(gate.detach().mean((0, 1)) - 0.25))",
            "shares of softmax": "load = F.one_hot(top, 4).to(h.dtype).mean((0, 1, 2))\nself.bias = self.bias - 0.1 * (load - load.mean())",
            "histc": "counts = torch.histc(top.double(), bins=4, min=0, max=3)\nself.bias += 0.01 * torch.sign(counts.mean() - counts)",
            "a mask and a comparison": "counts = (top[..., None] == torch.arange(4)).sum((0, 1, 2))\nself.bias += torch.where(counts > counts.double().mean(), -0.01, 0.01)",
        }.items()
    ),
    *(
        Part(f"batch norm, {name}", layer_init=f"self.bn = {make}", layer=f"h = {use}", play=play)
        for name, make, use, play in [
            ("1d", "nn.BatchNorm1d(W)", "self.bn(h.transpose(1, 2)).transpose(1, 2)", {}),
            ("1d, flat", "nn.BatchNorm1d(W, affine=False)", "self.bn(h.flatten(0, 1)).view_as(h)", {}),
            (
                "1d, momentum None",
                "nn.BatchNorm1d(W, momentum=None)",
                "self.bn(h.transpose(1, 2)).transpose(1, 2)",
                {},
            ),
            ("1d, no running", "nn.BatchNorm1d(W, track_running_stats=False)", "self.bn(h.mT).mT", {}),
            (
                "2d",
                "nn.BatchNorm2d(W, eps=1e-2, momentum=0.3)",
                "self.bn(h.mT.unsqueeze(-1)).squeeze(-1).mT",
                {},
            ),
            (
                "2d, of the tokens",
                "nn.BatchNorm2d(L)",
                "self.bn(h.unflatten(-1, (4, W // 4)))" + ".flatten(2)",
                {},
            ),
            ("3d", "nn.BatchNorm3d(W)", "self.bn(h.mT[..., None, None]).flatten(2).mT", {}),
            ("in eval", "nn.BatchNorm1d(W).eval()", "self.bn(h.mT).mT", {}),
            (
                "functional",
                "nn.Module(); self.register_buffer('rm', torch.zeros(W)); self.register_buffer('rv', torch.ones(W))",
                "F.batch_norm(h.mT, self.rm, self.rv, training=self.training, momentum=0.2).mT",
                {},
            ),
            (
                "instance norm, running",
                "nn.InstanceNorm1d(W, track_running_stats=True)",
                "self.bn(h.mT).mT",
                {},
            ),
            (
                "spectral norm",
                "nn.utils.parametrizations.spectral_norm(nn.Linear(W, W))",
                "h + self.bn(h)",
                {},
            ),
            ("lazily shared", "nn.BatchNorm1d(W)", "self.bn(self.bn(h.mT)).mT", {}),
        ]
    ),
    Part(
        "shared by all layers",
        z("shared_", "W") + "\nfor block in self.blocks:\n    block.register_buffer('shared_', self.shared_)",
        layer_end="self.shared_.add_(h.detach().mean((0, 1)))",
    ),
    Part(
        "counter shared by all layers, read",
        z("clock") + "\nfor block in self.blocks:\n    block.register_buffer('clock', self.clock)",
        layer_end="self.clock.add_(1)\nh = h * (1 + 0.01 * self.clock)",
    ),
    Part(
        "counter of the root, read by layers",
        z("steps")
        + "\nself.blocks[0].counter = nn.Module()\nself.blocks[0].counter.register_buffer('steps', self.steps)",
        "self.steps += 1",
        end="h = h * (1 + self.blocks[0].counter.steps * 0.1)",
    ),
    Part(
        "a module that is called twice",
        "self.meter = Meter()",
        "",
        end="h = self.meter(self.meter(h))",
        top="class Meter(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.register_buffer('m', torch.zeros(W))\n\n    def forward(self, h):\n        out = h - self.m\n        self.m.lerp_(h.detach().mean((0, 1)), 0.2)\n        return out",
    ),
    Part(
        "an update by a helper",
        z("helped"),
        end="note(self, h)",
        top="def note(module, h):\n    module.helped += h.detach().mean()",
    ),
    Part(
        "an update through _buffers, setattr",
        z("one_") + "\n" + z("two_"),
        end="self._buffers['one_'] = self._buffers['one_'] + 1\nsetattr(self, 'two_', self.two_ + h.detach().mean())",
    ),
    Part("an update through .data", z("dat"), end="self.dat.data = self.dat.data + 1\nself.dat.data.add_(1)"),
    Part(
        "an update only in training",
        z("only", "W"),
        end="if self.training:\n    self.only += h.detach().mean((0, 1))\nh = h - self.only.detach() * 0.0",
    ),
    Part("an update in eval, too, read", z("both"), end="h = h * (1 + 0.1 * self.both)\nself.both += 1"),
    Part("positions' mean", z("by_place", "L", "W"), end="self.by_place.lerp_(h.detach().mean(0), 0.1)"),
    Part("the last row", z("row", "L", "W"), end="self.row.copy_(h.detach()[-1])"),
    Part(
        "quantiser's range",
        "self.register_buffer('scale', torch.ones(()))",
        end="h = h + ((h / self.scale).round() * self.scale - h).detach()\nself.scale.lerp_(h.detach().abs().mean(), 0.1)",
    ),
    Part(
        "temperature that decays",
        "self.register_buffer('temperature', torch.ones(()))",
        loss="logits = logits / self.temperature\nself.temperature = (self.temperature * 0.9).clamp(min=0.5)\nreturn F.cross_entropy(logits.flatten(0, 1), y.flatten())",
    ),
    Part("median, a quantile", z("med"), end="self.med.lerp_(h.detach().median(), 0.1)"),
    Part(
        "gradient of a buffer's reader",
        "self.register_buffer('gain', torch.ones(W))",
        end="h = h * self.gain\nself.gain = (self.gain + 0.1 * h.detach().abs().mean((0, 1))).clamp(max=2)",
    ),
    Part("out= of torch", z("out_", "W"), end="torch.mean(h.detach(), (0, 1), out=self.out_)"),
    Part("foreach", z("f1") + "\n" + z("f2"), end="torch._foreach_add_([self.f1, self.f2], 1.0)"),
    Part(
        "under checkpoint",
        layer_init=z("again"),
        layer="from torch.utils.checkpoint import checkpoint\nh = checkpoint(self.count, h, use_reentrant=False)",
        top="def count(self, h):\n    self.again += 1\n    return h * 1.01\n",
        more="Block.count = count",
        play={},
    ),
]
