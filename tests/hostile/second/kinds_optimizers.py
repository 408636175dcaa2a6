"""Optimizer classes of users, what loops change through them, schedulers and hooks; and what pm.optimizer is called with."""

# ruff: noqa: E501  (lines of other sources)

from __future__ import annotations

from tests.hostile.second.source import Part

BUILD = "def build(opt, model):\n    return opt({cls}, {more})"
KEYS = "lr=1e-2, eps=1e-3, weight_decay=0.1"


def own(name: str, body: str, base: str = "AdamW", keys: str = KEYS, more: str = "", top: str = "") -> Part:
    """A class of a user's own."""
    lines = "\n".join("    " + line for line in body.splitlines())
    build = BUILD.format(cls="Own", more=keys)
    return Part(name, top=f"{top}\nclass Own(torch.optim.{base}):\n{lines}", more=f"{build}\n{more}")


def stepping(name: str, lines: str, **more: str) -> Part:
    """A class whose step does something to each parameter before that of its base."""
    inner = "\n".join("            " + line for line in lines.splitlines())
    body = f"@torch.no_grad()\ndef step(self, closure=None):\n    for group in self.param_groups:\n        for n, p in enumerate(group['params']):\n            if p.grad is None:\n                continue\n{inner}\n    return super().step(closure)"
    return own(f"step: {name}", body, **more)


def built(name: str, lines: str, **more: str) -> Part:
    """A class whose constructor makes groups."""
    inner = "\n".join("    " + line for line in lines.splitlines())
    return own(
        f"constructor: {name}",
        f"def __init__(self, params, **kw):\n    params = list(params)\n{inner}\n    super().__init__(groups, **kw)",
        **more,
    )


# What the runtime says instead.
TOLD = (
    ".data assigned",
    "gradients clipped by value",
    "vector_to_parameters",
    "set_",
    "swap_tensors",
    "frozen",
)


def looped(name: str, edit: str = "", **slots: str) -> Part:
    inner = "\n".join("    " + line for line in edit.splitlines())
    more = f"def edit(step, optimizer):\n{inner}\n" if edit else ""
    play = {"told": True} if name in TOLD else {}
    return Part(f"loop: {name}", more=more + slots.get("more", ""), top=slots.get("top", ""), play=play)


