"""The text of the parts of a random decoder: norms, attention, MLP. In: a case. Out: lines of Python at the left margin.

What a case does not use is not written, so that a reproducer holds nothing but what it needs.
"""

from __future__ import annotations

from tests.fuzz.features import Case

ACTIVATIONS = {
    "gelu": "F.gelu({})",
    "relu": "F.relu({})",
    "silu": "F.silu({})",
    "squared relu": "F.relu({}).square()",
    "quick gelu": "quick_gelu({})",
    "gelu tanh": "F.gelu({}, approximate='tanh')",
}


def indent(lines: list[str], depth: int = 1) -> list[str]:
    return ["    " * depth + line for line in lines]


def module(name: str, init: list[str], signature: str, forward: list[str], takes: str = "self") -> list[str]:
    """A class derived from nn.Module."""
    return [
        "",
        "",
        f"class {name}(nn.Module):",
        *indent([f"def __init__({takes}):", *indent(["super().__init__()", *init])]),
        "",
        *indent([f"def forward(self, {signature}):", *indent(forward)]),
    ]


def linear(case: Case, inputs: int, outputs: int) -> str:
    return f"nn.Linear({inputs}, {outputs}{'' if case['bias'] else ', bias=False'})"


def drop(case: Case, place: str, init: list[str], value: str) -> str:
    """`value` with dropout, if there is any at this place; a module that does it is added to `init`."""
    if not case.drops(place):
        return value
    if case["dropout by"] == "function":
        return f"F.dropout({value}, {case['dropout']}, self.training)"
    in_place = case.drops_in_place(place)
    name, more = ("drop_", ", inplace=True") if in_place else ("drop", "")
    line = f"self.{name} = nn.Dropout({case['dropout']}{more})"
    if line not in init:
        init.append(line)
    return f"self.{name}({value})"


def helpers(case: Case) -> list[str]:
    """Functions beside the classes."""
    lines: list[str] = []
    if case["activation"] == "quick gelu" and case["gate"] != "glu":
        lines += ["", "", "def quick_gelu(x):", "    return x * torch.sigmoid(1.702 * x)"]
    size = case["head size"]
    if case["positions"] == "rotary halves":
        body = [
            "first, second = x.chunk(2, dim=-1)",
            "return x * cos + torch.cat((-second, first), dim=-1) * sin",
        ]
        lines += ["", "", "def turn(x, cos, sin):", *indent(body)]
    if case["positions"] == "rotary pairs":
        body = [
            f"angles = torch.outer(torch.arange(x.shape[-2]), 10.0 ** -torch.arange({size // 2}))",
            "angles = angles.repeat_interleave(2, dim=-1)",
            "turned = torch.stack((-x[..., 1::2], x[..., ::2]), dim=-1).flatten(-2)",
            "return x * angles.cos().to(x) + turned * angles.sin().to(x)",
        ]
        lines += ["", "", "def turn(x):", *indent(body)]
    if case["positions"] == "rotary complex":
        body = [
            f"angles = torch.outer(torch.arange(x.shape[-2]).double(), 10.0 ** -torch.arange({size // 2}).double())",
            f"pairs = torch.view_as_complex(x.reshape(*x.shape[:-1], {size // 2}, 2).double())",
            "turned = pairs * torch.polar(torch.ones_like(angles), angles)",
            "return torch.view_as_real(turned).flatten(-2).type_as(x)",
        ]
        lines += ["", "", "def turn(x):", *indent(body)]
    return lines


def norm_class(case: Case) -> list[str]:
    """The class of a norm that is written out."""
    if case["norm"] not in ("rms by hand", "rms plus one"):
        return []
    init = [f"self.weight = nn.Parameter(torch.ones({case.width}))"]
    by_hand = ["return self.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)"]
    plus_one = [
        "y = x.float()",
        "y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)",
        "return (y * (1.0 + self.weight.float())).type_as(x)",
    ]
    return module("Norm", init, "x", by_hand if case["norm"] == "rms by hand" else plus_one)


def norm(case: Case) -> str:
    """A new norm over the residual's width."""
    width = case.width
    return {
        "none": "nn.Identity()",
        "layer": f"nn.LayerNorm({width})",
        "layer without bias": f"nn.LayerNorm({width}, bias=False)",
        "layer without weight": f"nn.LayerNorm({width}, elementwise_affine=False)",
        "rms": f"nn.RMSNorm({width}, eps=1e-6)",
    }.get(case["norm"], "Norm()")


