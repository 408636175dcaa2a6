"""A case as a complete script: the model's source, its weights and batch, and the call of `autoptd.verify`.

text = script(case)          # what the search runs is what the reproducer shows
"""

from __future__ import annotations

import re

from tests.fuzz.features import Case
from tests.fuzz.parts import (
    attention_class,
    cross_class,
    drop,
    helpers,
    indent,
    linear,
    mlp_class,
    module,
    norm,
    norm_class,
    signature,
)

HEADER = ["import torch", "import torch.nn.functional as F", "from torch import nn", "", "import autoptd"]


def script(case: Case) -> str:
    """Python text that builds the model of `case` and verifies it on its mesh."""
    loads = ["from tests.fuzz.loaded import check_loaded"] if case.buffer.endswith("loaded") else []
    lines = [*HEADER, *loads, *helpers(case), *norm_class(case), *attention_class(case), *mlp_class(case)]
    lines += [
        *cross_class(case),
        *_block_class(case),
        *_model_class(case),
        *_loss_fn(case),
        "",
        "",
        *_setup(case),
        "",
        *_call(case),
    ]
    return "\n".join(lines) + "\n"


def _block_class(case: Case) -> list[str]:
    place, parallel = case["norm place"], case["residual"] == "parallel"
    init = [f"self.attention = Attention({'local' if case['window'] else ''})", "self.mlp = MLP()"]
    names = ["norm_1"] if parallel else ["norm_1", "norm_2"]
    if case["norm"] != "none":
        init += [f"self.{name} = {norm(case)}" for name in names]
        init += [f"self.{name}_after = {norm(case)}" for name in names if place == "both"]
    if case["residual scale"] == "vector":
        init += [f"self.scale = nn.Parameter(torch.ones({case.width}))"]
    elif case["residual scale"] == "scalar":
        init += ["self.scale = nn.Parameter(torch.tensor(1.0))"]
    scale = {"none": "", "number": "0.7 * ", "vector": "self.scale * ", "scalar": "self.scale * "}[
        case["residual scale"]
    ]
    more = signature(case).removeprefix("x")
    if parallel:
        forward = _residual(case, "norm_1", f"self.attention(y{more}) + self.mlp(y)", scale, init)
    else:
        forward = _residual(case, "norm_1", f"self.attention(y{more})", scale, init)
        forward += _residual(case, "norm_2", "self.mlp(y)", scale, init)
    takes = "self, local" if case["window"] else "self"
    return module("Block", init, signature(case), [*forward, "return x"], takes)


def _residual(case: Case, name: str, value: str, scale: str, init: list[str]) -> list[str]:
    """x + value(y), with its norms."""
    place = case["norm place"] if case["norm"] != "none" else "none"
    lines = [f"y = self.{name}(x)" if place in ("before", "both") else "y = x"]
    value = drop(case, "of branches", init, value)
    if place == "both":
        value = f"self.{name}_after({value})"
    elif value.endswith("+ self.mlp(y)") and scale:
        value = f"({value})"
    total = f"x + {scale}{value}"
    return [*lines, f"x = self.{name}({total})" if place == "after" else f"x = {total}"]


