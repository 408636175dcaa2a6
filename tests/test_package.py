"""The package: a wheel of it imports, compiles and trains in an environment of its own; its types and its papers are there."""

from __future__ import annotations

import shutil
import site
import subprocess
import sys
import tomllib
import venv
from pathlib import Path

import pytest

import autoptd

ROOT = Path(__file__).parents[1]

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


@pytest.mark.processes
def test_a_wheel_trains_in_another_environment(tmp_path: Path) -> None:
    """Built without isolation and installed with no index: what the package needs is lent by this environment."""
    copy = tmp_path / "checkout"
    ignored = shutil.ignore_patterns("__pycache__", "build", "*.egg-info")
    shutil.copytree(ROOT / "autoptd", copy / "autoptd", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    run([*pip, "wheel", "--no-build-isolation", "--no-deps", "--no-index", "-w", str(tmp_path), str(copy)])
    (wheel,) = tmp_path.glob("autoptd-*.whl")
    other = tmp_path / "env"
    venv.create(other, with_pip=False)
    python = str(other / "bin" / "python")
    packages = run([python, "-c", "import site; print(site.getsitepackages()[0])"]).strip()
    # A path file lends the packages of this environment, but for an editable autoptd, whose own path file is not read.
    Path(packages, "lent.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    run([*pip, "--python", python, "install", "--no-index", "--no-deps", str(wheel)])
    (tmp_path / "train.py").write_text(SCRIPT.format(checkout=str(ROOT)))
    environment = {"PATH": str(other / "bin"), "OMP_NUM_THREADS": "1"}
    told = run([python, "train.py"], cwd=tmp_path, env=environment)
    assert told.split() == [autoptd.__version__, "True"]
    assert (tmp_path / "out/stage_0.py").exists()
    assert (
        run([str(other / "bin/autoptd"), "--version"], cwd=tmp_path, env=environment)
        == f"autoptd {autoptd.__version__}\n"
    )


def test_what_pyproject_says_is_there() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for name in (project["readme"], *project["license-files"], "CHANGELOG.md", "CONTRIBUTING.md"):
        assert (ROOT / name).stat().st_size > 500
    assert (ROOT / "autoptd/py.typed").exists()
    assert f"## {autoptd.__version__} " in (ROOT / "CHANGELOG.md").read_text()
