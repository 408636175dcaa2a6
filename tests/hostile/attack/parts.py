"""Parts of small transformers, as lines of source. Nothing here knows what AutoPTD does with them.

A part has a name, lines for `__init__` (where `i` is the number of the layer) and lines of its method. Sizes are the globals
B (rows), L (tokens), W (width), H (heads), D = W / H, V (vocabulary). A mixer gets normed `h` [b, L, W], `keep` [b, L] (True
where a token counts) and `memory` [b, L, W], another sequence.
"""

# ruff: noqa: E501  (lines of other sources)

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    name: str
    init: str = ""
    use: str = ""


QKV = "self.qkv, self.out = nn.Linear(W, 3 * W), nn.Linear(W, W)"
SPLIT = "q, k, v = (x.unflatten(-1, (H, D)).transpose(1, 2) for x in self.qkv(h).chunk(3, -1))"
MERGE = "return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))"
CAUSAL = "masked_fill(torch.ones(L, L, dtype=torch.bool).triu(1), float('-inf'))"
APART = "self.q, self.k, self.v, self.out = (nn.Linear(W, W, bias=i != 3) for _ in range(4))"
GROUPED = (
    "self.q, self.kv, self.out = nn.Linear(W, W), nn.Linear(W, 2 * D * (H // 2)), nn.Linear(W, W, bias=False)"
)
GROUPS = """\
q = self.q(h).view(-1, L, H, D).transpose(1, 2)
k, v = self.kv(h).view(-1, L, 2, H // 2, D).permute(2, 0, 3, 1, 4)"""