def _model_class(case: Case) -> list[str]:
    width, vocab, length = case.width, case["vocab"], case["length"]
    init = [f"self.embed = nn.Embedding({vocab}, {width})"]
    body = ["s = ids.shape[1]", "x = self.embed(ids)"]
    body += [f"x = x * {width**0.5}"] if case["embedding scale"] else []
    if case["positions"] == "learned":
        init += [f"self.places = nn.Embedding({length}, {width})"]
        body += ["x = x + self.places(torch.arange(s, device=ids.device))"]
    elif case["positions"] == "sliced":
        init += [f"self.places = nn.Parameter(torch.randn(1, {length}, {width}))"]
        body += ["x = x + self.places[:, :s]"]
    elif case["positions"] == "sines":
        init += [f"waves = torch.outer(torch.arange({length}), 3.0 ** -torch.arange({width}))"]
        init += ["self.register_buffer('waves', waves.sin(), persistent=False)"]
        body += ["x = x + self.waves[:s]"]
    elif case["positions"] == "rotary halves":
        init += [f"frequencies = 10.0 ** -torch.arange({case['head size'] // 2})"]
        init += ["self.register_buffer('frequencies', frequencies, persistent=False)"]
        body += ["angles = torch.outer(torch.arange(s).to(x.dtype), self.frequencies).repeat(1, 2)"]
        body += ["cos, sin = angles.cos(), angles.sin()"]
    body += [f"x = {drop(case, 'of embedding', init, 'x')}"] if case.drops("of embedding") else []
    if case["parameter name"] != "none":
        name = case["parameter name"]
        init += [f"self.register_parameter({name!r}, nn.Parameter(torch.ones(1, 1, {width})))"]
        body += [f"x = x * getattr(self, {name!r}).expand_as(x)"]
    if case.buffer in ("kept", "loaded"):
        init += [f"self.register_buffer('kept', torch.ones({width}))"]
        body += ["x = x * self.kept"]
    if case["memory"] != "none":
        init += ["self.encoder = MLP()"] if case["memory"] == "encoder" else []
        body += [f"memory = {'self.encoder(x)' if case['memory'] == 'encoder' else 'x'}"]
    init += _layers(case)
    body += {"sbh": ["x = x.transpose(0, 1)"], "folded": [f"x = x.view(-1, {width})"]}.get(case["stream"], [])
    body += _run_layers(case)
    if case["final norm"] and case["norm"] != "none":
        init += [f"self.norm = {norm(case)}"]
        body += ["x = self.norm(x)"]
    body += {"sbh": ["x = x.transpose(0, 1)"], "folded": [f"x = x.view(-1, s, {width})"]}.get(
        case["stream"], []
    )
    head_init, head = _head(case)
    tail = [] if case["result"] == "loss_fn" else [*_loss(case), _result(case)]
    arguments = (
        ["ids"] + (["labels"] if case["result"] != "loss_fn" else []) + (["keep"] if case["padding"] else [])
    )
    if case.call.endswith("between"):
        arguments.insert(1, "between")
    if case["value head"] and case["result"] != "loss_fn":
        init += [f"self.value = nn.Parameter(torch.randn({width}))"]
        tail.insert(-1, "loss = loss + 1e-2 * F.linear(x, self.value).mean()")
    if case["class weights"] and case["result"] != "loss_fn":
        init += [f"self.register_buffer('weights', torch.rand({vocab}) + 0.2)"]
    tail = tail or ["return logits"]
    model = module("Model", init + head_init, ", ".join(arguments), body + head + tail)
    return [_under_name(case, line) for line in model]


def _under_name(case: Case, line: str) -> str:
    """Return a line in which the layers are called as the case has it."""
    name = case["name of layers"]
    if name == "layers":
        return line
    if line.strip() == "super().__init__()":
        return f"{line}; self.named = nn.ModuleDict()"
    return re.sub(r"\b(self|model)\.layers\b", lambda found: f"{found[1]}.named[{name!r}]", line)


def _layers(case: Case) -> list[str]:
    count, stack = case["layers"], case.stack
    block = "Block(i % 2 == 1)" if case["window"] else "Block()"
    joins = (
        [f"self.join = {linear(case, 2 * case.width, case.width)}"] if case.skips.endswith("joined") else []
    )
    if stack == "shared":
        cross = ["self.cross = Cross()"] if case["memory"] != "none" else []
        return [f"self.block = {block.replace('i % 2 == 1', 'True')}", *cross, *joins]
    if stack == "in turn":
        two = f"[{block.replace('i % 2 == 1', 'False')}, {block.replace('i % 2 == 1', 'True')}]"
        cross = (
            [f"self.cross = nn.ModuleList(Cross() for _ in range({count}))"]
            if case["memory"] != "none"
            else []
        )
        return [*cross, *joins, f"self.layers = nn.ModuleList(({two} * {count})[:{count}])"]
    kind = "ModuleList(" if stack == "list" else "Sequential(*"
    cross = (
        [f"self.cross = nn.ModuleList(Cross() for _ in range({count}))"] if case["memory"] != "none" else []
    )
    return [
        *cross,
        *joins,
        f"self.layers = nn.{kind}({block} for {'i' if case['window'] else '_'} in range({count})))",
    ]


def _run_layers(case: Case) -> list[str]:
    if case.stack == "sequential":
        return [f"x = self.layers({signature(case)})"]
    count, skips = case["layers"], case.skips
    inside: list[str] = []  # of the loop over layers
    if skips.startswith("nested"):
        inside += [f"if i >= {count - count // 2}:"]
        inside += [
            f"    x = {'self.join(torch.cat((x, skips.pop()), dim=-1))' if skips.endswith('joined') else 'x + skips.pop()'}"
        ]
    inside += (
        [f"x = x + self.cross{'' if case.stack == 'shared' else '[i]'}(x, memory)"]
        if case["memory"] != "none"
        else []
    )
    layer = "self.block" if case.stack == "shared" else "self.layers[i]"
    inside += [f"x = {layer}({signature(case)})"]
    inside += [f"x = {case['layer number']}"] if case["layer number"] != "none" else []
    inside += ["x = x + first"] if skips == "first to all" else []
    inside += [f"if i < {count // 2}:", "    skips.append(x)"] if skips.startswith("nested") else []
    before = ["skips = []"] if skips.startswith("nested") else ["first = x"] if skips != "none" else []
    after = ["x = x + first"] if skips == "first to last" else []
    return [*before, f"for i in range({count}):", *indent(inside), *after]


