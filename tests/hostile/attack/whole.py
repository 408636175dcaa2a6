"""What stands around the layers: embeddings, ways through the layers, shared weights, heads with their losses, calls.

The model's forward begins with `ids` [b, L], `y` [b, L], `keep` [b, L] and whatever a call brings; it makes `h` [b, L, W] and
`memory` [b, L, W], and returns a loss.
"""

# ruff: noqa: E501  (lines of other sources)

from __future__ import annotations

from dataclasses import dataclass

from tests.hostile.attack.parts import Part

STARTS = [
    Part(
        "plain",
        "self.emb, self.pos = nn.Embedding(V, W), nn.Parameter(0.1 * torch.randn(L, W))",
        "h = self.emb(ids) + self.pos",
    ),
    Part(
        "positions by number",
        "self.emb, self.pos = nn.Embedding(V, W), nn.Embedding(L + 3, W)",
        "h = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))",
    ),
    Part(
        "positions counted from keep",
        "self.emb, self.pos = nn.Embedding(V, W), nn.Embedding(L + 1, W, padding_idx=0)",
        "h = self.emb(ids) + self.pos(keep.long().cumsum(1) * keep)",
    ),
    Part("padded", "self.emb = nn.Embedding(V, W, padding_idx=2)", "h = self.emb(ids) * W**0.5"),
    Part("padded from behind", "self.emb = nn.Embedding(V, W, padding_idx=-1)", "h = self.emb(ids)"),
    Part(
        "sines",
        "self.emb = nn.Embedding(V, W)",
        "angles = torch.arange(L)[:, None] / 50 ** (torch.arange(0, W, 2) / W)\ntable = torch.zeros(L, W)\ntable[:, : W // 2], table[:, W // 2 :] = angles.sin(), angles.cos()\nh = self.emb(ids) + table",
    ),
    Part(
        "one-hot",
        "self.emb = nn.Linear(V, W, bias=False)",
        "h = self.emb(F.one_hot(ids, V).to(self.emb.weight.dtype))",
    ),
    Part(
        "one-hot by a matrix",
        "self.table = nn.Parameter(torch.randn(V, W))",
        "h = F.one_hot(ids, V).to(self.table.dtype) @ self.table",
    ),
    Part("rows of a parameter", "self.table = nn.Parameter(torch.randn(V, W))", "h = self.table[ids]"),
    Part(
        "index_select",
        "self.table = nn.Parameter(torch.randn(V, W))",
        "h = self.table.index_select(0, ids.flatten()).view(*ids.shape, W)",
    ),
    Part(
        "gathered columns",
        "self.table = nn.Parameter(torch.randn(W, V))",
        "h = self.table[:, ids].permute(1, 2, 0)",
    ),
    Part(
        "factored",
        "self.emb, self.up = nn.Embedding(V, 3), nn.Linear(3, W, bias=False)",
        "h = self.up(self.emb(ids))",
    ),
    Part(
        "types of tokens",
        "self.emb, self.kind = nn.Embedding(V, W), nn.Embedding(2, W)",
        "h = self.emb(ids) + self.kind((ids > 3).long()) + self.kind.weight[0]",
    ),
    Part(
        "a token in front",
        "self.emb, self.first = nn.Embedding(V, W), nn.Parameter(torch.randn(1, 1, W))",
        "h = torch.cat([self.first.expand(ids.shape[0], -1, -1), self.emb(ids)[:, :-1]], 1)",
    ),
    Part(
        "prompt of parameters",
        "self.emb, self.prompt = nn.Embedding(V, W), nn.Embedding(2, W)",
        "h = torch.cat([self.prompt.weight.unsqueeze(0).repeat(len(ids), 1, 1), self.emb(ids[:, 2:])], 1)",
    ),
    Part(
        "masked tokens replaced",
        "self.emb, self.gone = nn.Embedding(V, W), nn.Parameter(torch.randn(W))",
        "h = torch.where(keep[..., None], self.emb(ids), self.gone)",
    ),
    Part(
        "masked tokens written",
        "self.emb, self.gone = nn.Embedding(V, W), nn.Parameter(torch.randn(W))",
        "h = self.emb(ids)\nh[~keep] = self.gone",
    ),
    Part(
        "masked_fill of ids", "self.emb = nn.Embedding(V, W)", "h = self.emb(ids.masked_fill(~keep, V - 1))"
    ),
    Part(
        "hashed",
        "self.emb, self.two = nn.Embedding(7, W), nn.Embedding(5, W)",
        "h = self.emb(ids % 7) + self.two((ids * 3 + 1) // 5 % 5)",
    ),
    Part(
        "pairs",
        "self.emb, self.two = nn.Embedding(V, W), nn.Embedding(V * V, W)",
        "h = self.emb(ids) + self.two(ids * V + F.pad(ids, (1, 0))[:, :-1])",
    ),
    Part(
        "normed, frozen",
        "self.emb, self.norm0 = nn.Embedding(V, W).requires_grad_(False), nn.LayerNorm(W)",
        "h = self.norm0(self.emb(ids))",
    ),
    Part(
        "from_pretrained",
        "self.emb = nn.Embedding.from_pretrained(torch.randn(V, W), freeze=False)",
        "h = self.emb(ids)",
    ),
    Part(
        "scaled down gradient",
        "self.emb = nn.Embedding(V, W)",
        "h = self.emb(ids)\nh = h * 0.1 + h.detach() * 0.9",
    ),
    Part(
        "values beside",
        "self.emb, self.of = nn.Embedding(V, W), nn.Linear(3, W)",
        "h = self.emb(ids) + self.of(values)",
    ),
    Part("values only", "self.of = nn.Sequential(nn.Linear(3, W), nn.Tanh())", "h = self.of(values)"),
    Part(
        "patches",
        "self.cut = nn.Conv1d(3, W, 3, padding=1)",
        "h = self.cut(values.transpose(1, 2)).transpose(1, 2)",
    ),
    Part("reversed", "self.emb = nn.Embedding(V, W)", "h = self.emb(ids.flip(1)).flip(1)"),
    Part(
        "sampled by where they are",
        "self.emb = nn.Embedding(V, W)\nself.register_buffer('order', torch.randperm(L))",
        "h = self.emb(ids)[:, self.order]",
    ),
    Part(
        "sum of several",
        "self.embs = nn.ModuleList(nn.Embedding(V, W) for _ in range(3))",
        "h = sum(emb((ids + n) % V) for n, emb in enumerate(self.embs))",
    ),
    Part(
        "concatenated",
        "self.embs = nn.ModuleList([nn.Embedding(V, W // 2), nn.Embedding(V, W // 4), nn.Embedding(V, W // 4)])",
        "h = torch.cat([emb(ids) for emb in self.embs], dim=-1)",
    ),
]
MEMORIES = [
    Part("from values", "self.remember = nn.Linear(3, W)", "memory = self.remember(values)"),
    Part("from h", "", "memory = h"),
    Part("from h, stopped", "", "memory = h.detach()"),
    Part(
        "an encoder",
        "self.remember = nn.TransformerEncoderLayer(W, H, 2 * W, dropout=0.0, batch_first=True, norm_first=True)",
        "memory = self.remember(h.flip(1))",
    ),
    Part(
        "no_grad teacher",
        "self.remember = nn.Linear(W, W)",
        "with torch.no_grad():\n    memory = self.remember(h)",
    ),
    Part(
        "parameters",
        "self.remember = nn.Parameter(torch.randn(L, W))",
        "memory = self.remember.expand(h.shape[0], L, W)",
    ),
]
STATES = [  # what the model keeps beside its weights: read by every layer, `h` goes in and out
    Part("nothing"),
    Part(
        "one buffer under two names",
        "scale = torch.rand(W)\nself.register_buffer('one', scale)\nself.register_buffer('two', scale)",
        "h = h * self.one + self.two",
    ),
    Part(
        "a buffer and its view",
        "self.register_buffer('one', torch.rand(W))\nself.register_buffer('two', self.one.view(1, W))",
        "h = h * self.one + self.two",
    ),
    Part(
        "a hidden twin",
        "self.register_buffer('one', torch.rand(W))\nself.register_buffer('two', self.one, persistent=False)",
        "h = h * self.two",
    ),
    Part(
        "a part of a buffer",
        "self.register_buffer('one', torch.rand(2, W))\nself.register_buffer('two', self.one[1])",
        "h = h * self.one[0] + self.two",
    ),
    Part(
        "an attribute over a buffer",
        "self.register_buffer('one', torch.rand(W))\nself.two = [self.one[None]]",
        "h = h * self.two[0]",
    ),
    Part(
        "buffers in evaluation",
        "self.register_buffer('one', torch.rand(W))\nself.register_buffer('two', torch.rand(W))",
        "h = h * self.one if self.training else h * self.two + self.one",
    ),
    Part(
        "buffers of numbers",
        "self.register_buffer('one', torch.tensor(3))\nself.register_buffer('two', torch.tensor(0.25))",
        "h = h / self.one + self.two",
    ),
    Part("a cached table", "", "h = h + table(h.shape[1], W)"),
    Part(
        "a table made once",
        "self.kept = {}",
        "if 'table' not in self.kept:\n    self.kept['table'] = torch.linspace(0, 1, W)\nh = h + self.kept['table']",
    ),
    Part("a late global count", "", "COUNTS['calls'] += 1\nh = h * (1 if COUNTS['calls'] < 900 else 2)"),
    Part(
        "a frozen copy of a weight",
        "self.register_buffer('one', self.blocks[0].norm1_weight().detach().clone())",
        "h = h + self.one",
    ),
    Part(
        "a frozen twin",
        "self.one = nn.Parameter(torch.rand(W), requires_grad=False)\nself.two = nn.Parameter(self.one.data, requires_grad=False)",
        "h = h * self.one + self.two",
    ),
]
LOOPS = [
    Part("plain", "", "for block in self.blocks:\n    h = block(h, keep, memory)"),
    Part(
        "by index",
        "",
        "for n in range(len(self.blocks)):\n    h = self.blocks[n](h, keep=keep, memory=memory)",
    ),
    Part("backwards", "", "for block in reversed(self.blocks):\n    h = block(h, keep, memory)"),
    Part(
        "checkpointed",
        "",
        "for block in self.blocks:\n    h = checkpoint(block, h, keep, memory, use_reentrant=False)",
    ),
    Part(
        "twice through all",
        "",
        "for _ in range(2):\n    for block in self.blocks:\n        h = block(h, keep, memory)",
    ),
    Part(
        "first block twice",
        "",
        "h = self.blocks[0](h, keep, memory)\nfor block in self.blocks:\n    h = block(h, keep, memory)",
    ),
    Part(
        "first block at the end",
        "",
        "for block in [*self.blocks, self.blocks[0]]:\n    h = block(h, keep, memory)",
    ),
    Part(
        "unet",
        "self.joins = nn.ModuleList(nn.Linear(2 * W, W) for _ in range(len(self.blocks) // 2))",
        "kept = []\nhalf = len(self.blocks) // 2\nfor n, block in enumerate(self.blocks):\n    if n < half:\n        kept.append(h)\n    elif kept:\n        h = self.joins[n - half](torch.cat([h, kept.pop()], -1))\n    h = block(h, keep, memory)",
    ),
    Part(
        "mean of all",
        "",
        "found = [h]\nfor block in self.blocks:\n    found.append(block(found[-1], keep, memory))\nh = torch.stack(found).mean(0)",
    ),
    Part(
        "weighted sum of all",
        "self.scales = nn.Parameter(torch.ones(len(self.blocks) + 1))",
        "found = [h]\nfor block in self.blocks:\n    found.append(block(found[-1], keep, memory))\nh = (torch.stack(found, -1) * self.scales.softmax(0)).sum(-1)",
    ),
    Part(
        "dense",
        "self.mixes = nn.ParameterList([torch.ones(n + 1) / (n + 1) for n in range(len(self.blocks))])",
        "found = [h]\nfor block, mix in zip(self.blocks, self.mixes):\n    found.append(block(sum(w * x for w, x in zip(mix, found)), keep, memory))\nh = found[-1]",
    ),
    Part(
        "first value again",
        "",
        "first = h\nfor n, block in enumerate(self.blocks):\n    h = block(h + first / (n + 1), keep, memory)",
    ),
    Part(
        "two streams",
        "",
        "other = h.flip(-1)\nfor block in self.blocks:\n    h, other = other, block(h, keep, other) + other",
    ),
    Part(
        "reversible",
        "",
        "a, b = h, h\nfor n, block in enumerate(self.blocks):\n    a, b = (a + block(b, keep, memory), b) if n % 2 else (a, b + block(a, keep, memory))\nh = (a + b) / 2",
    ),
    Part(
        "scales by layer",
        "self.gammas = nn.Parameter(torch.ones(len(self.blocks), W))",
        "for n, block in enumerate(self.blocks):\n    h = h + block(h, keep, memory) * self.gammas[n]",
    ),
    Part(
        "scales by unbind",
        "self.gammas = nn.Parameter(torch.ones(len(self.blocks), 1))",
        "for gamma, block in zip(self.gammas.unbind(0), self.blocks):\n    h = h + block(h, keep, memory) * gamma",
    ),
    Part(
        "scales by number",
        "self.gammas = [0.5 + n for n in range(len(self.blocks))]",
        "for gamma, block in zip(self.gammas, self.blocks):\n    h = h + block(h, keep, memory) / gamma",
    ),
    Part(
        "only some",
        "",
        "for n, block in enumerate(self.blocks):\n    h = h if n == 1 else block(h, keep, memory)",
    ),
    Part(
        "stopped in the middle",
        "",
        "for n, block in enumerate(self.blocks):\n    h = block(h.detach() if n == 2 else h, keep, memory)",
    ),
    Part(
        "two parts of the width",
        "",
        "for block in self.blocks:\n    h = torch.cat([block(h, keep, memory)[..., : W // 2], h[..., W // 2 :]], -1)",
    ),
    Part(
        "written in place",
        "",
        "for n, block in enumerate(self.blocks):\n    h = h.clone()\n    h += block(h.clone(), keep, memory)\n    h[:, n % L] *= 0.5",
    ),
    Part(
        "memory goes on",
        "",
        "for block in self.blocks:\n    memory = memory + 0.1 * h\n    h = block(h, keep, memory)",
    ),
    Part(
        "mask goes on",
        "",
        "for n, block in enumerate(self.blocks):\n    h = block(h, keep | (torch.arange(L) <= n), memory)",
    ),
    Part(
        "weights averaged over layers",
        "",
        "mean = sum(block.norm1_weight() for block in self.blocks) / len(self.blocks)\nfor block in self.blocks:\n    h = block(h, keep, memory) + mean",
    ),
]
SHARED = [
    Part("nothing"),
    Part(
        "head and table",
        "if hasattr(self, 'emb') and isinstance(self.emb, nn.Embedding) and self.emb.weight.shape == self.head.weight.shape:\n    self.head.weight = self.emb.weight",
    ),
    Part(
        "mlps of pairs",
        "for n in range(1, len(self.blocks), 2):\n    self.blocks[n].mlp = self.blocks[n - 1].mlp",
    ),
    Part("mixers of all", "for block in self.blocks:\n    block.mixer = self.blocks[0].mixer"),
    Part("second norms of all", "for block in self.blocks[1:]:\n    block.norm2 = self.blocks[0].norm2"),
    Part("first and last", "self.blocks[-1] = self.blocks[0]"),
    Part("within a block", "for block in self.blocks:\n    block.norm2 = block.norm1"),
    Part(
        "one parameter of each",
        "for block in self.blocks[1:]:\n    for name, p in list(self.blocks[0].mlp.named_parameters(recurse=False)):\n        setattr(block.mlp, name, p)",
    ),
]
CE = "F.cross_entropy(logits.flatten(0, 1), y.flatten())"
PLAIN_HEAD = "self.norm, self.head = nn.LayerNorm(W), nn.Linear(W, V, bias=False)"
LOGITS = "logits = self.head(self.norm(h))"
HEADS = [
    Part("plain", PLAIN_HEAD, f"{LOGITS}\nreturn {CE}"),
    Part(
        "with bias",
        "self.norm, self.head = nn.LayerNorm(W), nn.Linear(W, V)",
        f"{LOGITS}\nreturn F.cross_entropy(logits.view(-1, V), y.view(-1), label_smoothing=0.1)",
    ),
    Part(
        "moved by one",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn F.cross_entropy(logits[:, :-1].reshape(-1, V), ids[:, 1:].reshape(-1))",
    ),
    Part(
        "moved by one, padded labels",
        PLAIN_HEAD,
        f"{LOGITS}\nlabels = F.pad(ids, (0, 1), value=-100)[..., 1:].contiguous()\nreturn F.cross_entropy(logits.float().double().view(-1, V), labels.view(-1), ignore_index=-100)",
    ),
    Part(
        "unequal shares of labels",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn F.cross_entropy(logits.mT, y.masked_fill(~keep, -100))",
    ),
    Part(
        "ignored, smoothed, weighted",
        f"{PLAIN_HEAD}\nself.register_buffer('weights', torch.linspace(0.5, 2, V))",
        f"{LOGITS}\nreturn F.cross_entropy(logits.flatten(0, 1), y.flatten(), weight=self.weights, ignore_index=1, label_smoothing=0.1)",
    ),
    Part("sum", PLAIN_HEAD, f"{LOGITS}\nreturn F.cross_entropy(logits.mT, y, reduction='sum')"),
    Part(
        "sum over a number",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn F.cross_entropy(logits.mT, y, reduction='sum') / 7 + 0.25",
    ),
    Part(
        "by log_softmax and gather",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn -logits.log_softmax(-1).gather(-1, y.unsqueeze(-1)).squeeze(-1).mean()",
    ),
    Part(
        "by logsumexp",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn (logits.logsumexp(-1) - logits.gather(-1, y[..., None])[..., 0]).sum(1).mean(0)",
    ),
    Part(
        "nll of a masked log_softmax",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn F.nll_loss(F.log_softmax(logits, -1).flatten(0, 1), y.flatten(), ignore_index=3)",
    ),
    Part(
        "nll by sample",
        PLAIN_HEAD,
        f"{LOGITS}\nlosses = F.cross_entropy(logits.mT, y, reduction='none')\nreturn (losses * keep).sum(-1).div(keep.sum(-1).clamp(min=1)).mean()",
    ),
    Part(
        "weights of samples",
        PLAIN_HEAD,
        f"{LOGITS}\nlosses = F.cross_entropy(logits.mT, y, reduction='none').mean(1)\nreturn (losses * values[:, 0, 0].exp()).mean()",
    ),
    Part(
        "weights of tokens by place",
        PLAIN_HEAD,
        f"{LOGITS}\nlosses = F.cross_entropy(logits.mT, y, reduction='none')\nreturn (losses * torch.linspace(0, 1, L)).sum() / 10",
    ),
    Part(
        "focal",
        PLAIN_HEAD,
        f"{LOGITS}\nlosses = F.cross_entropy(logits.mT, y, reduction='none')\nreturn ((1 - (-losses).exp()) ** 2 * losses).mean()",
    ),
    Part("capped", PLAIN_HEAD, f"{LOGITS}\nlogits = 30 * torch.tanh(logits / 30)\nreturn {CE}"),
    Part("z-loss", PLAIN_HEAD, f"{LOGITS}\nreturn {CE} + 1e-2 * logits.logsumexp(-1).square().mean()"),
    Part(
        "weight of the table",
        PLAIN_HEAD,
        "logits = F.linear(self.norm(h), self.head.weight * 2) / W**0.5\nreturn F.cross_entropy(logits.flatten(0, 1), y.flatten())",
    ),
    Part(
        "transposed head",
        f"{PLAIN_HEAD}\nself.top = nn.Parameter(torch.randn(W, V) / W)",
        "logits = self.norm(h) @ self.top\nreturn F.cross_entropy(logits.transpose(1, 2), y)",
    ),
    Part(
        "last kept token",
        PLAIN_HEAD,
        f"{LOGITS}\nat = keep.long().sum(1) - 1\nlogits = logits.gather(1, at.view(-1, 1, 1).expand(-1, 1, V)).squeeze(1)\nreturn F.cross_entropy(logits, y[:, 0])",
    ),
    Part(
        "last kept token, by index",
        PLAIN_HEAD,
        f"{LOGITS}\nlogits = logits[torch.arange(len(ids)), keep.long().sum(1) - 1]\nreturn F.cross_entropy(logits, y[:, 0])",
    ),
    Part(
        "pooled by keep",
        PLAIN_HEAD,
        "weights = keep[..., None].to(h.dtype)\nh = (h * weights).sum(1) / weights.sum(1).clamp(min=1)\nreturn F.cross_entropy(self.head(self.norm(h)), y[:, -1])",
    ),
    Part(
        "attention pooling",
        f"{PLAIN_HEAD}\nself.query = nn.Parameter(torch.randn(W))",
        "h = ((h @ self.query).masked_fill(~keep, -1e4).softmax(1)[..., None] * h).sum(1)\nreturn F.cross_entropy(self.head(self.norm(h)), y[:, 1])",
    ),
    Part(
        "max pooling",
        PLAIN_HEAD,
        "return F.cross_entropy(self.head(self.norm(h.masked_fill(~keep[..., None], float('-inf')).amax(1))), y[:, 1])",
    ),
    Part(
        "a reward",
        "self.head = nn.Linear(W, 1)",
        "return F.mse_loss(self.head(h).squeeze(-1), values[..., 0])",
    ),
    Part(
        "a reward by a vector",
        "self.head, self.norm = nn.Linear(W, V), nn.LayerNorm(W)\nself.v = nn.Parameter(torch.randn(W))",
        "return F.huber_loss(torch.mv(self.norm(h).reshape(-1, W), self.v), values[..., 1].reshape(-1)) + 0 * self.head(h).mean()",
    ),
    Part(
        "a reward, last",
        "self.head = nn.Linear(W, 1, bias=False)",
        "r = self.head(h)[:, -1, 0]\nreturn -F.logsigmoid(r * values[:, 0, 2].sign()).mean()",
    ),
    Part(
        "better and worse",
        "self.head = nn.Linear(W, 1)",
        "good, bad = self.head(h.mean(1)).squeeze(1), self.head(memory.mean(1)).squeeze(1)\nreturn -F.logsigmoid(good - bad - 0.1).mean() + 0.01 * (good + bad).square().mean()",
    ),
    Part(
        "two heads",
        f"{PLAIN_HEAD}\nself.value = nn.Linear(W, 3)",
        f"{LOGITS}\nreturn 0.7 * {CE} + F.smooth_l1_loss(self.value(h), values, beta=0.5) * 0.3",
    ),
    Part(
        "next and the one after",
        f"{PLAIN_HEAD}\nself.after = nn.ModuleList(nn.Linear(W, W) for _ in range(2))",
        "loss = 0\nfor n, layer in enumerate(self.after):\n    logits = self.head(self.norm(layer(h)))[:, : L - n - 1]\n    loss = loss + F.cross_entropy(logits.flatten(0, 1), ids[:, n + 1 :].flatten()) / (n + 1)\nreturn loss",
    ),
    Part(
        "two losses of one kind, other counts",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn F.cross_entropy(logits.mT, y.masked_fill(~keep, -100)) + 0.5 * F.cross_entropy(logits.mT, ids, ignore_index=4)",
    ),
    Part(
        "mse with a sum",
        PLAIN_HEAD,
        "return F.mse_loss(h[..., :3], values, reduction='sum') * 0.01 + self.head(self.norm(h)).square().mean()",
    ),
    Part(
        "bce of many labels",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn F.binary_cross_entropy_with_logits(logits.mean(1), F.one_hot(y, V).amax(1).to(h.dtype), pos_weight=torch.full((V,), 3.0))",
    ),
    Part(
        "kl to a frozen teacher",
        f"{PLAIN_HEAD}\nself.teacher = nn.Linear(W, V).requires_grad_(False)",
        f"{LOGITS}\nwith torch.no_grad():\n    wanted = self.teacher(h).log_softmax(-1)\nreturn F.kl_div(logits.log_softmax(-1), wanted, log_target=True, reduction='none').sum(-1).mean()",
    ),
    Part(
        "kl, batchmean over tokens",
        f"{PLAIN_HEAD}\nself.teacher = nn.Linear(W, V).requires_grad_(False)",
        f"{LOGITS}\nreturn F.kl_div(logits.log_softmax(-1).flatten(0, 1), self.teacher(h.detach()).softmax(-1).flatten(0, 1), reduction='batchmean')",
    ),
    Part(
        "soft labels",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn F.cross_entropy(logits.flatten(0, 1), (F.one_hot(y, V) * 0.9 + 0.1 / V).flatten(0, 1))",
    ),
    Part(
        "entropy bonus",
        PLAIN_HEAD,
        f"{LOGITS}\np = logits.softmax(-1)\nreturn {CE} - 0.01 * -(p * p.log()).sum(-1).mean()",
    ),
    Part(
        "clipped policy",
        PLAIN_HEAD,
        f"{LOGITS}\nratio = (logits.log_softmax(-1).gather(-1, y[..., None])[..., 0] + 3).exp()\ngain = values[..., 0]\nreturn -torch.min(ratio * gain, ratio.clamp(0.8, 1.2) * gain).mean()",
    ),
    Part("hinge", PLAIN_HEAD, f"{LOGITS}\nreturn F.multi_margin_loss(logits[:, 0], y[:, 0])"),
    Part(
        "cosine",
        PLAIN_HEAD,
        "return (1 - F.cosine_similarity(self.norm(h), memory.detach() + 1e-3, dim=-1)).mean()",
    ),
    Part(
        "ctc-like forward sums",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn -logits.log_softmax(-1)[..., 0].cumsum(1).logsumexp(1).mean()",
    ),
    Part(
        "weight decay in the loss",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn {CE} + 1e-3 * self.head.weight.square().sum()",
    ),
    Part(
        "all weights in the loss",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn {CE} + 1e-3 * sum(p.square().sum() for p in self.parameters())",
    ),
    Part(
        "loss does not read the layers",
        f"{PLAIN_HEAD}\nself.extra = nn.Parameter(torch.zeros(3))",
        "return (self.extra - values).square().mean()",
    ),
    Part(
        "masked by product, over all",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn (F.cross_entropy(logits.mT, y, reduction='none') * keep).sum() / keep.sum()",
    ),
    Part(
        "mean over heads of heads",
        "self.heads = nn.ModuleList(nn.Linear(W, V) for _ in range(3))",
        "return torch.stack([F.cross_entropy(head(h).mT, (y + n) % V) for n, head in enumerate(self.heads)]).mean()",
    ),
    Part(
        "heads as one matrix",
        "self.heads = nn.Linear(W, 2 * V)",
        "logits = self.heads(h).view(-1, L, 2, V)\nreturn F.cross_entropy(logits.permute(0, 3, 1, 2), torch.stack([ids, y], -1))",
    ),
    Part("tuple", PLAIN_HEAD, f"{LOGITS}\nreturn logits, {CE}"),
    Part("dict", PLAIN_HEAD, f"{LOGITS}\nreturn {{'loss': {CE}, 'logits': logits}}"),
    Part("named tuple", PLAIN_HEAD, f"{LOGITS}\nreturn Out(loss={CE}, logits=logits, more=None)"),
    Part("dataclass", PLAIN_HEAD, f"{LOGITS}\nreturn Record(logits, {CE})"),
    Part(
        "divided by a number of inputs",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn F.cross_entropy(logits.mT, y, reduction='sum') / y.numel()",
    ),
    Part(
        "divided by rows",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn F.cross_entropy(logits.mT, y, reduction='sum') / len(y)",
    ),
    Part(
        "scalar of a scalar",
        PLAIN_HEAD,
        f"{LOGITS}\nreturn ({CE} * torch.tensor(2.0)).reshape(1).squeeze().double()",
    ),
    Part("negative and back", PLAIN_HEAD, f"{LOGITS}\nreturn -(1 - {CE}) + 1"),
]