MIXERS = [
    Part("plain", QKV, f"{SPLIT}\nscores = (q @ k.mT * D**-0.5).{CAUSAL}\n{MERGE}"),
    Part(
        "sdpa",
        QKV,
        f"{SPLIT}\nh = F.scaled_dot_product_attention(q, k, v, is_causal=True)\nreturn self.out(h.transpose(1, 2).reshape(-1, L, W))",
    ),
    Part(
        "sdpa, scale of the layer",
        f"{QKV}\nself.scale = 1 / (i + 2)",
        f"{SPLIT}\nh = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=self.scale)\nreturn self.out(h.transpose(1, 2).flatten(2))",
    ),
    Part(
        "einsum",
        APART,
        """\
q, k, v = (layer(h).view(-1, L, H, D) for layer in (self.q, self.k, self.v))
scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(D)
scores = scores.masked_fill(~keep[:, None, None, :], -1e9)
return self.out(torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(-2))""",
    ),
    Part(
        "bmm, heads folded into rows",
        QKV,
        """\
q, k, v = self.qkv(h).view(-1, L, 3, H, D).permute(2, 0, 3, 1, 4).reshape(3, -1, L, D)
scores = torch.baddbmm(torch.zeros(1, L, L, dtype=h.dtype).triu(1) - 0.0, q, k.transpose(1, 2), alpha=D**-0.5)
return self.out(torch.bmm(scores.softmax(dim=2), v).view(-1, H, L, D).permute(0, 2, 1, 3).reshape(-1, L, W))""",
    ),
    Part(
        "interleaved by head",
        QKV,
        f"q, k, v = self.qkv(h).view(-1, L, H, 3 * D).transpose(1, 2).split(D, -1)\nscores = q @ k.mT / (1 + self.i)\n{MERGE}",
    ),
    Part(
        "grouped, repeat_interleave",
        GROUPED,
        f"{GROUPS}\nk, v = (x.repeat_interleave(2, 1) for x in (k, v))\nscores = (q @ k.mT * D**-0.5).{CAUSAL}\n{MERGE}",
    ),
    Part(
        "grouped, expanded",
        GROUPED,
        f"{GROUPS}\nk, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).reshape(-1, H, L, D) for x in (k, v))\nscores = q @ k.mT\n{MERGE}",
    ),
    Part(
        "grouped, enable_gqa",
        GROUPED,
        f"{GROUPS}\nh = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)\nreturn self.out(h.transpose(1, 2).flatten(2))",
    ),
    Part(
        "grouped, five dims",
        GROUPED,
        """\
q = self.q(h).view(-1, L, H // 2, 2, D)
k, v = self.kv(h).view(-1, L, H // 2, 2, D).unbind(3)
scores = torch.einsum("bqgrd,bkgd->bgrqk", q, k)
return self.out(torch.einsum("bgrqk,bkgd->bqgrd", scores.softmax(-1), v).reshape(-1, L, W))""",
    ),
    Part(
        "one head of keys",
        "self.q, self.kv, self.out = nn.Linear(W, W), nn.Linear(W, 2 * D), nn.Linear(W, W)",
        f"q = self.q(h).unflatten(-1, (H, D)).transpose(1, 2)\nk, v = self.kv(h).unsqueeze(1).chunk(2, -1)\nscores = (q @ k.mT).{CAUSAL}\n{MERGE}",
    ),
    Part(
        "alibi of Python numbers",
        QKV,
        f"""\
{SPLIT}
slopes = torch.tensor([2.0 ** (-8 * (head + 1) / H) for head in range(H)], dtype=h.dtype)
distance = torch.arange(L)[None, :] - torch.arange(L)[:, None]
scores = (q @ k.mT + slopes[:, None, None] * distance).{CAUSAL}
{MERGE}""",
    ),
    Part(
        "alibi as a buffer",
        f"{QKV}\nself.register_buffer('slopes', torch.arange(1.0, H + 1).view(H, 1, 1) / (i + 1))",
        f"{SPLIT}\nscores = q @ k.mT - self.slopes * (torch.arange(L)[:, None] - torch.arange(L)).abs()\n{MERGE}",
    ),
    Part(
        "rotary, halves",
        f"{QKV}\nself.register_buffer('angles', torch.outer(torch.arange(L), (10.0 + i) ** -torch.arange(D // 2)), persistent=False)",
        f"""\
{SPLIT}
cos, sin = (torch.cat([x, x], -1) for x in (self.angles.cos(), self.angles.sin()))
q, k = (x * cos + torch.cat([-x[..., D // 2 :], x[..., : D // 2]], -1) * sin for x in (q, k))
scores = (q @ k.mT).{CAUSAL}
{MERGE}""",
    ),
    Part(
        "rotary, interleaved",
        QKV,
        f"""\
{SPLIT}
angles = torch.arange(L)[:, None] * (100.0 ** (-torch.arange(0, D, 2) / D))[None, :]
cos, sin = angles.cos().repeat_interleave(2, -1), angles.sin().repeat_interleave(2, -1)
q, k = (x * cos + torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2) * sin for x in (q, k))
scores = (q @ k.mT).{CAUSAL}
{MERGE}""",
    ),
    Part(
        "rotary, complex",
        f"{QKV}\nself.register_buffer('turns', torch.polar(torch.ones(L, D // 2).double(), torch.arange(L)[:, None] * torch.rand(D // 2).double()))",
        f"""\
{SPLIT}
q, k = (torch.view_as_real(torch.view_as_complex(x.reshape(*x.shape[:-1], -1, 2)) * self.turns).flatten(3) for x in (q, k))
scores = (q @ k.mT).{CAUSAL}
{MERGE}""",
    ),
    Part(
        "rotary, part of the head, in place",
        QKV,
        f"""\
{SPLIT}
half, angle = D // 2, torch.arange(L, dtype=h.dtype)[:, None] / (self.i + 1)
q, k = q.clone(), k.clone()
for x in (q, k):
    turned = x[..., :half] * angle.cos()
    x[..., :half] = turned
scores = (q @ k.mT).{CAUSAL}
{MERGE}""",
    ),
    Part(
        "window of the layer",
        f"{QKV}\nself.window = 1 + i % 3",
        f"{SPLIT}\nnear = (torch.arange(L)[:, None] - torch.arange(L)).abs() <= self.window\nscores = (q @ k.mT).where(near, torch.tensor(-1e30, dtype=h.dtype))\n{MERGE}",
    ),
    Part(
        "windows in turn, as buffers",
        f"{QKV}\nself.register_buffer('mask', torch.ones(L, L).tril(-i % 2) - torch.ones(L, L).tril(-3 - i % 2) + torch.eye(L))",
        f"{SPLIT}\nscores = (q @ k.mT * D**-0.5).masked_fill(self.mask == 0, float('-inf'))\n{MERGE}",
    ),
    Part(
        "keys normed, one scale a head",
        f"{QKV}\nself.tau = nn.Parameter(torch.ones(H, 1, 1) * (i + 1))",
        f"{SPLIT}\nscores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).mT * self.tau.clamp(max=3.5)\n{MERGE}",
    ),
    Part(
        "norms of heads",
        f"{QKV}\nself.qn, self.kn = nn.LayerNorm(D), nn.LayerNorm((H, L, D)[2:])",
        f"{SPLIT}\nscores = (self.qn(q) @ self.kn(k).mT).{CAUSAL}\n{MERGE}",
    ),
    Part(
        "sinks",
        f"{QKV}\nself.sink = nn.Parameter(torch.randn(H))",
        f"""\
{SPLIT}
scores = q @ k.mT
scores = torch.cat([self.sink.view(1, H, 1, 1).expand(h.shape[0], -1, L, 1), scores], -1).softmax(-1)[..., 1:]
return self.out((scores @ v).transpose(1, 2).flatten(2))""",
    ),
    Part(
        "soft cap",
        f"{QKV}\nself.cap = 20.0 + i",
        f"{SPLIT}\nscores = torch.tanh(q @ k.mT / self.cap) * self.cap\nscores = scores.{CAUSAL}\n{MERGE}",
    ),
    Part(
        "differential",
        f"{QKV}\nself.mix_ = nn.Parameter(torch.zeros(H // 2))\nself.start = 0.8 - 0.6 * math.exp(-0.3 * i)",
        f"""\
{SPLIT}
a, b = (q @ k.mT * D**-0.5).softmax(-1).view(-1, H // 2, 2, L, L).unbind(2)
scores = a - (self.mix_.exp() - 1 + self.start)[:, None, None] * b
return self.out((scores @ v.reshape(-1, H // 2, 2, L, D).sum(2)).transpose(1, 2).repeat(1, 1, 1, 2).flatten(2))""",
    ),
    Part(
        "talking heads",
        f"{QKV}\nself.talk, self.hear = nn.Linear(H, H, bias=False), nn.Parameter(torch.randn(H, H) / H)",
        f"""\
{SPLIT}
scores = self.talk((q @ k.mT).permute(0, 2, 3, 1)).softmax(2)
scores = torch.einsum("bqkh,hg->bgqk", scores, self.hear)
return self.out((scores @ v).transpose(1, 2).flatten(2))""",
    ),
    Part(
        "bias by distance",
        f"{QKV}\nself.near = nn.Embedding(2 * L - 1, H)\nself.register_buffer('gap', torch.arange(L)[:, None] - torch.arange(L) + L - 1)",
        f"{SPLIT}\nscores = q @ k.mT + self.near(self.gap).permute(2, 0, 1).unsqueeze(0)\n{MERGE}",
    ),
    Part(
        "low rank keys",
        "self.q, self.down, self.up, self.out = nn.Linear(W, W), nn.Linear(W, 6), nn.Linear(5, 2 * W), nn.Linear(W, W)",
        f"""\
q = self.q(h).view(-1, L, H, D).transpose(1, 2)
small, shift = self.down(h).split([5, 1], -1)
k, v = self.up(small).view(-1, L, H, 2 * D).transpose(1, 2).chunk(2, -1)
scores = q @ k.mT + shift.mT.unsqueeze(1)
{MERGE}""",
    ),
    Part(
        "across to memory",
        APART,
        """\
q = self.q(h).view(-1, L, H, D).transpose(1, 2)
k, v = (layer(memory).view(-1, L, H, D).transpose(1, 2) for layer in (self.k, self.v))
h = F.scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
return self.out(h.transpose(1, 2).flatten(2))""",
    ),
    Part(
        "nn.MultiheadAttention",
        "self.attend = nn.MultiheadAttention(W, H, batch_first=True, dropout=0.0)",
        "return self.attend(h, h, h, key_padding_mask=~keep, need_weights=False)[0]",
    ),
    Part(
        "nn.MultiheadAttention with weights, across",
        "self.attend = nn.MultiheadAttention(W, H, batch_first=True, kdim=W, vdim=W, bias=i % 2 == 0)",
        "h, weights = self.attend(h, memory, memory, average_attn_weights=False)\nreturn h + weights.sum((1, 3))[..., None]",
    ),
    Part(
        "tokens first",
        "self.attend = nn.MultiheadAttention(W, H)",
        "x = h.transpose(0, 1)\nreturn self.attend(x, x, x, need_weights=False)[0].transpose(0, 1)",
    ),
    Part(
        "causal depthwise convolution",
        "self.conv, self.out = nn.Conv1d(W, W, 3, groups=W, dilation=1 + i % 2), nn.Linear(W, W)",
        "x = F.pad(h.mT, (2 * (1 + self.i % 2), 0))\nreturn self.out(F.silu(self.conv(x)).mT)",
    ),
    Part(
        "convolution with channels mixed",
        "self.conv = nn.Conv1d(W, 2 * W, 3, padding='same', groups=2, padding_mode='zeros', bias=i > 0)",
        "return F.glu(self.conv(h.mT), 1).mT",
    ),
    Part(
        "linear attention by cumsum",
        QKV,
        f"""\
{SPLIT}
q, k = F.elu(q) + 1, F.elu(k) + 1
sums = torch.einsum("bhld,bhle->bhlde", k, v).cumsum(2)
h = torch.einsum("bhld,bhlde->bhle", q, sums) / torch.einsum("bhld,bhld->bhl", q, k.cumsum(2))[..., None]
return self.out(h.transpose(1, 2).flatten(2))""",
    ),
    Part(
        "a loop over tokens",
        "self.u, self.w, self.start = nn.Linear(W, W), nn.Linear(W, W, bias=False), nn.Parameter(torch.zeros(W))",
        """\
state, found = self.start.expand(h.shape[0], -1), []
for token in self.u(h).unbind(1):
    state = torch.tanh(token + self.w(state))
    found.append(state)
return torch.stack(found, 1)""",
    ),
    Part(
        "a decay of every channel",
        "self.decay, self.out = nn.Parameter(torch.randn(W)), nn.Linear(W, W)",
        """\
steps = (torch.arange(L)[:, None] - torch.arange(L)).clamp(min=0)
weights = self.decay.sigmoid()[:, None, None] ** steps * torch.ones(L, L).tril()
return self.out(torch.einsum("cqk,bkc->bqc", weights, h))""",
    ),
    Part(
        "token shift",
        "self.ratio = nn.Parameter(torch.rand(1, 1, W))\nself.r, self.out = nn.Linear(W, W), nn.Linear(W, W)",
        "before = F.pad(h, (0, 0, 1, -1))\nx = torch.lerp(before, h, self.ratio)\nreturn self.out(self.r(x).sigmoid() * x)",
    ),
    Part(
        "tokens mixed by a matrix",
        "self.one, self.two = nn.Linear(L, 2 * L), nn.Linear(2 * L, L)",
        "return self.two(F.gelu(self.one(h.transpose(1, 2)))).transpose(1, 2)",
    ),
    Part(
        "keys projected over tokens",
        f"{QKV}\nself.fewer = nn.Parameter(torch.randn(3, L) / L)",
        f"{SPLIT}\nk, v = self.fewer @ k, torch.einsum('nl,bhld->bhnd', self.fewer, v)\nscores = q @ k.mT\n{MERGE}",
    ),
    Part(
        "a memory of parameters",
        "self.slots = nn.Parameter(torch.randn(5, W))",
        "return F.softmax(h @ self.slots.t(), dim=-1) @ self.slots",
    ),
    Part(
        "slots read by queries of parameters",
        "self.queries, self.k, self.v = nn.Parameter(torch.randn(3, W)), nn.Linear(W, W), nn.Linear(W, W)",
        """\
found = torch.matmul((self.queries @ self.k(h).mT).softmax(-1), self.v(h))
return (h @ found.mT).softmax(-1) @ found""",
    ),
    Part(
        "heads of different sizes",
        "self.v, self.sizes = nn.Linear(W, W), (W // 2, W // 4, W // 4)",
        "return torch.cat([(x @ x.mT).softmax(-1) @ x for x in self.v(h).split(self.sizes, dim=-1)], dim=-1)",
    ),
    Part(
        "a loop over heads",
        QKV,
        """\
q, k, v = self.qkv(h).chunk(3, -1)
found = []
for n in range(H):
    a, b, c = (x[..., n * D : (n + 1) * D] for x in (q, k, v))
    found.append(torch.softmax(a @ b.transpose(-2, -1) / (n + 1), -1) @ c)
return self.out(torch.cat(found, 2))""",
    ),
    Part(
        "heads in a ModuleList",
        "self.heads = nn.ModuleList(nn.Linear(W, D) for _ in range(H))\nself.out = nn.Linear(W, W)",
        "x = torch.stack([head(h) for head in self.heads], 1)\nreturn self.out((x @ x.mT).softmax(-1).matmul(x).transpose(1, 2).flatten(2))",
    ),
    Part(
        "vmapped over heads",
        "self.heads = nn.Parameter(torch.randn(H, W, D) / W)\nself.out = nn.Linear(W, W)",
        "x = torch.einsum('blw,hwd->hbld', h, self.heads)\nreturn self.out(((x @ x.mT).softmax(-1) @ x).permute(1, 2, 0, 3).reshape(-1, L, W))",
    ),
    Part(
        "by unfold",
        "self.weigh, self.out = nn.Parameter(torch.randn(W, 3)), nn.Linear(W, W)",
        "return self.out((F.pad(h, (0, 0, 2, 0)).unfold(1, 3, 1) * self.weigh).sum(-1))",
    ),
    Part(
        "over chunks of tokens",
        QKV,
        "x = self.qkv(h)[..., :W].reshape(-1, L // 2, 2, W)\nx = (x @ x.mT).softmax(-1) @ x\nreturn self.out(x.view(-1, L, W))",
    ),
    Part("none", "", "return h * 0.5"),
    Part(
        "mean of what came before",
        "self.out = nn.Linear(W, W)",
        "return self.out(h.cumsum(1) / torch.arange(1, L + 1, dtype=h.dtype).unsqueeze(-1))",
    ),
]

