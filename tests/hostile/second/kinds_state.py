"""State in Python that a forward keeps, and what loops change from outside: refused, warned of, found while it runs, or right."""

# ruff: noqa: E501  (lines of other sources)

from __future__ import annotations

from tests.hostile.second.source import Part

TOLD = {"steps": 46, "losses_only": True, "told": True}
BUMP = "def bump(n):\n    return 2.0 if n > {at} else 1.0\n"
AT = (1, 4, 30)


def hidden(name: str, top: str, use: str, init: str = "", at: int = 30) -> Part:
    """`use` is an expression, the number that the logits are multiplied with."""
    return Part(
        f"{name} (at {at})", top=BUMP.format(at=at) + top, init=init, end=f"h = h * ({use})", play=TOLD
    )


# Many more are in `WRITES` of tests/trace/test_writes.py, each seen by itself in every run of the tests.
FORMS: list[tuple[str, str, str, str]] = [
    (
        "attribute of the module",
        "",
        "self.tick()",
        "self.n = 0\nself.tick = lambda: (setattr(self, 'n', self.n + 1), bump(self.n))[1]",
    ),
    (
        "attribute of a submodule",
        "def tick(m):\n    m.blocks[0].n = getattr(m.blocks[0], 'n', 0) + 1\n    return bump(m.blocks[0].n)",
        "tick(self)",
        "",
    ),
    (
        "a descriptor",
        "class Count:\n    n = 0\n    def __get__(self, one, cls):\n        self.n += 1\n        return bump(self.n)\nclass Has:\n    value = Count()\nhas = Has()",
        "has.value",
        "",
    ),
    (
        "__getattr__",
        "class Magic:\n    def __init__(self):\n        self.__dict__['n'] = 0\n    def __getattr__(self, name):\n        self.__dict__['n'] += 1\n        return bump(self.__dict__['n'])\nmagic = Magic()",
        "magic.anything",
        "",
    ),
    (
        "list.extend by +=",
        "LOG = []\ndef tick():\n    global LOG\n    LOG += [1]\n    return bump(len(LOG))",
        "tick()",
        "",
    ),
    (
        "slice assignment",
        "LOG = []\ndef tick():\n    LOG[len(LOG):] = [1]\n    return bump(len(LOG))",
        "tick()",
        "",
    ),
    ("list.pop of a schedule", "PLAN = [1.0] * 30 + [2.0] * 900", "PLAN.pop(0)", ""),
    (
        "dict.setdefault and pop",
        "C = {}\ndef tick():\n    n = C.pop('n', 0) + 1\n    C.setdefault('n', n)\n    return bump(n)",
        "tick()",
        "",
    ),
    ("set.add", "S = set()\ndef tick():\n    S.add(len(S))\n    return bump(len(S))", "tick()", ""),
    (
        "numpy 0-d augmented",
        "A = np.zeros(())\ndef tick():\n    global A\n    A += 1\n    return bump(float(A))",
        "tick()",
        "",
    ),
    (
        "generator.send",
        "def gen():\n    n = 0\n    while True:\n        yield bump(n)\n        n += 1\ngen_ = gen()\nnext(gen_)",
        "gen_.send(None)",
        "",
    ),
    (
        "iter(callable, sentinel)",
        "C = [0]\ndef up():\n    C[0] += 1\n    return bump(C[0])\nit = iter(up, None)",
        "next(it)",
        "",
    ),
    ("random", "", "1.0 + random.random()", ""),
    ("numpy random", "", "1.0 + np.random.rand()", ""),
    (
        "time",
        "import time\nstart = time.perf_counter_ns()",
        "1.0 + (time.perf_counter_ns() - start) * 1e-12",
        "",
    ),
    (
        "attribute of a module of Python",
        "import json\ndef tick():\n    json.hostile_n = getattr(json, 'hostile_n', 0) + 1\n    return bump(json.hostile_n)\njson.hostile_n = 0",
        "tick()",
        "",
    ),
    (
        "a dataclass, replaced",
        "At = dataclasses.make_dataclass('At', [('n', int, 0)], frozen=True)\nAT = At()\ndef tick():\n    global AT\n    AT = dataclasses.replace(AT, n=AT.n + 1)\n    return bump(AT.n)",
        "tick()",
        "",
    ),
    (
        "frozen dataclass by object",
        "At = dataclasses.make_dataclass('At', [('n', int, 0)], frozen=True)\nAT = At()\ndef tick():\n    object.__setattr__(AT, 'n', AT.n + 1)\n    return bump(AT.n)",
        "tick()",
        "",
    ),
    (
        "a forward hook",
        "C = [0]\ndef hook(m, args, out):\n    C[0] += 1\n    return out * bump(C[0])",
        "1.0",
        "self.head.register_forward_hook(hook)",
    ),
    (
        "a pre hook",
        "C = [0]\ndef hook(m, args):\n    C[0] += 1\n    return (args[0] * bump(C[0]),)",
        "1.0",
        "self.head.register_forward_pre_hook(hook)",
    ),
    (
        "a tensor attribute",
        "def tick(m):\n    m.n_ = m.n_ + 1\n    return 1 + 0.1 * m.n_",
        "tick(self)",
        "self.n_ = torch.zeros(())",
    ),
    (
        "a tensor in a dict",
        "C = {'n': torch.zeros(())}\ndef tick():\n    C['n'] += 1\n    return 1 + 0.1 * C['n']",
        "tick()",
        "",
    ),
    (
        "a tensor's .item()",
        "T = torch.zeros(())\ndef tick():\n    T.add_(1)\n    return bump(T.item())",
        "tick()",
        "",
    ),
    (
        "warnings counted",
        "import logging\nclass Count(logging.Handler):\n    n = 0\n    def emit(self, record):\n        Count.n += 1\nlog = logging.getLogger('hostile')\nlog.addHandler(Count())\nlog.setLevel(1)\nlog.propagate = False\ndef tick():\n    log.log(60, 'x')\n    return bump(Count.n)",
        "tick()",
        "",
    ),
    (
        "try, except, finally",
        "C = [0]\ndef tick():\n    try:\n        raise KeyError\n    except KeyError:\n        return bump(C[0])\n    finally:\n        C[0] += 1",
        "tick()",
        "",
    ),
    (
        "a comprehension that writes",
        "C = {}\ndef tick():\n    [C.__setitem__(k, 1) for k in (len(C),)]\n    return bump(len(C))",
        "tick()",
        "",
    ),
    (
        "walrus and tuple targets",
        "C = [0, 0]\ndef tick():\n    C[0], C[1] = C[0] + 1, 0\n    return bump(C[0])",
        "tick()",
        "",
    ),
    (
        "id and gc",
        "import gc\nLIVE = []\ndef tick():\n    LIVE.insert(0, object())\n    return bump(LIVE.__len__())",
        "tick()",
        "",
    ),
    (
        "a class made in forward",
        "REG = []\nclass Base:\n    def __init_subclass__(cls):\n        REG.append(cls)\ndef tick():\n    type('Sub', (Base,), {})\n    return bump(len(REG))",
        "tick()",
        "",
    ),
    (
        "singledispatch, registry",
        "@functools.cache\ndef where(n):\n    return n\nC = {'n': 0}\nclass Reg(dict):\n    def __missing__(self, k):\n        self['n'] = dict.get(self, 'n', 0) + 1\n        return bump(dict.get(self, 'n'))\nreg = Reg()",
        "reg['x']",
        "",
    ),
    (
        "sys.modules",
        "import sys\ndef tick():\n    m = sys.modules.setdefault('hostile_mod', types.ModuleType('hostile_mod'))\n    m.n = getattr(m, 'n', 0) + 1\n    return bump(m.n)\nsys.modules.pop('hostile_mod', None)",
        "tick()",
        "",
    ),
]
ALLOWED = [  # right, whatever Python keeps: no refusal is asked for, and none is good either
    (
        "a cache of tables",
        "TABLE = {}\ndef table(n):\n    if n not in TABLE:\n        TABLE[n] = torch.linspace(0.5, 1.5, n)\n    return TABLE[n]",
        "table(W)",
        "",
    ),
    ("a count that nobody reads", "C = [0]\ndef tick():\n    C[0] += 1\n    return 1.5", "tick()", ""),
    (
        "an attribute that only logs",
        "def tick(m):\n    m.calls = getattr(m, 'calls', 0) + 1\n    return 1.5",
        "tick(self)",
        "",
    ),
    (
        "the last output, kept",
        "def tick(m, h):\n    m.last = h.detach()\n    return 1.5",
        "tick(self, h)",
        "",
    ),
    ("lru_cache", "@functools.lru_cache(None)\ndef scale(n):\n    return 1.0 + n / 100", "scale(W)", ""),
    (
        "cached_property",
        "class Conf:\n    @functools.cached_property\n    def scale(self):\n        return 1.5\nconf = Conf()",
        "conf.scale",
        "",
    ),
    (
        "a local list",
        "def tick():\n    out = []\n    for i in range(4):\n        out.append(i)\n    return 1.0 + sum(out)",
        "tick()",
        "",
    ),
    (
        "a local iterator, a local class",
        "def tick():\n    it = iter([1.5])\n    class Box:\n        x = 0\n    Box.x = next(it)\n    return Box.x",
        "tick()",
        "",
    ),
    ("written again with the same", "C = {}\ndef tick():\n    C['x'] = 1.5\n    return C['x']", "tick()", ""),
    (
        "set and reset",
        "C = {'x': 1.0}\ndef tick():\n    old, C['x'] = C['x'], 2.0\n    y = C['x']\n    C['x'] = old\n    return y",
        "tick()",
        "",
    ),
    ("a stack that is popped", "S = []\ndef tick():\n    S.append(1.5)\n    return S.pop()", "tick()", ""),
    ("lazily made", "BOX = {}\ndef tick():\n    BOX.setdefault('x', 1.5)\n    return BOX['x']", "tick()", ""),
    (
        "losses of layers, collected anew",
        "class Aux:\n    items = []\naux = Aux()\ndef tick(h):\n    aux.items = []\n    aux.items.append(h.detach().mean() * 0 + 1.5)\n    return aux.items[0]",
        "tick(h)",
        "",
    ),
]
OUTSIDE = [  # what a loop changes between steps
    ("an attribute", "", "self.alpha", "self.alpha = 1.0", "model.alpha = 1.0 if step < {at} else 2.0"),
    (
        "a dict of the module",
        "",
        "self.conf['a']",
        "self.conf = {'a': 1.0}",
        "model.conf['a'] = 1.0 if step < {at} else 2.0",
    ),
    ("a global", "SCALE = 1.0", "SCALE", "", "global SCALE\nSCALE = 1.0 if step < {at} else 2.0"),
    ("a branch", "", "2.0 if self.late else 1.0", "self.late = False", "model.late = step >= {at}"),
    ("a list item", "S = [1.0]", "S[0]", "", "S[0] = 1.0 + 0.1 * (step >= {at})"),
    (
        "a layer's attribute",
        "",
        "self.blocks[-1].gain",
        "for b in self.blocks:\n    b.gain = 1.0",
        "model.blocks[-1].gain = 1.0 + (step >= {at})",
    ),
    ("a number of layers", "", "1.0 + self.depth", "self.depth = 0", "model.depth = int(step >= {at})"),
    (
        "a tensor attribute",
        "",
        "self.t",
        "self.t = torch.ones(())",
        "model.t = torch.ones(()) * (1 + (step >= {at}))",
    ),
    ("a tensor in place", "T = torch.ones(())", "T", "", "T.fill_(1 + (step >= {at}))"),
    (
        "a buffer in place",
        "",
        "self.b_",
        "self.register_buffer('b_', torch.ones(()))",
        "model.b_.fill_(1 + (step >= {at}))",
    ),
    (
        "eval of a submodule",
        "",
        "1.0 if self.blocks[0].training else 2.0",
        "",
        "model.blocks[0].train(step < {at})",
    ),
    (
        "dropout's p",
        "",
        "1.0 + self.drop.p",
        "self.drop = nn.Dropout(0.0)",
        "model.drop.p = 0.0 if step < {at} else 1.0",
    ),
    (
        "a function replaced",
        "",
        "self.act(torch.ones(()))",
        "self.act = torch.tanh",
        "model.act = torch.tanh if step < {at} else torch.sin",
    ),
    ("numpy in place", "A = np.ones(1)", "float(A[0])", "", "A[0] = 1.0 + (step >= {at})"),
    (
        "the environment",
        "import os\nos.environ['HOSTILE_S'] = '1'",
        "float(os.environ.get('HOSTILE_S', '1'))",
        "",
        "os.environ['HOSTILE_S'] = str(1 + (step >= {at}))",
    ),
    (
        "a module replaced",
        "",
        "self.gate(h)",
        "self.gate = nn.Identity()",
        "model.gate = nn.Identity() if step < {at} else nn.Tanh()",
    ),
]
STATE = [
    hidden(name, top, use, init, at=AT[i % 3] if "cycle" not in name else 30)
    for i, (name, top, use, init) in enumerate(FORMS)
]
STATE += [
    Part(f"fine: {n}", top=t, end=f"h = h * ({u})", init=i, play={"steps": 4, "losses_only": True})
    for n, t, u, i in ALLOWED
]
OUTSIDE_STATE = [
    Part(
        f"{n} (at {at})",
        top=t,
        end=f"h = h * ({u})",
        init=i,
        more="def before(step, model):\n" + "\n".join("    " + x for x in do.format(at=at).splitlines()),
        play=TOLD,
    )
    for k, (n, t, u, i, do) in enumerate(OUTSIDE)
    for at in [(1, 4, 20)[k % 3]]
]