def attention_class(case: Case) -> list[str]:
    """Attention over `[b, s, width]`, brought into that form where the residual has another."""
    init, project = _projections(case)
    heads, size = case.heads, case["head size"]
    if case["query norm"] != "none":
        whole = case["query norm"] == "all heads" and case["qkv"] == "separate"
        sizes = (heads * size, case.kv_heads * size) if whole else (size, size)
        second = (
            f"nn.LayerNorm({sizes[1]})" if sizes[1] > 2 else f"nn.RMSNorm({sizes[1]})"
        )  # of two: always +1, -1
        init += [f"self.q_norm, self.k_norm = nn.RMSNorm({sizes[0]}, eps=1e-6), {second}"]
        if whole:
            project = [line.replace("self.q(x)", "self.q_norm(self.q(x))") for line in project]
            project = [line.replace("self.k(x)", "self.k_norm(self.k(x))") for line in project]
        else:
            project += ["q, k = self.q_norm(q), self.k_norm(k)"]
    if case["qkv"] == "einsum":
        init += [f"self.wo = nn.Parameter(torch.randn({heads}, {size}, {case.width}))"]
        out = ["y = torch.einsum('bhsk,hkd->bsd', y, self.wo)"]
    elif case["qkv"] == "transposed":
        init += [f"self.wo = nn.Parameter(torch.randn({heads * size}, {case.width}))"]
        init += [f"self.bo = nn.Parameter(torch.randn({case.width}))"]
        out = [f"y = torch.addmm(self.bo, y.transpose(1, 2).reshape(-1, {heads * size}), self.wo)"]
        out += [f"y = y.view(b, s, {case.width})"]
    else:
        init += [f"self.out = {linear(case, heads * size, case.width)}"]
        out = [f"y = self.out(y.transpose(1, 2).reshape(b, s, {heads * size}))"]
    turn = _turn(case)
    repeat = _repeat(case)
    more_init, masks = _masks(case)
    before, after = unfolded(case)
    forward = [
        *before,
        "b, s, _ = x.shape",
        *project,
        *turn,
        *repeat,
        *masks,
        *_scores(case, init),
        *out,
        *after,
        "return y",
    ]
    takes = "self, local" if case["window"] else "self"
    return module("Attention", init + more_init, signature(case), forward, takes)


def unfolded(case: Case) -> tuple[list[str], list[str]]:
    """Lines that bring x from the form of the residual to `[b, s, width]`, and y back."""
    return {
        "bsh": ([], []),
        "sbh": (["x = x.transpose(0, 1)"], ["y = y.transpose(0, 1)"]),
        "folded": ([f"x = x.view(-1, {case['length']}, {case.width})"], [f"y = y.reshape(-1, {case.width})"]),
    }[case["stream"]]


def cross_class(case: Case) -> list[str]:
    """Attention to a memory `[b, s, width]`, without heads."""
    if case["memory"] == "none":
        return []
    width, (before, after) = case.width, unfolded(case)
    init = [f"self.q, self.kv = {linear(case, width, width)}, {linear(case, width, 2 * width)}"]
    init += [f"self.out = {linear(case, width, width)}"]
    forward = [*before, "k, v = self.kv(memory).chunk(2, dim=-1)"]
    forward += ["y = self.out(F.scaled_dot_product_attention(self.q(x), k, v))", *after, "return y"]
    return module("Cross", init, "x, memory", forward)


def signature(case: Case) -> str:
    """The arguments of a layer."""
    more = ["keep"] if case["padding"] else []
    more += ["cos", "sin"] if case["positions"] == "rotary halves" else []
    return ", ".join(["x", *more])