BOTH = "groups = [{'params': [p for p in params if %s], 'weight_decay': 0.3}, {'params': [p for p in params if not (%s)], 'weight_decay': 0.0, 'lr': 3e-2}]"
OPTIMIZERS = [
    stepping("decay of matrices, ndim", "if p.ndim >= 2:\n    p.mul_(0.9)"),
    stepping("dim() of the gradient", "if p.grad.dim() == 1:\n    p.grad.mul_(0.5)"),
    stepping("len(shape)", "p.add_(p, alpha=0.01 * len(p.shape))"),
    stepping("numel above", "if p.numel() > 40:\n    p.mul_(0.9)"),
    stepping("numel of the gradient, scaled", "p.grad.div_(p.grad.numel() ** 0.5)"),
    stepping("shape[-1]", "p.mul_(1 - 0.01 * p.shape[-1] / 100)"),
    stepping("size(0) == V", "if p.size(0) == V:\n    p.mul_(0.8)"),
    stepping("square", "if p.ndim == 2 and p.shape[0] == p.shape[1]:\n    p.mul_(0.8)"),
    stepping("squeeze().ndim", "if p.squeeze().ndim < 2:\n    p.mul_(0.8)"),
    stepping(
        "nelement, is_contiguous, stride",
        "if p.nelement() % 3 == 0 and p.is_contiguous() and p.stride(0) > 1:\n    p.mul_(0.8)",
    ),
    stepping("len(p)", "p.mul_(1 - 1 / (100 + len(p)))"),
    stepping("number in the group", "p.mul_(1 - 0.01 * n)"),
    stepping("first and last only", "if n in (0, len(group['params']) - 1):\n    p.mul_(0.8)"),
    stepping(
        "a count of all elements", "group['weight_decay'] = 1e-3 * sum(x.numel() for x in group['params'])"
    ),
    stepping("a mean of the parameter", "p.sub_(p.mean() * 0.1)"),
    stepping("a trust ratio", "p.grad.mul_(p.norm() / (p.grad.norm() + 1e-6))"),
    stepping(
        "gradients centred by row",
        "if p.grad.ndim > 1:\n    p.grad.sub_(p.grad.mean(tuple(range(1, p.ndim)), keepdim=True))",
    ),
    stepping(
        "gradients centred, last dim", "if p.ndim == 2:\n    p.grad.sub_(p.grad.mean(-1, keepdim=True))"
    ),
    stepping("clipping by value", "p.grad.clamp_(-1e-3, 1e-3)"),
    stepping("clipping by its own norm", "p.grad.mul_(min(1.0, 0.01 / (float(p.grad.norm()) + 1e-9)))"),
    stepping("tanh of the gradient for vectors", "if p.ndim < 2:\n    p.grad.mul_(100).tanh_()"),
    stepping(
        "state of its own",
        "state = self.state[p]\nif 'slow' not in state and len(state):\n    state['slow'] = p.clone()\nif 'slow' in state:\n    state['slow'].lerp_(p, 0.1)\n    p.lerp_(state['slow'], 0.05)",
    ),
    stepping(
        "state of rows", "if p.ndim == 2:\n    self.state[p].setdefault('rows', torch.zeros(p.shape[0]))"
    ),
    stepping(
        "count in the group", "group['count'] = group.get('count', 0) + 1\np.mul_(1 - 0.001 * group['count'])"
    ),
    stepping(
        "count in itself", "self.calls = getattr(self, 'calls', 0) + 1\np.mul_(1 - 0.0001 * self.calls)"
    ),
    stepping("bits of a matrix's first row", "if p.ndim == 2:\n    p[0].mul_(0.9)"),
    stepping("sorting", "p.grad.copy_(p.grad.flatten().sort().values.view_as(p))"),
    stepping("noise", "p.add_(0.01 * torch.randn_like(p))"),
    stepping(
        "ids and types",
        "if id(p) and isinstance(p, nn.Parameter) and p.requires_grad and p.is_leaf:\n    p.mul_(0.9)",
    ),
    stepping(
        "a global set of outside", "if SEEN.setdefault(p.ndim, len(SEEN)):\n    p.mul_(0.9)", top="SEEN = {}"
    ),
    stepping("dtype and device", "if p.dtype == torch.float64 and p.device.type == 'cpu':\n    p.mul_(0.9)"),
    stepping(
        "nuclear: svd of matrices",
        "if p.ndim == 2:\n    u, s, v = torch.linalg.svd(p.grad, full_matrices=False)\n    p.grad.copy_(u @ v)",
    ),
    built("ndim", BOTH % ("p.ndim >= 2", "p.ndim >= 2")),
    built("numel", BOTH % ("p.numel() > 40", "p.numel() > 40")),
    built("shape[0] == V", BOTH % ("p.shape[0] == V", "p.shape[0] == V")),
    built(
        "every second",
        "groups = [{'params': params[::2], 'lr': 2e-2}, {'params': params[1::2], 'weight_decay': 0.0}]",
    ),
    built(
        "position, the first without decay",
        "groups = [{'params': params[:1], 'weight_decay': 0.0}, {'params': params[1:]}]",
    ),
    built("one group each", "groups = [{'params': [p], 'lr': 1e-2 / (1 + i)} for i, p in enumerate(params)]"),
    built("reversed", "groups = params[::-1]"),
    built("sorted by numel", "groups = sorted(params, key=lambda p: p.numel())"),
    built(
        "lr by fan-in (muP)",
        "groups = [{'params': [p], 'lr': 1e-2 / (p.shape[1] if p.ndim == 2 else 1)} for p in params]",
    ),
    built("an attribute of all", "groups = params\nself.dims = [p.ndim for p in params]"),
    built(
        "a dict of lists by ndim",
        "by = collections.defaultdict(list)\nfor p in params:\n    by[p.ndim].append(p)\ngroups = [{'params': v, 'lr': 1e-2 * k} for k, v in by.items()]",
    ),
    own(
        "defaults of its own",
        "def __init__(self, params, lr=5e-2, **kw):\n    super().__init__(params, lr=lr, betas=(0.8, 0.9), **kw)\n    self.defaults['extra'] = 1",
        keys="eps=1e-3",
    ),
    own(
        "a hook in the constructor",
        "def __init__(self, params, **kw):\n    super().__init__(params, **kw)\n    self.register_step_post_hook(self.shrink)\n@staticmethod\n@torch.no_grad()\ndef shrink(self, *_):\n    for g in self.param_groups:\n        for p in g['params']:\n            p.mul_(0.95 if p.ndim > 1 else 1.0)",
    ),
    own(
        "zero_grad of its own",
        "zeroed = 0\ndef zero_grad(self, set_to_none=True):\n    self.zeroed += 1\n    super().zero_grad(set_to_none)",
    ),
    own(
        "add_param_group of its own",
        "def add_param_group(self, group):\n    group = dict(group)\n    group['params'] = list(group['params'])\n    group['lr'] = 1e-2 * (1 + len(self.param_groups))\n    super().add_param_group(group)",
    ),
    own(
        "_init_group of its own",
        "def _init_group(self, group, *lists):\n    found = super()._init_group(group, *lists)\n    return found",
        base="Adam",
        keys="lr=1e-2, eps=1e-3, foreach=False",
    ),
    own(
        "SGD, momentum for matrices",
        "@torch.no_grad()\ndef step(self, closure=None):\n    for group in self.param_groups:\n        group['momentum'] = 0.9\n    super().step()",
        base="SGD",
        keys="lr=1e-2, weight_decay=0.1",
    ),
    own(
        "step that calls nothing",
        "@torch.no_grad()\ndef step(self, closure=None):\n    for g in self.param_groups:\n        for p in g['params']:\n            if p.grad is not None:\n                p.add_(p.grad, alpha=-g['lr'] * (2 if p.ndim == 2 else 1))",
        base="SGD",
        keys="lr=1e-2",
    ),
    Part(
        "Lion, of Optimizer",
        top="class Lion(torch.optim.Optimizer):\n    elementwise = True\n\n    def __init__(self, params, lr=1e-3, beta=0.9):\n        super().__init__(params, dict(lr=lr, beta=beta))\n\n    @torch.no_grad()\n    def step(self, closure=None):\n        for g in self.param_groups:\n            for p in g['params']:\n                if p.grad is None:\n                    continue\n                m = self.state[p].setdefault('m', torch.zeros_like(p))\n                p.add_((m * g['beta'] + p.grad * 0.1).tanh(), alpha=-g['lr'] * p.ndim)\n                m.lerp_(p.grad, 0.01)",
        more=BUILD.format(cls="Lion", more="lr=1e-2"),
    ),
    Part(
        "Muon, not elementwise",
        top="class Muon(torch.optim.Optimizer):\n    def __init__(self, params, lr=1e-3):\n        super().__init__(params, dict(lr=lr))\n\n    @torch.no_grad()\n    def step(self, closure=None):\n        for g in self.param_groups:\n            for p in g['params']:\n                if p.grad is not None:\n                    p.add_(p.grad / (p.grad.norm() + 1e-6), alpha=-g['lr'])",
        more=BUILD.format(cls="Muon", more="lr=1e-2"),
    ),
    Part(
        "trust ratio, whole",
        top="class Lars(torch.optim.Optimizer):\n    whole = True\n\n    def __init__(self, params, lr=1e-2):\n        super().__init__(params, dict(lr=lr))\n\n    @torch.no_grad()\n    def step(self, closure=None):\n        for g in self.param_groups:\n            for p in g['params']:\n                if p.grad is None:\n                    continue\n                m = self.state[p].setdefault('m', torch.zeros_like(p)).lerp_(p.grad, 0.5)\n                p.sub_(m * ((p.norm() + 0.1) / (m.norm() + 1e-3)), alpha=g['lr'])",
        more=BUILD.format(cls="Lars", more="lr=1e-2"),
    ),
    Part(
        "rows and columns, whole",
        top="class Factored(torch.optim.SGD):\n    whole = True\n\n    @torch.no_grad()\n    def step(self, closure=None):\n        for g in self.param_groups:\n            for p in g['params']:\n                if p.grad is not None and p.ndim == 2:\n                    sides = [self.state[p].setdefault(f'side {d}', torch.ones(p.shape[1 - d], dtype=p.dtype)) for d in (0, 1)]\n                    for d, side in enumerate(sides):\n                        side.add_((p.grad ** 2).mean(d))\n                    p.grad /= torch.outer(sides[1], sides[0]).sqrt()\n        return super().step(closure)",
        more=BUILD.format(cls="Factored", more="lr=1e-2, momentum=0.9"),
    ),
    looped(
        "clamp through param_groups",
        "with torch.no_grad():\n    for g in optimizer.param_groups:\n        for p in g['params']:\n            p.clamp_(-0.2, 0.2)",
    ),
    looped(
        "mul_ of .data",
        "for g in optimizer.param_groups:\n    for p in g['params']:\n        p.data.mul_(0.9)",
    ),
    looped(
        ".data assigned",
        "for g in optimizer.param_groups:\n    for p in g['params']:\n        p.data = p.data * 0.9",
    ),
    *(
        looped(name, f"for g in optimizer.param_groups:\n    for p in g['params']:\n        {edit}")
        for name, edit in {
            "vector_to_parameters": "torch.nn.utils.vector_to_parameters(p.detach().flatten() * 0.9, [p])",
            "set_": "with torch.no_grad():\n            p.set_((p * 0.9).contiguous())",
            "swap_tensors": "torch.utils.swap_tensors(p, nn.Parameter(p.detach() * 0.9))",
            "frozen": "p.requires_grad_(p.ndim > 1)",
        }.items()
    ),
    looped(
        "foreach_mul_",
        "with torch.no_grad():\n    for g in optimizer.param_groups:\n        torch._foreach_mul_(g['params'], 0.9)",
    ),
    looped(
        "copy_ at the second step",
        "if step == 1:\n    with torch.no_grad():\n        for g in optimizer.param_groups:\n            for p in g['params']:\n                p.copy_(p.sign() * 0.01 + p)",
    ),
    looped(
        "a view of a parameter",
        "with torch.no_grad():\n    for g in optimizer.param_groups:\n        for p in g['params']:\n            p.view(-1).mul_(0.9)",
    ),
    looped(
        "numpy's view",
        "for g in optimizer.param_groups:\n    for p in g['params']:\n        a = p.detach().numpy()\n        a *= 0.9",
    ),
    looped(
        "lookahead in state",
        "for g in optimizer.param_groups:\n    for p in g['params']:\n        s = optimizer.state[p]\n        s.setdefault('slow', p.detach().clone())\n        s['slow'].lerp_(p.detach(), 0.5)\n        p.data.copy_(s['slow'])",
    ),
    looped(
        "projection by ndim",
        "with torch.no_grad():\n    for g in optimizer.param_groups:\n        for p in g['params']:\n            if p.ndim >= 2:\n                p.clamp_(-0.1, 0.1)",
    ),
    looped("moments reset", "for s in optimizer.state.values():\n    s['exp_avg'].zero_()"),
    looped(
        "lr, betas, decay",
        "for g in optimizer.param_groups:\n    g['lr'] *= 0.5\n    g['betas'] = (0.8, 0.99)\n    g['weight_decay'] = 0.3",
    ),
    looped(
        "a post hook that clamps",
        more="def hooks(optimizer):\n    def clamp(opt, args, kwargs):\n        with torch.no_grad():\n            for g in opt.param_groups:\n                for p in g['params']:\n                    p.clamp_(-0.2, 0.2)\n    optimizer.register_step_post_hook(clamp)",
    ),
    looped(
        "two post hooks, one removed",
        more="def hooks(optimizer):\n    def shrink(opt, args, kwargs):\n        for g in opt.param_groups:\n            torch._foreach_mul_([p.data for p in g['params']], 0.9)\n    optimizer.register_step_post_hook(shrink).remove()\n    optimizer.register_step_post_hook(shrink)",
    ),
    looped(
        "a pre hook that sets lr",
        more="def hooks(optimizer):\n    def rate(opt, args, kwargs):\n        for g in opt.param_groups:\n            g['lr'] = g['lr'] * 0.7\n    optimizer.register_step_pre_hook(rate)",
    ),
    looped(
        "a pre hook that shrinks weights",
        more="def hooks(optimizer):\n    def shrink(opt, args, kwargs):\n        with torch.no_grad():\n            for g in opt.param_groups:\n                for p in g['params']:\n                    p.mul_(0.9)\n    optimizer.register_step_pre_hook(shrink)",
    ),
    looped(
        "a pre hook that scales gradients",
        more="def hooks(optimizer):\n    def shrink(opt, args, kwargs):\n        for g in opt.param_groups:\n            for p in g['params']:\n                if p.grad is not None:\n                    p.grad.mul_(0.1)\n    optimizer.register_step_pre_hook(shrink)",
    ),
    looped(
        "gradients scaled by the loop",
        more="def grads(step, model):\n    for p in model.parameters():\n        if p.grad is not None:\n            p.grad.mul_(0.5)",
    ),
    looped(
        "gradients clipped by value",
        more="def grads(step, model):\n    torch.nn.utils.clip_grad_value_(model.parameters(), 1e-3)",
    ),
    looped(
        "gradients through the optimizer",
        more="def build(opt, model):\n    global made\n    made = opt(torch.optim.AdamW, lr=1e-2, eps=1e-3)\n    return made\n\n\ndef grads(step, model):\n    for g in made.param_groups:\n        for p in g['params']:\n            if p.grad is not None:\n                p.grad.mul_(0.5)",
    ),
    looped(
        "parameters through the model",
        more="def grads(step, model):\n    with torch.no_grad():\n        for p in model.parameters():\n            p.mul_(0.9)",
    ),
    *(
        looped(
            f"rates of {name}",
            more=f"def rates(optimizer):\n    S = torch.optim.lr_scheduler\n    return {make}",
        )
        for name, make in {
            "OneCycleLR": "S.OneCycleLR(optimizer, 0.05, total_steps=20)",
            "CosineAnnealingWarmRestarts": "S.CosineAnnealingWarmRestarts(optimizer, 2)",
            "ReduceLROnPlateau": "S.ReduceLROnPlateau(optimizer, patience=0, factor=0.5, threshold=0.5)",
            "CyclicLR": "S.CyclicLR(optimizer, 1e-3, 1e-1, step_size_up=2, cycle_momentum=True)",
            "SequentialLR": "S.SequentialLR(optimizer, [S.ConstantLR(optimizer, 0.1, 2), S.ExponentialLR(optimizer, 0.9)], [2])",
            "MultiplicativeLR": "S.MultiplicativeLR(optimizer, lambda n: 0.9)",
        }.items()
    ),
]