WIDE = "self.up, self.down = nn.Linear(W, 4 * W), nn.Linear(4 * W, W)"
MLPS = [
    Part("plain", WIDE, "return self.down(F.gelu(self.up(h)))"),
    Part("tanh gelu", WIDE, "return self.down(F.gelu(self.up(h), approximate='tanh'))"),
    Part("squared relu", WIDE, "return self.down(F.relu(self.up(h)).pow(2 + self.i % 2))"),
    Part(
        "gated, one matrix",
        "self.up, self.down = nn.Linear(W, 6 * W), nn.Linear(3 * W, W)",
        "a, b = self.up(h).chunk(2, -1)\nreturn self.down(F.silu(a) * b)",
    ),
    Part(
        "gated, interleaved, clamped",
        "self.up, self.down = nn.Linear(W, 4 * W), nn.Linear(2 * W, W)",
        "x = self.up(h)\na, b = x[..., ::2].clamp(max=7.0), x[..., 1::2].clamp(-7.0, 7.0)\nreturn self.down((b + 1) * a * torch.sigmoid(1.702 * a))",
    ),
    Part(
        "F.glu",
        "self.up, self.down = nn.Linear(W, 4 * W), nn.Linear(2 * W, W, bias=False)",
        "return self.down(F.glu(self.up(h)))",
    ),
    Part(
        "maxout",
        "self.up, self.down = nn.Linear(W, 6 * W), nn.Linear(2 * W, W)",
        "return self.down(self.up(h).unflatten(-1, (2 * W, 3)).amax(-1))",
    ),
    Part(
        "raw parameters",
        "self.w, self.b = nn.Parameter(torch.randn(W, 2 * W) / W), nn.Parameter(torch.zeros(2 * W))\nself.v = nn.Parameter(torch.randn(2 * W, W) / W)",
        "return torch.relu(h @ self.w + self.b) @ self.v",
    ),
    Part(
        "addmm on rows of tokens",
        "self.w, self.b = nn.Parameter(torch.randn(W, 2 * W) / W), nn.Parameter(torch.zeros(2 * W))\nself.v = nn.Parameter(torch.randn(2 * W, W) / W)",
        "x = torch.addmm(self.b, h.reshape(-1, W), self.w)\nreturn torch.mm(x.tanh(), self.v).view(h.shape)",
    ),
    Part(
        "tied up and down",
        "self.up = nn.Linear(W, 3 * W)",
        "return F.linear(F.gelu(self.up(h)), self.up.weight.t())",
    ),
    Part("tied, twice through", "self.up = nn.Linear(W, W)", "return self.up(self.up(h).relu())"),
    Part(
        "low rank update of a frozen matrix",
        "self.base = nn.Linear(W, W).requires_grad_(False)\nself.a, self.b = nn.Linear(W, 3, bias=False), nn.Linear(3, W, bias=False)",
        "return self.base(h) + self.b(self.a(h)) * (16 / 3)",
    ),
    Part(
        "low rank update of the weight",
        "self.base = nn.Linear(W, W)\nself.base.weight.requires_grad_(False)\nself.a, self.b = nn.Parameter(torch.randn(3, W)), nn.Parameter(torch.zeros(W, 3))",
        "return F.linear(h, self.base.weight + self.b @ self.a * (self.i + 1), self.base.bias)",
    ),
    Part(
        "weight norm",
        "self.up = nn.utils.parametrizations.weight_norm(nn.Linear(W, 2 * W))\nself.down = nn.Linear(2 * W, W)",
        "return self.down(self.up(h).relu())",
    ),
    Part(
        "weight norm, over all",
        "self.up = nn.utils.parametrizations.weight_norm(nn.Linear(W, W), dim=None)",
        "return self.up(h).relu()",
    ),
    Part(
        "weight standardised by hand",
        WIDE,
        "weight = self.up.weight - self.up.weight.mean(1, keepdim=True)\nweight = weight / weight.std(1, keepdim=True)\nreturn self.down(F.linear(h, weight, self.up.bias).relu())",
    ),
    Part(
        "spectral norm",
        "self.up = nn.utils.parametrizations.spectral_norm(nn.Linear(W, W))",
        "return self.up(h).relu()",
    ),
    Part(
        "groups",
        "self.w, self.v = nn.Parameter(torch.randn(2, W // 2, W) / W), nn.Parameter(torch.randn(2, W, W // 2) / W)",
        "x = torch.einsum('blgi,gio->blgo', h.view(-1, L, 2, W // 2), self.w).relu()\nreturn torch.einsum('blgi,gio->blgo', x, self.v).reshape(-1, L, W)",
    ),
    Part(
        "all experts, softly",
        "self.gate, self.w, self.v = nn.Linear(W, 3), nn.Parameter(torch.randn(3, W, 2 * W) / W), nn.Parameter(torch.randn(3, 2 * W, W) / W)",
        "x = torch.einsum('bld,edf->blef', h, self.w).relu()\nreturn torch.einsum('blef,efd,ble->bld', x, self.v, self.gate(h).softmax(-1))",
    ),
    Part(
        "experts in a list, two best",
        "self.gate = nn.Linear(W, 3)\nself.experts = nn.ModuleList(nn.Sequential(nn.Linear(W, W), nn.Tanh()) for _ in range(3))",
        "top = self.gate(h).topk(2, -1)\nweights = torch.zeros(h.shape[0], L, 3, dtype=h.dtype).scatter(-1, top.indices, top.values.softmax(-1))\nreturn sum(weights[..., e, None] * expert(h) for e, expert in enumerate(self.experts))",
    ),
    Part(
        "experts, by one-hot",
        "self.gate, self.w = nn.Linear(W, 4, bias=False), nn.Parameter(torch.randn(4, W, W) / W)",
        "p = self.gate(h).softmax(-1)\npick = F.one_hot(p.argmax(-1), 4).to(h.dtype)\nreturn torch.einsum('bld,edo,ble->blo', h, self.w, pick * p)",
    ),
    Part(
        "experts, weights gathered",
        "self.gate, self.w = nn.Linear(W, 4, bias=False), nn.Parameter(torch.randn(4, W) / W)",
        "p = self.gate(h).softmax(-1)\nbest, at = p.max(-1)\nreturn h * self.w[at] * best.unsqueeze(-1)",
    ),
    Part(
        "prelu",
        "self.up, self.down, self.act = nn.Linear(W, 2 * W), nn.Linear(2 * W, W), nn.PReLU(L)",
        "return self.down(self.act(self.up(h)))",
    ),
    Part(
        "prelu, one slope", "self.up, self.act = nn.Linear(W, W), nn.PReLU()", "return self.act(self.up(h))"
    ),
    Part(
        "snake",
        "self.up, self.down = nn.Linear(W, 2 * W), nn.Linear(2 * W, W)\nself.alpha = nn.Parameter(torch.ones(2 * W))",
        "x = self.up(h)\nreturn self.down(x + (self.alpha * x).sin() ** 2 / (self.alpha + 1e-9))",
    ),
    Part(
        "weights by a net",
        "self.code, self.net = nn.Parameter(torch.randn(4)), nn.Linear(4, W * W)",
        "return h @ self.net(self.code).view(W, W)",
    ),
    Part(
        "kronecker weights",
        "self.a, self.b = nn.Parameter(torch.randn(2, 2)), nn.Parameter(torch.randn(W // 2, W // 2) / W)",
        "return F.linear(h, torch.kron(self.a, self.b))",
    ),
    Part("bilinear", "self.two = nn.Bilinear(W, W, W)", "return self.two(h, h.flip(-1)) / W"),
    Part(
        "a table of tokens beside",
        "self.up = nn.Linear(W, W)\nself.bias_of = nn.Parameter(torch.randn(L, 1))",
        "return self.up(h) * self.bias_of.sigmoid()",
    ),
    Part(
        "Sequential with flatten",
        "self.net = nn.Sequential(nn.Linear(W, 2 * W), nn.Unflatten(-1, (2, W)), nn.Softplus(), nn.Flatten(2), nn.Linear(2 * W, W))",
        "return self.net(h)",
    ),
    Part(
        "ModuleDict, ParameterDict, ParameterList",
        "self.by = nn.ModuleDict({'in': nn.Linear(W, 2 * W), 'self': nn.Linear(2 * W, W)})\nself.more = nn.ParameterDict({'w.x'[:1]: torch.randn(W)})\nself.list = nn.ParameterList([torch.randn(W), torch.randn(2 * W)])",
        "x = self.by['in'](h * self.more['w'] + self.list[0]) * self.list[1]\nreturn self.by['self'](x)",
    ),
    Part(
        "kernel of size one",
        "self.up, self.down = nn.Conv1d(W, 2 * W, 1), nn.Conv1d(2 * W, W, 1)",
        "return self.down(self.up(h.mT).relu()).mT",
    ),
    Part(
        "in place all along",
        WIDE,
        "x = self.up(h)\nx.add_(1.0).mul_(0.5)\nx = F.relu_(x) * 2\nx[..., 0] = 0\nreturn self.down(x)",
    ),
    Part(
        "pieces written in place",
        WIDE,
        "x = self.up(h).clone()\na, b = x[..., : 2 * W], x[..., 2 * W :]\na.mul_(b.detach().sigmoid())\nreturn self.down(x)",
    ),
    Part(
        "written into zeros",
        WIDE,
        "x = torch.zeros(h.shape[0], L, 4 * W, dtype=h.dtype)\nx[:, :, : 2 * W] = self.up(h)[..., 2 * W :]\nx[:, 1:, 2 * W :] += self.up(h)[:, :-1, : 2 * W]\nreturn self.down(x)",
    ),
    Part(
        "selected, written",
        WIDE,
        "x = self.up(h).view(-1, L, 4, W).clone()\nfor n in range(4):\n    x[:, :, n].mul_(n - 1.5)\nreturn self.down(x.flatten(2))",
    ),
    Part(
        "index_put, accumulated",
        WIDE,
        "x = self.up(h).transpose(0, 2).index_put((torch.tensor([0, 1, 1]),), torch.ones(3, L, 1, dtype=h.dtype).expand(3, L, h.shape[0]), accumulate=True)\nreturn self.down(x.transpose(0, 2))",
    ),
    Part(
        "checkpointed",
        WIDE,
        "return checkpoint(lambda x: self.down(F.gelu(self.up(x))), h, use_reentrant=False)",
    ),
    Part("own function", WIDE, "return self.down(Square.apply(self.up(h), 0.5 + self.i))"),
    Part(
        "functional_call",
        "self.net = nn.Linear(W, W)",
        "return torch.func.functional_call(self.net, {'weight': self.net.weight * 2}, (h,))",
    ),
    Part(
        "complex weights",
        "self.z = nn.Parameter(torch.randn(W // 2, 2))",
        "return torch.view_as_real(torch.view_as_complex(h.reshape(-1, L, W // 2, 2)) * torch.view_as_complex(self.z)).flatten(2)",
    ),
    Part("dims by name", WIDE, "return self.down(torch.where(self.up(h) > 0, self.up(h), 0.1))"),
    Part(
        "a wider middle by layer",
        "self.up, self.down = nn.Linear(W, W * (1 + i % 2)), nn.Linear(W * (1 + i % 2), W)",
        "return self.down(self.up(h).tanh())",
    ),
    Part(
        "partly frozen",
        f"{WIDE}\nself.up.weight.requires_grad_(i % 2 == 0)\nself.down.bias.requires_grad_(False)",
        "return self.down(F.gelu(self.up(h)))",
    ),
    Part(
        "unused parameters",
        f"{WIDE}\nself.idle, self.never = nn.Linear(W, W), nn.Parameter(torch.randn(3))",
        "return self.down(F.gelu(self.up(h)))",
    ),
    Part("stopped", WIDE, "x = self.up(h)\nreturn self.down(x.detach() if self.i == 1 else x)"),
    Part(
        "under no_grad in one layer",
        WIDE,
        "with torch.set_grad_enabled(self.i != 2):\n    x = self.up(h)\nreturn self.down(x)",
    ),
    Part("cast to float and back", WIDE, "return self.down(F.gelu(self.up(h)).to(torch.complex128).real)"),
]