def _projections(case: Case) -> tuple[list[str], list[str]]:
    """Weights, and lines that make q `[b, heads, s, size]`, k and v `[b, kv_heads, s, size]`."""
    heads, kv, size, width = case.heads, case.kv_heads, case["head size"], case.width
    total, each = (heads + 2 * kv) * size, f"[{heads * size}, {kv * size}, {kv * size}]"
    split = [
        f"q = q.view(b, s, {heads}, {size}).transpose(1, 2)",
        f"k = k.view(b, s, {kv}, {size}).transpose(1, 2)",
        f"v = v.view(b, s, {kv}, {size}).transpose(1, 2)",
    ]
    fused = [f"self.qkv = {linear(case, width, total)}"]
    alone = [f"self.q = {linear(case, width, heads * size)}"]
    pair = [*alone, f"self.kv = {linear(case, width, 2 * kv * size)}"]
    a, z = heads * size, (heads + kv) * size
    group = heads // kv
    grouped = [f"y = self.qkv(x).view(b, s, {kv}, {group + 2}, {size})"]
    layouts: dict[str, tuple[list[str], list[str]]] = {
        "separate": (
            [*alone, *(f"self.{name} = {linear(case, width, kv * size)}" for name in "kv")],
            ["q, k, v = self.q(x), self.k(x), self.v(x)", *split],
        ),
        "three": (
            fused,
            [f"q, k, v = self.qkv(x).view(b, s, 3, {heads}, {size}).permute(2, 0, 3, 1, 4).unbind(0)"],
        ),
        "pieces": (fused, [f"q, k, v = self.qkv(x).split({each}, dim=-1)", *split]),
        "slices": (
            fused,
            ["y = self.qkv(x)", f"q, k, v = y[..., :{a}], y[..., {a}:{z}], y[..., {z}:]", *split],
        ),
        "per head": (
            fused,
            [f"q, k, v = self.qkv(x).view(b, s, {heads}, {3 * size}).transpose(1, 2).chunk(3, dim=-1)"],
        ),
        "grouped": (
            fused,
            [*grouped, "q, k, v = y[..., :-2, :].flatten(2, 3), y[..., -2, :], y[..., -1, :]"],
        ),
        "grouped split": (
            fused,
            [*grouped, f"q, k, v = (z.reshape(b, s, -1, {size}) for z in y.split([{group}, 1, 1], dim=3))"],
        ),
        "transposed": (
            [
                f"self.w = nn.Parameter(torch.randn({width}, {total}))",
                f"self.c = nn.Parameter(torch.randn({total}))",
            ],
            [
                f"y = torch.addmm(self.c, x.reshape(-1, {width}), self.w).view(b, s, {total})",
                f"q, k, v = y.split({each}, dim=-1)",
                *split,
            ],
        ),
        "keys and values": (
            pair,
            [
                f"q = self.q(x).view(b, s, {heads}, {size}).transpose(1, 2)",
                f"k, v = self.kv(x).view(b, s, 2, {kv}, {size}).permute(2, 0, 3, 1, 4)",
            ],
        ),
        "keys and values per head": (
            pair,
            [
                f"q = self.q(x).view(b, s, {heads}, {size}).transpose(1, 2)",
                f"k, v = self.kv(x).view(b, s, {kv}, {2 * size}).transpose(1, 2).split({size}, dim=-1)",
            ],
        ),
        "einsum": (
            [
                f"self.wq = nn.Parameter(torch.randn({width}, {heads}, {size}))",
                *(f"self.w{name} = nn.Parameter(torch.randn({width}, {kv}, {size}))" for name in "kv"),
            ],
            ["q, k, v = (torch.einsum('bsd,dhk->bhsk', x, w) for w in (self.wq, self.wk, self.wv))"],
        ),
    }
    init, lines = layouts[case["qkv"]]
    if case["qkv"].startswith("grouped"):
        lines = [*lines, "q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)"]
    return list(init), list(lines)


def _turn(case: Case) -> list[str]:
    if case["positions"] == "rotary halves":
        return ["q, k = turn(q, cos, sin), turn(k, cos, sin)"]
    return ["q, k = turn(q), turn(k)"] if case["positions"].startswith("rotary") else []


def _repeat(case: Case) -> list[str]:
    """As many keys and values as queries, where the attention does not do it by itself."""
    times, kv, heads, size = case.queries_per_key, case.kv_heads, case.heads, case["head size"]
    if times == 1 or case["more heads"] == "native":
        return []
    if case["more heads"] == "repeat":
        return [f"k, v = k.repeat_interleave({times}, dim=1), v.repeat_interleave({times}, dim=1)"]
    grow = f".unsqueeze(2).expand(b, {kv}, {times}, s, {size}).reshape(b, {heads}, s, {size})"
    return [f"k, v = k{grow}, v{grow}"]


