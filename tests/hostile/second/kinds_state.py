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


FORMS: list[tuple[str, str, str, str]] = [
    (
        "an error's arguments",
        "LAST = [ValueError(0)]\ndef tick():\n    LAST[0] = ValueError(LAST[0].args[0] + 1)\n    return bump(LAST[0].args[0])",
        "tick()",
        "",
    ),
    (
        "a date of its own class",
        "import datetime\nclass Days(datetime.timedelta):\n    pass\nD = [Days(0)]\ndef tick():\n    D[0] = Days(D[0].days + 1)\n    return bump(D[0].days)",
        "tick()",
        "",
    ),
    (
        "attribute of the module",
        "",
        "self.tick()",
        "self.n = 0\nself.tick = lambda: (setattr(self, 'n', self.n + 1), bump(self.n))[1]",
    ),
    (
        "__dict__ of the module",
        "def tick(m):\n    m.__dict__['n'] = m.__dict__.get('n', 0) + 1\n    return bump(m.n)",
        "tick(self)",
        "",
    ),
    (
        "object.__setattr__",
        "def tick(m):\n    object.__setattr__(m, 'n', getattr(m, 'n', 0) + 1)\n    return bump(m.n)",
        "tick(self)",
        "",
    ),
    (
        "vars().update",
        "def tick(m):\n    vars(m).update(n=vars(m).get('n', 0) + 1)\n    return bump(m.n)",
        "tick(self)",
        "",
    ),
    (
        "attribute of a submodule",
        "def tick(m):\n    m.blocks[0].n = getattr(m.blocks[0], 'n', 0) + 1\n    return bump(m.blocks[0].n)",
        "tick(self)",
        "",
    ),
    (
        "attribute of a parameter",
        "def tick(m):\n    m.head.weight.n = getattr(m.head.weight, 'n', 0) + 1\n    return bump(m.head.weight.n)",
        "tick(self)",
        "",
    ),
    (
        "class attribute of a helper",
        "class Help:\n    n = 0\n    def __call__(self):\n        Help.n += 1\n        return bump(Help.n)\nhelp_ = Help()",
        "help_()",
        "",
    ),
    (
        "class attribute by type()",
        "def tick(m):\n    type(m).n = getattr(type(m), 'n', 0) + 1\n    return bump(type(m).n)",
        "tick(self)",
        "",
    ),
    (
        "slots",
        "class Box:\n    __slots__ = ('n',)\n    def __init__(self):\n        self.n = 0\n    def go(self):\n        self.n += 1\n        return bump(self.n)\nbox = Box()",
        "box.go()",
        "",
    ),
    (
        "a property's getter",
        "class Box:\n    n = 0\n    @property\n    def value(self):\n        self.n += 1\n        return bump(self.n)\nbox = Box()",
        "box.value",
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
        "operators of a class",
        "class Num:\n    n = 0\n    def __mul__(self, x):\n        self.n += 1\n        return bump(self.n) * x\nnum = Num()",
        "num * 1.0",
        "",
    ),
    (
        "a context manager",
        "class Scope:\n    n = 0\n    def __enter__(self):\n        self.n += 1\n        return bump(self.n)\n    def __exit__(self, *_):\n        pass\nscope = Scope()\ndef tick():\n    with scope as x:\n        return x",
        "tick()",
        "",
    ),
    ("global", "n = 0\ndef tick():\n    global n\n    n += 1\n    return bump(n)", "tick()", ""),
    (
        "globals()",
        "def tick():\n    g = globals()\n    g['n_'] = g.get('n_', 0) + 1\n    return bump(g['n_'])",
        "tick()",
        "",
    ),
    (
        "cell",
        "def maker():\n    n = 0\n    def tick():\n        nonlocal n\n        n += 1\n        return bump(n)\n    return tick\ntick = maker()",
        "tick()",
        "",
    ),
    ("mutable default", "def tick(box=[0]):\n    box[0] += 1\n    return bump(box[0])", "tick()", ""),
    (
        "function attribute",
        "def tick():\n    tick.n = getattr(tick, 'n', 0) + 1\n    return bump(tick.n)",
        "tick()",
        "",
    ),
    (
        "nine calls deep",
        "C = {'n': 0}\ndef f0():\n    C['n'] += 1\n    return bump(C['n'])\n"
        + "\n".join(f"def f{i}():\n    return f{i - 1}()" for i in range(1, 10)),
        "f9()",
        "",
    ),
    (
        "recursion",
        "C = [0]\ndef deep(k):\n    if k:\n        return deep(k - 1)\n    C[0] += 1\n    return bump(C[0])",
        "deep(12)",
        "",
    ),
    ("list.append", "LOG = []\ndef tick():\n    LOG.append(1)\n    return bump(len(LOG))", "tick()", ""),
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
    (
        "del of an item",
        "LEFT = list(range(100))\ndef tick():\n    del LEFT[0]\n    return bump(100 - len(LEFT))",
        "tick()",
        "",
    ),
    ("list.pop of a schedule", "PLAN = [1.0] * 30 + [2.0] * 900", "PLAN.pop(0)", ""),
    (
        "dict.update",
        "C = {}\ndef tick():\n    C.update(n=C.get('n', 0) + 1)\n    return bump(C['n'])",
        "tick()",
        "",
    ),
    (
        "dict.setdefault and pop",
        "C = {}\ndef tick():\n    n = C.pop('n', 0) + 1\n    C.setdefault('n', n)\n    return bump(n)",
        "tick()",
        "",
    ),
    ("set.add", "S = set()\ndef tick():\n    S.add(len(S))\n    return bump(len(S))", "tick()", ""),
    (
        "Counter",
        "C = collections.Counter()\ndef tick():\n    C['n'] += 1\n    return bump(C['n'])",
        "tick()",
        "",
    ),
    (
        "deque.rotate",
        "D = collections.deque([1.0] * 30 + [2.0] * 900)\ndef tick():\n    x = D[0]\n    D.rotate(-1)\n    return x",
        "tick()",
        "",
    ),
    (
        "defaultdict by reading",
        "D = collections.defaultdict(lambda: len(D))\ndef tick():\n    D[len(D)]\n    return bump(len(D))",
        "tick()",
        "",
    ),
    ("numpy +=", "A = np.zeros(1)\ndef tick():\n    A[0] += 1\n    return bump(A[0])", "tick()", ""),
    (
        "numpy out=",
        "A = np.zeros(1)\ndef tick():\n    np.add(A, 1, out=A)\n    return bump(A[0])",
        "tick()",
        "",
    ),
    (
        "numpy fill, put",
        "A = np.zeros(1)\ndef tick():\n    A.put(0, A[0] + 1)\n    return bump(A.item())",
        "tick()",
        "",
    ),
    (
        "numpy 0-d augmented",
        "A = np.zeros(())\ndef tick():\n    global A\n    A += 1\n    return bump(float(A))",
        "tick()",
        "",
    ),
    (
        "array",
        "import array\nA = array.array('i', [0])\ndef tick():\n    A[0] += 1\n    return bump(A[0])",
        "tick()",
        "",
    ),
    ("bytearray", "A = bytearray(1)\ndef tick():\n    A[0] += 1\n    return bump(A[0])", "tick()", ""),
    (
        "memoryview",
        "A = memoryview(bytearray(1))\ndef tick():\n    A[0] += 1\n    return bump(A[0])",
        "tick()",
        "",
    ),
    (
        "ctypes",
        "import ctypes\nA = ctypes.c_int(0)\ndef tick():\n    A.value += 1\n    return bump(A.value)",
        "tick()",
        "",
    ),
    ("next of count", "it = itertools.count(1)", "bump(next(it))", ""),
    ("next of cycle", "it = itertools.cycle([1.0] * 30 + [2.0] * 900)", "next(it)", ""),
    ("next of iter(list)", "it = iter([1.0] * 30 + [2.0] * 900)", "next(it)", ""),
    (
        "a generator",
        "def gen():\n    n = 0\n    while True:\n        n += 1\n        yield bump(n)\ngen_ = gen()",
        "next(gen_)",
        "",
    ),
    (
        "generator.send",
        "def gen():\n    n = 0\n    while True:\n        yield bump(n)\n        n += 1\ngen_ = gen()\nnext(gen_)",
        "gen_.send(None)",
        "",
    ),
    (
        "for with break",
        "it = iter([1.0] * 30 + [2.0] * 900)\ndef tick():\n    for x in it:\n        return x",
        "tick()",
        "",
    ),
    (
        "zip, map, enumerate",
        "it = map(float, itertools.chain([1] * 30, [2] * 900))\ndef tick():\n    for x, _ in zip(it, [0]):\n        return x",
        "tick()",
        "",
    ),
    (
        "unpacking an iterator",
        "it = iter([1.0] * 30 + [2.0] * 900)\ndef tick():\n    x, *_ = itertools.islice(it, 1)\n    return x",
        "tick()",
        "",
    ),
    (
        "iter(callable, sentinel)",
        "C = [0]\ndef up():\n    C[0] += 1\n    return bump(C[0])\nit = iter(up, None)",
        "next(it)",
        "",
    ),
    (
        "bound __next__ in partial",
        "go = functools.partial(itertools.cycle([1.0] * 30 + [2.0] * 900).__next__)",
        "go()",
        "",
    ),
    ("queue", "Q = queue.SimpleQueue()\ndef tick():\n    Q.put(1)\n    return bump(Q.qsize())", "tick()", ""),
    (
        "os.environ",
        "import os\nos.environ['HOSTILE_N'] = '0'\ndef tick():\n    os.environ['HOSTILE_N'] = str(int(os.environ['HOSTILE_N']) + 1)\n    return bump(int(os.environ['HOSTILE_N']))",
        "tick()",
        "",
    ),
    (
        "a file",
        "import tempfile\nfile = tempfile.TemporaryFile()\ndef tick():\n    file.write(b'x')\n    return bump(file.tell())",
        "tick()",
        "",
    ),
    (
        "StringIO",
        "import io\nfile = io.StringIO()\ndef tick():\n    print('x', end='', file=file)\n    return bump(len(file.getvalue()))",
        "tick()",
        "",
    ),
    ("random", "", "1.0 + random.random()", ""),
    ("numpy random", "", "1.0 + np.random.rand()", ""),
    ("a generator of random", "R = random.Random(1)", "1.0 + R.random()", ""),
    ("a numpy Generator", "R = np.random.default_rng(1)", "1.0 + R.random()", ""),
    (
        "time",
        "import time\nstart = time.perf_counter_ns()",
        "1.0 + (time.perf_counter_ns() - start) * 1e-12",
        "",
    ),
    (
        "lru_cache's counter",
        "@functools.lru_cache(None)\ndef cached(n):\n    return n\ndef tick():\n    n = cached.cache_info().currsize\n    cached(n)\n    return bump(n)",
        "tick()",
        "",
    ),
    (
        "a weak dict",
        "class K:\n    pass\nD = weakref.WeakKeyDictionary()\nkey = K()\ndef tick():\n    D[key] = D.get(key, 0) + 1\n    return bump(D[key])",
        "tick()",
        "",
    ),
    (
        "thread local",
        "local = threading.local()\ndef tick():\n    local.n = getattr(local, 'n', 0) + 1\n    return bump(local.n)",
        "tick()",
        "",
    ),
    (
        "contextvars",
        "import contextvars\nvar = contextvars.ContextVar('n', default=0)\ndef tick():\n    var.set(var.get() + 1)\n    return bump(var.get())",
        "tick()",
        "",
    ),
    (
        "setattr of a namespace",
        "NS = types.SimpleNamespace(n=0)\ndef tick():\n    setattr(NS, 'n', NS.n + 1)\n    return bump(NS.n)",
        "tick()",
        "",
    ),
    (
        "attribute of a module of Python",
        "import json\ndef tick():\n    json.hostile_n = getattr(json, 'hostile_n', 0) + 1\n    return bump(json.hostile_n)\njson.hostile_n = 0",
        "tick()",
        "",
    ),
    (
        "operator.setitem",
        "C = {'n': 0}\ndef tick():\n    operator.setitem(C, 'n', C['n'] + 1)\n    return bump(C['n'])",
        "tick()",
        "",
    ),
    (
        "operator.iadd of a list",
        "C = []\ndef tick():\n    operator.iadd(C, [1])\n    return bump(len(C))",
        "tick()",
        "",
    ),
    ("exec", "C = {'n': 0}\ndef tick():\n    exec('n = n + 1', C)\n    return bump(C['n'])", "tick()", ""),
    (
        "sort of a list",
        "C = list(range(40, 0, -1))\ndef tick():\n    C[0] -= 5\n    C.sort(key=abs)\n    return 1 + abs(C[0]) * 0.01",
        "tick()",
        "",
    ),
    (
        "heapq",
        "import heapq\nH = list(range(60))\ndef tick():\n    return bump(heapq.heappop(H) + 1)",
        "tick()",
        "",
    ),
    (
        "an enum's member",
        "class Stage(enum.Enum):\n    NOW = 1\nStage.NOW.n = 0\ndef tick():\n    Stage.NOW.n += 1\n    return bump(Stage.NOW.n)",
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
        "module in a plain list",
        "class Hid(nn.Module):\n    n = 0\n    def forward(self):\n        self.n += 1\n        return bump(self.n)\nhid = [Hid()]",
        "hid[0]()",
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
        "a tensor's numpy",
        "T = torch.zeros(1)\nA = T.numpy()\ndef tick():\n    A[0] += 1\n    return bump(float(A[0]))",
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