NORMS = [
    Part("plain", "{n} = nn.LayerNorm(W)", "{n}(h)"),
    Part("eps of the layer", "{n} = nn.LayerNorm(W, eps=1e-3 * (i + 1))", "{n}(h)"),
    Part("no bias", "{n} = nn.LayerNorm(W, bias=False)", "{n}(h)"),
    Part("nothing trained", "{n} = nn.LayerNorm(W, elementwise_affine=False)", "{n}(h)"),
    Part("nn.RMSNorm", "{n} = nn.RMSNorm(W)", "{n}(h)"),
    Part(
        "one plus weight",
        "{n} = nn.Parameter(torch.zeros(W))",
        "h * torch.rsqrt(h.pow(2).mean(-1, keepdim=True) + 1e-6) * (1 + {n})",
    ),
    Part(
        "one scale",
        "{n} = nn.Parameter(torch.ones(()))",
        "{n} * h / h.norm(dim=-1, keepdim=True).clamp(min=1e-5) * W**0.5",
    ),
    Part(
        "tanh for a norm",
        "{n} = nn.ParameterList([torch.ones(W), torch.full((1,), 0.5), torch.zeros(W)])",
        "torch.tanh({n}[1] * h) * {n}[0] + {n}[2]",
    ),
    Part("groups", "{n} = nn.GroupNorm(2, W)", "{n}(h.mT).mT"),
    Part("tokens and channels", "{n} = nn.LayerNorm((L, W))", "{n}(h)"),
    Part(
        "F.normalize", "{n} = nn.Parameter(torch.ones(W))", "F.normalize(h, p=2 + self.i % 2, dim=-1) * {n}"
    ),
    Part(
        "var_mean",
        "{n} = nn.Parameter(torch.ones(W))",
        "(h - torch.var_mean(h, -1, correction=0, keepdim=True)[1]) * torch.var_mean(h, -1, correction=0, keepdim=True)[0].add(1e-5).rsqrt() * {n}",
    ),
    Part("frozen", "{n} = nn.LayerNorm(W).requires_grad_(i % 2 == 1)", "{n}(h)"),
    Part(
        "standard deviation",
        "{n} = nn.Parameter(torch.ones(W))",
        "(h - h.mean(-1, True)) / (h.std(-1, keepdim=True) + 1e-5) * {n}",
    ),
    Part(
        "batch norm that was trained",
        "{n} = nn.BatchNorm1d(W).eval()",
        "F.batch_norm(h.mT, {n}.running_mean, {n}.running_var, {n}.weight, {n}.bias).mT",
    ),
]