def _masks(case: Case) -> tuple[list[str], list[str]]:
    """`mask`: which keys a query may see; `slope`: what is added to the scores."""
    init: list[str] = []
    lines: list[str] = []
    length = case["length"]
    if case.attention != "fused":
        if case["mask"] == "buffer":
            init += [f"mask = torch.ones({length}, {length}, dtype=torch.bool).tril()"]
            init += ["mask = mask.triu(-1) if local else mask"] if case["window"] else []
            init += ["self.register_buffer('mask', mask)"]
            lines += ["mask = self.mask[:s, :s]"]
        else:
            init += ["self.local = local"] if case["window"] else []
            lines += ["mask = torch.ones(s, s, dtype=torch.bool).tril()"]
            lines += ["mask = mask.triu(-1) if self.local else mask"] if case["window"] else []
        lines += (
            ["mask = mask & (keep[:, None, None, :] | torch.eye(s, dtype=torch.bool))"]
            if case["padding"]
            else []
        )
    if case["positions"] == "slopes":
        init += [f"self.register_buffer('slopes', 2.0 ** -torch.arange({case.heads})[:, None, None])"]
        lines += ["places = torch.arange(s)", "slope = self.slopes * (places[None, :] - places[:, None])"]
    return init, lines


def _scores(case: Case, init: list[str]) -> list[str]:
    """Attention itself: y of `[b, heads, s, size]`."""
    kind, scale = case.attention, case["head size"] ** -0.5
    native = case.queries_per_key > 1 and case["more heads"] == "native"
    if kind.startswith("fused"):
        more = ", enable_gqa=True" if native else ""
        more += (
            f", dropout_p={case['dropout']} if self.training else 0.0" if case.drops("of attention") else ""
        )
        if kind == "fused":
            return [f"y = F.scaled_dot_product_attention(q, k, v, is_causal=True{more})"]
        if kind == "fused with mask":
            return [f"y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask{more})"]
        start = "slope.to(q)" if case["positions"] == "slopes" else "torch.zeros(s, s, dtype=q.dtype)"
        lines = [f"bias = {start}.masked_fill(~mask, float('-inf'))"]
        return [*lines, f"y = F.scaled_dot_product_attention(q, k, v, attn_mask=bias{more})"]
    kv, size = case.kv_heads, case["head size"]
    groups = [
        f"q = q.reshape(b, {kv}, {case.queries_per_key}, s, {size})",
        "k, v = k.unsqueeze(2), v.unsqueeze(2)",
    ]
    flat = [f"scores = scores.reshape(b, {case.heads}, s, s)"]
    lines = [
        *(groups if native else []),
        f"scores = q @ k.transpose(-2, -1) * {scale}",
        *(flat if native else []),
    ]
    lines += ["scores = 5.0 * torch.tanh(scores / 5.0)"] if case["attention cap"] else []
    lines += ["scores = scores + slope.to(scores)"] if case["positions"] == "slopes" else []
    if kind == "softmax":
        lines += ["weights = F.softmax(scores.masked_fill(~mask, float('-inf')), dim=-1)"]
    elif kind == "where":
        lines += ["weights = torch.where(mask, scores, -1e9).softmax(-1, dtype=torch.float32).type_as(v)"]
    else:
        lines += ["hidden = torch.zeros(mask.shape, dtype=scores.dtype).masked_fill(~mask, -1e9)"]
        lines += ["weights = (scores + hidden).softmax(-1)"]
    if case.drops("of attention"):
        lines += [f"weights = {drop(case, 'of attention', init, 'weights')}"]
    if native:
        unfold = f"weights.reshape(b, {kv}, {case.queries_per_key}, s, s)"
        return [*lines, f"y = ({unfold} @ v).reshape(b, {case.heads}, s, {size})"]
    return [*lines, "y = weights @ v"]


def mlp_class(case: Case) -> list[str]:
    """The MLP over the last dim."""
    width, inner, gate = case.width, case.mlp_width, case["gate"]
    act = ACTIVATIONS[case["activation"]]
    init = [f"self.gate = {linear(case, width, inner)}"] if gate == "separate" else []
    init += [f"self.up = {linear(case, width, inner if gate in ('none', 'separate') else 2 * inner)}"]
    init += [f"self.down = {linear(case, inner, width)}"]
    forward: list[str] = []
    if gate == "none":
        y = act.format("self.up(x)")
    elif gate == "separate":
        y = f"{act.format('self.gate(x)')} * self.up(x)"
    elif gate == "glu":
        y = "F.glu(self.up(x), dim=-1)"
    else:
        pieces = "chunk(2, dim=-1)" if gate == "fused" else f"unflatten(-1, ({inner}, 2)).unbind(-1)"
        forward = [f"gate, up = self.up(x).{pieces}"]
        y = f"{act.format('gate')} * up"
    return module("MLP", init, "x", [*forward, f"return self.down({drop(case, 'in mlp', init, y)})"])