@dataclass(frozen=True)
class Call:
    """How the model is called: what forward takes, what `batch` passes, and the lines that make ids, y, keep, values of it."""

    name: str
    takes: str = "ids, y, keep, values"
    passes: str = "ids, y, keep, values"
    start: str = ""


CALLS = [
    Call("plain"),
    Call("by keyword", passes="ids=ids, y=y, keep=keep, values=values"),
    Call("both ways", passes="ids, y, values=values, keep=keep"),
    Call(
        "a dict",
        "batch",
        "{'ids': ids, 'y': y, 'keep': keep, 'values': values}",
        "ids, y, keep, values = (batch[key] for key in ('ids', 'y', 'keep', 'values'))",
    ),
    Call(
        "keywords of all kinds",
        "self_, **batch",
        "ids, values=values, y=y, keep=keep",
        "ids, (y, keep, values) = self_, (batch[key] for key in ('y', 'keep', 'values'))",
    ),
    Call("any number", "*args", "ids, y, keep, values", "ids, y, keep, values = args"),
    Call(
        "nested",
        "pair, rest",
        "(ids, [y]), {'w': (keep, None), 'F': values}",
        "(ids, (y,)), keep, values = pair, rest['w'][0], rest['F']",
    ),
    Call("with None", "ids, y, keep=None, values=None, more=None, past=None", "ids, y, keep, values, None"),
    Call(
        "with numbers and words",
        "ids, y, keep, values, scale, mode, flag",
        "ids, y, keep, values, 2, 'mean', True",
        "values = values * scale if flag and mode == 'mean' else values",
    ),
    Call(
        "with a 0-d tensor",
        "ids, y, keep, values, scale",
        "ids, y, keep, values, torch.tensor(0.5, dtype=values.dtype)",
        "values = values * scale",
    ),
    Call(
        "with a table that is no batch",
        "ids, y, keep, values, table",
        "ids, y, keep, values, torch.randn(3, L + B + 1, generator=draw, dtype=values.dtype)[:, :L].clone()",
        "values = values * table.t()",
    ),
    Call(
        "names of the emitted code",
        "w, F_, tp, rt",
        "ids, y, keep, values",
        "ids, y, keep, values = w, F_, tp, rt",
    ),
    Call("more names", "x, layer, i, h", "ids, y, keep, values", "ids, y, keep, values = x, layer, i, h"),
    Call("int32 ids", passes="ids.int(), y, keep, values", start="ids = ids.long()"),
    Call("float mask", passes="ids, y, keep.to(values.dtype), values", start="keep = keep > 0.5"),
    Call(
        "lengths", passes="ids, y, keep.long().sum(1), values", start="keep = torch.arange(L) < keep[:, None]"
    ),
    Call("mask of four dims", passes="ids, y, keep[:, None, None], values", start="keep = keep[:, 0, 0]"),
    Call("labels are the ids", passes="ids, ids, keep, values"),
    Call(
        "one tensor of both",
        "both, keep, values",
        "torch.stack([ids, y], 1), keep, values",
        "ids, y = both.unbind(1)",
    ),
    Call(
        "one longer tensor",
        "both, keep, values",
        "torch.cat([ids, y[:, -1:]], 1), keep, values",
        "ids, y = both[:, :-1], both[:, 1:]",
    ),
    Call(
        "noncontiguous",
        passes="ids.t().contiguous().t(), y, keep, values.transpose(1, 2).contiguous().transpose(1, 2)",
    ),
    Call(
        "named tuple",
        "record",
        "Four(ids, y, keep, values)",
        "ids, y, keep, values = record.ids, record.y, record.keep, record.values",
    ),
]