def asked(name: str, call: str, top: str = "") -> Part:
    return Part(
        name, more="def build(opt, model):\n" + "\n".join("    " + x for x in call.splitlines()), top=top
    )


A = "torch.optim.AdamW"
PARAMS = [
    asked("model.parameters()", f"return opt({A}, model.parameters(), lr=1e-2)"),
    asked(
        "list of parameters, keywords", f"return opt({A}, params=list(model.parameters()), lr=1e-2, eps=1e-3)"
    ),
    asked("named_parameters()", f"return opt({A}, model.named_parameters(), lr=1e-2)"),
    asked(
        "named_parameters() of a submodule",
        f"return opt({A}, list(model.blocks.named_parameters()), lr=1e-2)",
    ),
    asked(
        "filter requires_grad",
        f"return opt({A}, filter(lambda p: p.requires_grad, model.parameters()), lr=1e-2)",
    ),
    asked(
        "some frozen, all passed",
        f"model.embed.weight.requires_grad_(True)\nreturn opt({A}, [p for p in model.parameters()], lr=1e-2)",
    ),
    asked("a subset", f"return opt({A}, model.blocks.parameters(), lr=1e-2)"),
    asked("a subset in another order", f"return opt({A}, list(model.parameters())[::-2], lr=1e-2)"),
    asked(
        "groups by ndim, numbers of the model",
        f"ps = list(model.parameters())\nreturn opt({A}, [{{'params': [p for p in ps if p.ndim > 1], 'weight_decay': 0.3}}, {{'params': [p for p in ps if p.ndim < 2], 'weight_decay': 0.0, 'lr': 5e-2}}], lr=1e-2)",
    ),
    asked(
        "groups by numel, numbers of the model",
        f"ps = list(model.parameters())\nreturn opt({A}, [{{'params': [p for p in ps if p.numel() > 50]}}, {{'params': [p for p in ps if p.numel() <= 50], 'lr': 5e-2}}], lr=1e-2)",
    ),
    asked(
        "groups of generators",
        f"return opt({A}, [{{'params': model.embed.parameters()}}, {{'params': model.blocks.parameters(), 'lr': 3e-2}}, {{'params': model.head.parameters()}}], lr=1e-2)",
    ),
    asked(
        "groups of one tensor",
        f"return opt({A}, [{{'params': model.head.weight, 'lr': 3e-2}}, {{'params': model.blocks[0].up.weight}}], lr=1e-2)",
    ),
    asked(
        "groups as a tuple, dict_values",
        f"return opt({A}, ({{'params': dict(model.blocks.named_parameters()).values()}}, {{'params': set([model.head.bias])}})[:1], lr=1e-2)",
    ),
    asked(
        "layerwise decay of lr",
        f"return opt({A}, [{{'params': b.parameters(), 'lr': 1e-2 * 0.5**i}} for i, b in enumerate(model.blocks)] + [{{'params': [model.embed.weight, *model.head.parameters()]}}], lr=1e-2)",
    ),
    asked(
        "named tuples in groups",
        f"return opt({A}, [{{'params': [(n, p) for n, p in model.named_parameters() if 'norm' in n], 'lr': 3e-2}}, {{'params': [(n, p) for n, p in model.named_parameters() if 'norm' not in n]}}], lr=1e-2)",
    ),
    asked(
        "names as an iterator twice",
        f"named = dict(model.named_parameters())\nreturn opt({A}, [named[n] for n in named], lr=1e-2)",
    ),
    asked("partial", f"return opt(functools.partial({A}, lr=1e-2, eps=1e-3), model.parameters())"),
    asked("partial without params", f"return opt(functools.partial({A}, lr=1e-2))"),
    asked(
        "partial of partial, overridden",
        f"return opt(functools.partial(functools.partial({A}, lr=1.0), lr=1e-2), model.parameters(), eps=1e-3)",
    ),
    asked(
        "partial with the parameters inside",
        f"return opt(functools.partial({A}, model.parameters(), lr=1e-2))",
    ),
    asked(
        "partial with groups inside",
        f"return opt(functools.partial({A}, [{{'params': model.blocks.parameters()}}], lr=1e-2))",
    ),
    asked("a lambda", f"return opt(lambda ps, **k: {A}(ps, lr=1e-2), model.parameters())"),
    asked(
        "an instance",
        f"made = {A}(model.parameters(), lr=1e-2)\nreturn opt(made) if opt.__name__ == 'optimizer' else made",
    ),
    asked(
        "a stranger's parameter",
        f"return opt({A}, [*model.parameters(), nn.Parameter(torch.zeros(2))], lr=1e-2)",
    ),
    asked("a parameter of another model", f"return opt({A}, make().parameters(), lr=1e-2)"),
    asked(
        "an empty group", f"return opt({A}, [{{'params': []}}, {{'params': model.parameters()}}], lr=1e-2)"
    ),
    asked(
        "an own class by model parameters",
        "return opt(Own, [{'params': model.blocks.parameters(), 'lr': 3e-2}, {'params': model.head.parameters()}], lr=1e-2, eps=1e-3)",
        top="class Own(torch.optim.AdamW):\n    @torch.no_grad()\n    def step(self, closure=None):\n        for g in self.param_groups:\n            for p in g['params']:\n                p.mul_(0.9 if p.ndim > 1 else 0.99)\n        return super().step(closure)",
    ),
    asked("tensor lr", f"return opt({A}, model.parameters(), lr=torch.tensor(1e-2))"),
    asked(
        "maximize, amsgrad",
        "return opt(torch.optim.Adam, model.parameters(), lr=1e-3, amsgrad=True, maximize=True)",
    ),
    asked(
        "Adagrad with an initial value",
        "return opt(torch.optim.Adagrad, model.parameters(), lr=1e-2, initial_accumulator_value=0.1)",
    ),
    asked("ASGD", "return opt(torch.optim.ASGD, model.parameters(), lr=1e-2)"),
    asked(
        "NAdam, groups with betas",
        "return opt(torch.optim.NAdam, [{'params': model.blocks.parameters(), 'betas': (0.5, 0.9)}, {'params': model.head.parameters()}], lr=1e-2)",
    ),
    asked("Adafactor", "return opt(torch.optim.Adafactor, model.parameters(), lr=1e-2)"),
    asked(
        "Muon of torch",
        "return opt(torch.optim.Muon, [p for p in model.parameters() if p.ndim == 2], lr=1e-2)",
    ),
]