NUMBERS = [  # of layer i, a line that takes and gives h; B is never among them
    "h = h",
    "h = h * (i + 1) - (i - 1)",
    "h = h - (-1) ** i * h.roll(i, 1)",
    "h = h + F.pad(h, (i, -i), value=i)",
    "h = h + F.pad(h[:, i:], (0, 0, 0, i), value=-0.5 * i)",
    "h = h + F.pad(h, (0, 0, i, 0))[:, : L]",
    "h = h.clamp(min=None if i % 2 else -1.5, max=2.5 - 0.1 * i)",
    "h = h.clamp(max=3) if i % 2 else h.clamp(min=-3)",
    "h = h + h.softmax(1 if i % 2 else -1)",
    "h = h + h.flip(1 + i % 2)",
    "h = h.flip((1, 2)[: i % 3]) + h",
    "h = h + torch.roll(h, (i, -i), (1, 2))",
    "h = h + F.softplus(h, beta=i + 1, threshold=20 - i)",
    "h = h + F.hardtanh(h, -1.0 - i, 1.0 + i)",
    "h = h + F.threshold(h, 0.1 * i, -i)",
    "h = h + F.celu(h, 0.5 * (i + 1)) * 2**-i",
    "h = h + F.leaky_relu(h, -0.1 * i)",
    "h = h + h.norm(p=i + 1, dim=-1, keepdim=True)",
    "h = h + h.var(-1, correction=i % 2, keepdim=True)",
    "h = h + h.topk(i + 1, -1).values.sum(-1, keepdim=True)",
    "h = h + h.cumsum(1 + i % 2) * 0.1",
    "h = h + torch.linspace(-i, i, L, dtype=h.dtype)[:, None]",
    "h = h + torch.arange(i, i + W, dtype=h.dtype) / 10",
    "h = h + torch.arange(i + L, i, -1, dtype=h.dtype).unsqueeze(-1) / 10",
    "h = h + torch.full((L, 1), i - 1.5, dtype=h.dtype)",
    "h = h + torch.eye(L, W, dtype=h.dtype).roll(i, 0)",
    "h = h + torch.tensor([i, -i, i * i, 1.5], dtype=h.dtype).repeat(W // 4)",
    "h = h * torch.ones(L, W, dtype=h.dtype).triu(i - 1)",
    "h = h * torch.tril(torch.ones(L, W, dtype=h.dtype), diagonal=W - 2 - i)",
    "h = h + torch.cat([x * (n + i) for n, x in enumerate(h.split([i + 1, W - i - 1], -1))], -1)",
    "h = h + torch.cat(h.chunk(2 + 2 * (i % 2), -1)[::-1], -1)",
    "h = h + h[..., :: (1, -1)[0]] * (i or 0.5)",
    "h = h + h[:, :: i + 1].mean(1, keepdim=True)",
    "h = h + h[:, i - 1 : i].expand(-1, L, -1) if i else h",
    "h = h + h[:, -1 - i, None]",
    "h = h + h.narrow(-1, i, 2).sum(-1, keepdim=True)",
    "h = h + h.select(-1, -i - 1).unsqueeze(-1)",
    "h = h.masked_fill(h > 2 + i, -0.25 * i)",
    "h = torch.where(h.abs() < i, h, h * 0.5)",
    "h = torch.lerp(h, h.flip(-1), 0.1 * i)",
    "h = torch.addcmul(h, h, h.flip(1), value=0.01 * (i - 2))",
    "h = torch.addcdiv(h, h, h.square() + 1, value=-i)",
    "h = torch.add(h, h.flip(1), alpha=-i)",
    "h = h.sub(h.flip(1), alpha=0.5 * i)",
    "h = torch.rsub(h, i, alpha=2)",
    "h = i - h",
    "h = (i + 1) / (h.square() + 1 + i) + h",
    "h = h + (i + 2) ** h.tanh()",
    "h = h + h.tanh() ** i",
    "h = h + torch.pow(i, h.sigmoid())",
    "h = h + torch.fmod(h, i + 0.7)",
    "h = h + h.remainder(-0.9 - i).detach()",
    "h = h + (h.abs() + 0.5).log() * -(-i)",
    "h = h + h.nan_to_num(nan=i, posinf=1.0)",
    "h = h + F.layer_norm(h, (L, W)[1 - (i == 7) :], eps=10.0 ** -(i + 3))",
    "h = h + F.group_norm(h.mT, 2 ** (i % 2)).mT",
    "h = h + F.normalize(h, p=1.0 + i, eps=1e-8)",
    "h = h + F.gelu(h, approximate=('none', 'tanh')[i % 2])",
    "h = h + (F.relu(h), F.silu(h), F.gelu(h), h)[i % 4]",
    "h = h + F.avg_pool1d(h.mT, 3, stride=1, padding=1, count_include_pad=i % 2 == 0).mT",
    "h = h + F.max_pool1d(h.mT, 2 * i + 1, 1, i).mT",
    "h = h + h.unflatten(-1, (2, -1) if i % 2 else (-1, 2)).transpose(-1, -2).flatten(2)",
    "h = h + h.reshape(-1, L, W // 2**(i % 3), 2**(i % 3)).sum(-1).repeat(1, 1, 2**(i % 3))",
    "h = h + h.movedim(1, 2).movedim(*((2, 1), (1, 2))[i % 2])",
    "h = h + h.unsqueeze(1 + i % 2).expand(*((-1, 2, -1, -1), (-1, -1, 2, -1))[i % 2]).mean(1 + i % 2)",
    "h = h + h.repeat_interleave(i + 1, 1)[:, :L]",
    "h = h + h.gather(1, torch.full_like(h, i, dtype=torch.int64))",
    "h = h + h[:, torch.tensor([i] * L)]",
    "h = h + h[:, [n % (i + 1) for n in range(L)]]",
    "h = h + h[..., torch.arange(W) // (i + 1)]",
    "h = h + h.index_fill(1, torch.tensor([i]), -i)",
    "h = h.index_copy(2, torch.tensor([i]), h[..., -1:])",
    "h = torch.slice_scatter(h, h[:, :1] * i, 1, i, i + 1)",
    "h = torch.select_scatter(h, h[:, 0], 1, i)",
    "h = h.clone(); h[:, i] = i",
    "h = h.clone(); h[:, i:, : i + 1] *= -2",
    "h = h.clone(); h[..., i].copy_(h[..., 0] * i)",
    "h = h.clone(); h.select(1, i).add_(i, alpha=0.5)",
    "h = h.clone(); h.narrow(2, i, 2).zero_()",
    "h = h.clone(); b = h[..., i + 1 :]; b.mul_(i); h = h + 1",
    "h = h.clone(); h.diagonal(i, 1, 2).add_(1.0)",
    "h = h.clone(); h.unsqueeze(1).transpose(2, 3)[:, 0, i].mul_(-i)",
    "h = h + F.one_hot(torch.tensor(i), W)",
    "h = h + F.embedding(torch.tensor([i]), torch.eye(W, dtype=h.dtype))",
    "h = h + (h.argmax(-1, keepdim=True) == i)",
    "h = h + h.sort(-1, descending=i % 2 == 0).values",
    "h = h + h.kthvalue(i + 1, 1, keepdim=True).values",
    "h = h + h.quantile(0.1 + 0.2 * i, dim=-1, keepdim=True)",
    "h = h + h.diff(n=1, dim=1, prepend=h[:, :1] * i)",
    "h = h + torch.logspace(0, -i, L, dtype=h.dtype)[:, None]",
    "h = h + torch.einsum('blw,lm->bmw' if i % 2 else 'blw,ml->bmw', h, torch.ones(L, L, dtype=h.dtype).tril() / L)",
    "h = h + torch.tensordot(h, torch.ones(W, W, dtype=h.dtype).tril(i), ([2], [i % 2])) / W",
    "h = h + h.square().mean((1, 2) if i % 2 else (2, 1), keepdim=True) * i",
    "h = h + h.sum(-1 - i % 2, keepdim=True) * 0.1",
    "h = h + h.logsumexp((1 + i % 2,), keepdim=True)",
    "h = h + h.prod(1 + i % 2, keepdim=True)",
    "h = h + h.amax(1 + i % 2, keepdim=True) - h.amin(2 - i % 2, keepdim=True)",
    "h = h + h.round(decimals=i)",
    "h = h + torch.div(h, 0.3 + i, rounding_mode=('floor', 'trunc', None)[i % 3])",
    "h = h + torch.bucketize(h, torch.tensor([-1.0, float(i)], dtype=h.dtype))",
    "h = h + h.to((torch.float64, torch.complex128)[i % 2]).real",
    "h = h + float('inf') * 0 if i < 0 else h + (h > float('-inf'))",
    "h = h * {0: 1.0, 1: -1, 2: True, 3: 0.25}.get(i, 1)",
    "h = h * (True, 2, -1, 0.5)[i % 4]",
    "h = h + h * (i == 1) + (i > 1) * 0.1",
    "h = torch.special.xlog1py(i, h.abs()) + h",
    "h = h + torch.hypot(h, torch.tensor(float(i), dtype=h.dtype))",
    "h = h + F.interpolate(h.mT, size=L + i, mode='linear', align_corners=i % 2 == 0).mT[:, :L]",
    "h = h + F.interpolate(h.mT, scale_factor=i + 1).mT[:, :L]",
    "h = h + F.conv1d(h.mT, torch.ones(W, 1, 2, dtype=h.dtype) / 2, padding=i + 1, dilation=2 * i + 2, groups=W).mT",
    "h = h + F.pad(h.mT, (i, i), mode=('reflect', 'replicate')[i % 2]).mT[:, :L]",
    "h = h + F.pad(h, (0, 0, i, 0, 0, 0))[:, :L]",
    "h = h + F.softmax(h, 2, dtype=torch.float64) * i",
    "h = h + torch.tile(h[..., : W // 2**(i % 2)], (1, 1, 2**(i % 2)))",
    "h = h + torch.rot90(h, 2 * i, (1, 2))",
    "h = h + torch.clip(h, *sorted((i - 1.0, 0.0)))",
    "h = h + torch.heaviside(h.detach(), torch.tensor(float(i), dtype=h.dtype))",
    "h = h + torch.polygamma(1, h.abs() + i + 1)",
    "h = h + torch.mvlgamma(h.abs() + i + 3, i + 1)",
    "h = h + torch.triu(h, i) + torch.tril(h, -i)",
    "h = h + torch.unflatten(h, 2, (W // 2, 2)).select(3, i % 2).repeat(1, 1, 2)",
    "h = h + h.as_strided(h.shape, h.stride())",
    "h = h + torch.ops.aten.slice.Tensor(h, 1, i, None).mean(1, True)",
    "h = h + torch.stack([h * n for n in range(i + 1)]).sum(0)",
    "h = h + sum(h[:, n : n + 1] for n in range(i + 1))",
    "for n in range(i): h = h + h.roll(n, 1) / (n + i)",
    "h = h + h @ torch.diag(torch.arange(W, dtype=h.dtype) - i) / W",
    "h = h + torch.nn.functional.huber_loss(h, h.flip(1).detach(), reduction='none', delta=0.5 + i)",
    "h = h + h.mul(i).div(i + 1).add(-i).neg()",
    "h = (h.double() + i).to(h.dtype)",
    "h = h + h.detach() * i",
    "h = h + torch.zeros_like(h).fill_(i)",
    "h = h + h.new_full((W,), i)",
    "h = h + h.new_zeros(L, 1).index_fill_(0, torch.tensor([i, i + 1]), 2.0)",
    "h = h + torch.full((), i, dtype=h.dtype)",
]
