"""The package: a wheel of it imports, compiles and trains where nothing but its declared dependencies is; its types and its
papers are there.
"""

from __future__ import annotations

import os
import pickle
import pty
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

import autoptd

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]

SCRIPT = """
import torch, autoptd
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)
    def forward(self, x, y):
        return nn.functional.mse_loss(self.down(torch.relu(self.up(x))), y)

def main():
    assert {checkout!r} not in autoptd.__file__, autoptd.__file__
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    pm = autoptd.parallelize(Net(), t=2, p=2, d=2, backend="local", example_inputs=(x, x), machine="h100")
    opt = pm.optimizer(torch.optim.SGD, lr=0.1)
    losses = []
    for _ in range(5):
        losses.append(float(pm.step(x, x)))
        opt.step()
        opt.zero_grad()
    pm.close()
    assert losses[-1] < losses[0], losses
    program = autoptd.compile(Net(), t=2, example_inputs=(x, x))
    program.save("out")
    print(autoptd.__version__, (__import__("pathlib").Path(autoptd.__file__).parent / "py.typed").exists())

main()
"""


def run(words: list[str], **more: object) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, **more)  # type: ignore[call-overload]
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


MODEL = """
from torch import Tensor, nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(256, 8), nn.Linear(8, 256)
    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())
"""
COMMANDS = (
    "show net.py:Net --t 2 --seq 8 --out shown",
    "plan gpt2 --gpus 8 --batch 64",
    "train net.py:Net --t 2 --backend local --steps 2 --batch 4 --seq 8 --random --save saved --out trained",
)


def build_wheel(folder: Path) -> Path:
    """Build without isolation and without an index."""
    copy = folder / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "autoptd", copy / "autoptd", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    run([*PIP, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(folder), str(copy)])
    (wheel,) = folder.glob("autoptd-*.whl")
    return wheel


def needed(requirements: list[str]) -> set[str]:
    """Names of the packages that have to be installed for these, and for what they need in turn."""
    found: set[str] = set()
    for requirement in map(Requirement, requirements):
        if requirement.name not in found and (not requirement.marker or requirement.marker.evaluate()):
            found |= {requirement.name, *needed(distribution(requirement.name).requires or [])}
    return found


def lend(names: set[str], packages: Path) -> None:
    """Let an environment have packages of this one, and no others."""
    own = Path(sysconfig.get_path("purelib"))
    for name in sorted(names):
        for part in {file.parts[0] for file in distribution(name).files or ()} - {"..", "__pycache__"}:
            if not (packages / part).exists():
                (packages / part).symlink_to(own / part)


def on_a_terminal(words: list[str], folder: Path, environment: dict[str, str]) -> str:
    """Run a command whose output is a terminal; it is to end well."""
    ours, theirs = pty.openpty()
    streams = {"stdin": theirs, "stdout": theirs, "stderr": theirs}
    process = subprocess.Popen(words, cwd=folder, env=environment, **streams)  # type: ignore[call-overload]
    os.close(theirs)
    shown = b""
    try:
        while part := os.read(ours, 1 << 16):
            shown += part
    # How Linux says that nobody has the other end any more.
    except OSError:
        pass
    finally:
        os.close(ours)
    text = shown.decode()
    assert process.wait(60) == 0, text
    return text


def test_all_is_declared_that_is_lent() -> None:
    names = needed(PROJECT["dependencies"])
    assert {"torch", "networkx", "mpmath"} <= names and not names & {
        "tqdm",
        "transformers",
        "pytest",
        "autoptd",
    }


@pytest.mark.processes
def test_a_wheel_trains_with_its_declared_dependencies_alone(tmp_path: Path) -> None:
    other = tmp_path / "env"
    venv.create(other, with_pip=False)
    python = str(other / "bin" / "python")
    packages = run([python, "-c", "import site; print(site.getsitepackages()[0])"]).strip()
    lend(needed(PROJECT["dependencies"]), Path(packages))
    run([*PIP, "--python", python, "install", "--no-index", "--no-deps", str(build_wheel(tmp_path))])
    (tmp_path / "train.py").write_text(SCRIPT.format(checkout=str(ROOT)))
    (tmp_path / "net.py").write_text(MODEL)
    environment = {"PATH": str(other / "bin"), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    told = run([python, "train.py"], cwd=tmp_path, env=environment)
    assert told.split() == [autoptd.__version__, "True"]
    assert (tmp_path / "out/stage_0.py").exists()
    command = str(other / "bin/autoptd")
    assert run([command, "--version"], cwd=tmp_path, env=environment) == f"autoptd {autoptd.__version__}\n"
    told = on_a_terminal([command, *COMMANDS[0].split()], tmp_path, environment)
    assert "  importing torch\x1b[K" in told and "Checkpoint: " in told
    # Pictures are those of the extra `pictures`.
    assert list((tmp_path / "shown").glob("*.dot")) and (tmp_path / "shown/report.html").exists()


@pytest.mark.thorough
@pytest.mark.processes
def test_a_wheel_that_pip_installs_has_commands_that_work(tmp_path: Path) -> None:
    """Downloads what it needs, and torch in the release that is tested."""
    other = tmp_path / "env"
    venv.create(other, with_pip=True)
    wheel = build_wheel(tmp_path)
    constraints = ["-c", str(ROOT / "constraints.txt")]
    pip = [str(other / "bin/python"), "-m", "pip", "--disable-pip-version-check", "-q"]
    run([*pip, "install", *constraints, "--only-binary", ":all:", str(wheel)])
    (tmp_path / "net.py").write_text(MODEL)
    environment = {"PATH": str(other / "bin"), "OMP_NUM_THREADS": "1", "TERM": "xterm"}
    for words in COMMANDS:
        told = on_a_terminal([str(other / "bin/autoptd"), *words.split()], tmp_path, environment)
        assert "Traceback" not in told and "\x1b[K" in told


def test_a_function_that_uses_the_package_can_be_sent() -> None:
    """By cloudpickle, which pickles what a function of a script refers to."""
    assert pickle.loads(pickle.dumps(autoptd)) is autoptd


def test_what_pyproject_says_is_there() -> None:
    for name in (PROJECT["readme"], *PROJECT["license-files"], "CHANGELOG.md", "CONTRIBUTING.md"):
        assert (ROOT / name).stat().st_size > 500
    assert (ROOT / "autoptd/py.typed").exists()
    assert f"## {autoptd.__version__} " in (ROOT / "CHANGELOG.md").read_text()