def _head(case: Case) -> tuple[list[str], list[str]]:
    kind, bias = case["head"], case["head bias"]
    init: list[str] = []
    if kind in ("own", "assigned"):
        init = [f"self.head = nn.Linear({case.width}, {case['vocab']}, bias={bias})"]
        init += ["self.head.weight = self.embed.weight"] if kind == "assigned" else []
        lines = ["logits = self.head(x)"]
    elif kind == "functional":
        lines = ["logits = F.linear(x, self.embed.weight)"]
    else:
        lines = ["logits = x @ self.embed.weight.t()"]
    return init, [*lines, *(["logits = 5.0 * torch.tanh(logits / 5.0)"] if case["logit cap"] else [])]


def _loss(case: Case) -> list[str]:
    """Lines that compute `loss` from `logits` `[b, s, vocab]` and `labels` `[b, s]`."""
    lines: list[str] = []
    x, y = "logits", "labels"
    if case.shift == "slices":
        x, y = "logits[:, :-1]", "labels[:, 1:]"
    elif case.shift == "padded":
        lines += ["labels = F.pad(labels, (0, 1), value=-100)[:, 1:]"]
    if case["loss"] == "gathered" and case.shift != "padded":
        lines += [f"picked = {x}.log_softmax(-1).gather(-1, {y}.unsqueeze(-1)).squeeze(-1)"]
        lines += [f"loss = -picked.{'sum' if case['reduction'] == 'sum' else 'mean'}()"]
    else:
        flat = case["loss"] != "classes"
        x, y = (f"{x}.flatten(0, 1)", f"{y}.flatten()") if flat else (f"{x}.transpose(1, 2)", y)
        reduction = case["reduction"]
        options = [f"reduction='{reduction}'"] if reduction != "mean" else []
        options += ["ignore_index=0"] if case["ignored"] == "zero" and case.shift != "padded" else []
        weights = "weights" if case["result"] == "loss_fn" else "self.weights"
        options += [f"weight={weights}"] if case["class weights"] else []
        if case["loss"] == "log-softmax":
            function = f"F.nll_loss(F.log_softmax({x}, dim={-1 if flat else 1}), {y}"
        else:
            options += [f"label_smoothing={case['smoothing']}"] if case["smoothing"] else []
            function = f"F.cross_entropy({x}, {y}"
        lines += [f"loss = {', '.join([function, *options])}){'.mean()' if reduction == 'none' else ''}"]
    if case["second loss"] == "z":
        lines += ["loss = loss + 1e-2 * logits.logsumexp(-1).square().mean()"]
    elif case["second loss"] == "decay" and case["result"] != "loss_fn":
        lines += ["loss = loss + 1e-2 * sum(p.square().sum() for p in self.parameters())"]
    return lines


def _result(case: Case) -> str:
    return {
        "loss": "return loss",
        "tuple": "return logits, loss",
        "dict": "return {'loss': loss, 'logits': logits}",
    }[case["result"]]


def _loss_fn(case: Case) -> list[str]:
    if case["result"] != "loss_fn":
        return []
    weights = [f"weights = torch.linspace(0.2, 1.2, {case['vocab']}, dtype=logits.dtype)"]
    lines = [*(weights if case["class weights"] else []), *_loss(case), "return loss"]
    return ["", "", "def loss_fn(logits, labels):", *indent(lines)]


def _setup(case: Case) -> list[str]:
    rows, length, vocab = case.batch, case["length"], case["vocab"]
    lines = ["torch.manual_seed(0)", "model = Model()", "for p in model.parameters():"]
    lines += ["    nn.init.normal_(p, std=0.3)"]
    if case["frozen"] == "embedding" and case["head"] == "own":
        lines += ["model.embed.requires_grad_(False)"]
    elif case["frozen"] == "first layer" and case.stack != "shared":
        lines += [_under_name(case, "model.layers[0].requires_grad_(False)")]
    lines += [
        f"ids = torch.randint({vocab}, ({rows}, {length}))",
        f"labels = torch.randint({vocab}, ({rows}, {length}))",
    ]
    if case["ignored"] == "default" and case["loss"] != "gathered":
        lines += ["labels[torch.rand(labels.shape) < 0.4] = -100"]
    if case["ignored"] != "nothing":
        lines += ["labels[0, -1] = 3"]
    if case["padding"]:
        lines += [f"keep = torch.rand({rows}, {length}) < 0.7", "keep[:, 0] = True"]
    return lines


MACHINES = {
    "sizes decide": "autoptd.Machine(latency=1e-9, per_saved_byte=1e-12)",
    "slow products": "autoptd.Machine(latency=1e-9, per_saved_byte=1e-12, flops=1e9)",
    "shared heads": "autoptd.Machine(flops=1e18, memory_bandwidth=1e15, latency=1e-7, per_parameter_byte=1e-10)",
}


def _call(case: Case) -> list[str]:
    t, p, d, v = case["mesh"]
    inputs = {"ids": "ids", "labels": "labels"} | ({"keep": "keep"} if case["padding"] else {})
    if case["result"] == "loss_fn":
        inputs["targets"] = inputs.pop("labels")
    pairs = ", ".join(f"'{name}': {one}" for name, one in inputs.items())
    call = f"{{{pairs}}}"
    if case.call != "names":
        between = {"positions": [], "None between": ["None"], "number between": ["2.0"]}[case.call]
        first, *others = inputs.values()
        call = f"({', '.join([first, *between, *others])})"
    arguments = [f"t={t}, p={p}, d={d}, v={v}, num_microbatches={case.num_microbatches}"]
    arguments += [
        f"schedule='{case.schedule}'",
        *(["loss_fn=loss_fn"] if case["result"] == "loss_fn" else []),
    ]
    arguments += _hooks(case.hooks)
    arguments += [f"p2p='{case['p2p']}'"] if case["p2p"] != "auto" else []
    arguments += [f"precision='{case.precision}'"] if case.precision else []
    if case.c > 1:
        arguments += [f"c={case.c}", f"token_order={case.token_order!r}"]
        arguments += ["context='all_gather'"] if case.by_gathers else []
    arguments += [f"zero={case['zero']}"] if case["zero"] else []
    arguments += [f"dp_shard={case.dp_shard}"] if case.dp_shard else []
    arguments += [f"reduce_dtype='{case.reduce_dtype}'"] if case.reduce_dtype != "fp32" else []
    arguments += [f"recompute={case['recompute']!r}"] if case["recompute"] else []
    # Of a byte, in seconds: about half of what could be made again is.
    arguments += ["memory_price=1e-11"] if case["recompute"] == "auto" else []
    arguments += [f"machine={MACHINES[case['machine']]}"] if case["machine"] in MACHINES else []
    arguments += [f"sequence_parallel={case.sequence_parallel!r}"] if case.sequence_parallel else []
    lines = [f"call = {call}"]
    if case.buffer.endswith("loaded"):
        lines += [*_other(case), f"check_loaded(model, other, {', '.join(arguments)}, example_inputs=call)"]
    if case["room"]:
        lines += [f"program = autoptd.compile(model, {', '.join(arguments)}, example_inputs=call)"]
        arguments += [f"memory=int({case['room']} * max(autoptd.peak_memory(program)).nbytes)"]
    return [
        *lines,
        f"autoptd.verify(model, {', '.join(arguments)}, example_inputs=call, steps={case['steps']})",
    ]


def _other(case: Case) -> list[str]:
    """Another model, whose state dict is loaded: `other`."""
    lines = ["other = Model()", "for p in other.parameters():", "    nn.init.normal_(p, std=0.3)"]
    if case.buffer == "loaded":
        return [*lines, "other.kept.uniform_(0.5, 1.5)"]
    narrower = ["if name.endswith('mask'):", "    mask &= mask.triu(-1)"]
    return [*lines, "for name, mask in other.named_buffers():", *indent(narrower)]


def _hooks(which: str) -> list[str]:
    """Keywords of the hooks on the backward of linear layers."""
    delay = "before_reduce" if which == "all" else which
    asked = {
        "async_tensor_model_parallel_allreduce=True": which in ("overlap", "overlap and main", "all"),
        "accumulate_allreduce_grads_in_fp32=True": which in ("main", "overlap and main", "all"),
        f"delay_wgrad_compute='{delay}'": delay in ("after_b", "before_reduce"),
    }
    return [text for text, is_asked in asked.items() if is_asked]
