"""Two nodes of two ranks: network namespaces, joined by one link, which is slow, or cut in the middle of a step.

Takes root, and `ip` of iproute2: skipped with the reason where either is missing.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from autoptd.runtime.checkpoint.commit import step_of
from tests.ports import free_port

ROOT = Path(__file__).parents[2]
TIMEOUT, STEPS = 6.0, 16

pytestmark = [pytest.mark.nodes, pytest.mark.processes, pytest.mark.thorough]


class Nodes:
    """Two namespaces with an address each; /dev/shm is each node's own, files are shared."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.names = [f"ptd{os.getpid()}{letter}" for letter in "ab"]
        self.links = [f"v{name}"[:15] for name in self.names]
        self.addresses = ["10.9.0.1", "10.9.0.2"]
        self._started: list[subprocess.Popen[str]] = []

    def open(self) -> None:
        for name in self.names:
            ip("netns", "add", name)
        ip("link", "add", self.links[0], "type", "veth", "peer", "name", self.links[1])
        for name, link, address in zip(self.names, self.links, self.addresses, strict=True):
            ip("link", "set", link, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", link)
            ip("-n", name, "link", "set", "lo", "up")
            ip("-n", name, "link", "set", link, "up")

    def close(self) -> None:
        for process in self._started:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.communicate()
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)

    def cut(self, is_cut: bool = True) -> None:
        ip("-n", self.names[1], "link", "set", self.links[1], "down" if is_cut else "up")

    def folder(self, node: int, name: str) -> Path:
        """Return a folder of this node's own."""
        path = self.root / f"{name} of {node}".replace(" ", "-")
        path.mkdir(exist_ok=True)
        return path

    def start(
        self, node: int, command: list[str], disk: Path | None = None, **environment: Any
    ) -> subprocess.Popen[str]:
        """Start a Python command on a node; at `disk` it has a file system that nobody else sees."""
        env = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(ROOT),
            "GLOO_SOCKET_IFNAME": self.links[node],
        }
        env |= {name: str(value) for name, value in environment.items()}
        # `ip netns exec` makes a mount namespace too.
        # Shared by the ranks of a node alone: memory, and a disk where each node has its own.
        mounts = f"mount --bind {self.folder(node, 'memory')} /dev/shm; "
        mounts += f"mount --bind {self.folder(node, 'disk')} {disk}; " if disk else ""
        own = ["sh", "-c", mounts + 'exec "$@"', "sh"]
        words = ["ip", "netns", "exec", self.names[node], *own, sys.executable, *command]
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        process = subprocess.Popen(words, env=env, cwd=ROOT, start_new_session=True, **pipes)
        self._started.append(process)
        return process

    def start_ranks(
        self, folder: Path, said: Path, steps: int, is_shared: bool = True
    ) -> list[subprocess.Popen[str]]:
        """Two ranks on each node, without a launcher; if the folder is not shared, each node has a disk there."""
        said.mkdir(exist_ok=True)
        port, ranks = free_port(), []
        for rank in range(4):
            env = {"RANK": rank, "LOCAL_RANK": rank % 2, "WORLD_SIZE": 4}
            env |= {"MASTER_ADDR": self.addresses[0], "MASTER_PORT": port}
            command = ["-m", "tests.nodes.rank", str(folder), str(said), str(steps), str(TIMEOUT)]
            disk = None if is_shared or rank < 2 else folder
            ranks.append(self.start(rank // 2, command, disk, **env))
        return ranks


def ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    if shutil.which("ip") is None:
        pytest.skip("there is no `ip`: install iproute2")
    made = Nodes(tmp_path)
    try:
        made.open()
    except OSError as error:
        made.close()
        pytest.skip(f"namespaces are not allowed here: {error}")
    yield made
    made.close()


def ends(ranks: list[subprocess.Popen[str]], said: Path, limit: float = 120.0) -> list[dict[str, Any]]:
    """What each rank said last."""
    for process in ranks:
        process.communicate(timeout=limit)
    return [json.loads((said / str(rank)).read_text().splitlines()[-1]) for rank in range(len(ranks))]


def wait_for_step(folder: Path, step: int, limit: float = 60.0) -> None:
    """Wait until a checkpoint of this step or a later one is there."""
    deadline = time.monotonic() + limit
    while not folder.is_dir() or not any(step_of(path) >= step for path in folder.iterdir()):
        assert time.monotonic() < deadline, f"no checkpoint has come to {folder}"
        time.sleep(0.02)


def test_the_link_is_cut_in_a_step_and_the_run_goes_on_afterwards(nodes: Nodes, tmp_path: Path) -> None:
    """Each side raises, and says whom it misses; restarted, the run ends with the bits of one that was not cut."""
    plain, cut = tmp_path / "plain", tmp_path / "cut"
    for folder in (plain, cut):
        folder.mkdir()
    whole = ends(nodes.start_ranks(plain, tmp_path / "a", STEPS), tmp_path / "a")
    assert [end.get("steps") for end in whole] == [STEPS] * 4, whole
    ranks = nodes.start_ranks(cut, tmp_path / "b", 100_000)
    wait_for_step(cut / "ckpts", 4)
    nodes.cut()
    began = time.monotonic()
    told = ends(ranks, tmp_path / "b")
    for rank, end in enumerate(told):
        assert end["error"].startswith("RuntimeFault: rank"), told
        assert end["time"] - began < TIMEOUT + 15, told
        if rank < 2:
            # Beside the store: it knows who does not beat any more.
            assert "rank 2 is gone" in end["error"] and "rank 3 is gone" in end["error"], told
        else:
            assert "or this node is cut off from ranks 0-1" in end["error"], told
    nodes.cut(False)
    (last, *_) = sorted((path.name for path in (cut / "ckpts").glob("step-????????")), reverse=True)
    steps = max(STEPS, int(last[5:]) + 2)
    again = ends(nodes.start_ranks(cut, tmp_path / "c", steps), tmp_path / "c")
    assert [end.get("steps") for end in again] == [steps] * 4, again
    first = json.loads((tmp_path / "c" / "0").read_text().splitlines()[0])
    assert first["resumed"] == int(last[5:])
    if steps == STEPS:
        one, other = (torch.load(folder / "final.pt") for folder in (plain, cut))
        assert all(torch.equal(one[name], other[name]) for name in one)


def test_nodes_with_disks_of_their_own_are_named(nodes: Nodes, tmp_path: Path) -> None:
    """The path is the same on both, and what rank 0 makes there is not to be seen on the other: a slow test, as it waits."""
    (tmp_path / "same").mkdir()
    told = ends(
        nodes.start_ranks(tmp_path / "same", tmp_path / "said", 1_000_000, is_shared=False), tmp_path / "said"
    )
    for end in told:
        assert "a save failed: rank 2: " in end["error"] or "a save failed: rank 3: " in end["error"], told
        assert (
            "was made by rank 0, and is not in" in end["error"]
            and "a folder that all nodes share" in end["error"]
        ), told


def test_torchrun_over_a_slow_link(nodes: Nodes, tmp_path: Path) -> None:
    """The commands of docs/howto/multi-node.md, with 5 ms each way where the kernel can delay."""
    delay = [
        "tc",
        "-n",
        nodes.names[1],
        "qdisc",
        "add",
        "dev",
        nodes.links[1],
        "root",
        "netem",
        "delay",
        "5ms",
    ]
    if shutil.which("tc"):
        # Not every kernel has netem.
        subprocess.run(delay, capture_output=True)
    launch = [
        "-m",
        "torch.distributed.run",
        "--nnodes",
        "2",
        "--nproc-per-node",
        "2",
        "--rdzv-backend",
        "c10d",
    ]
    launch += ["--rdzv-endpoint", f"{nodes.addresses[0]}:{free_port()}", "--rdzv-id", "job7"]
    script = ["examples/train.py", "--t", "2", "--p", "2", "--layers", "2", "--hidden", "16", "--heads", "2"]
    script += ["--length", "8", "--batch", "4", "--steps", "4", "--out", str(tmp_path / "out")]
    script += ["--save", str(tmp_path / "ckpts"), "--save-every", "4"]
    agents = []
    for node, address in enumerate(nodes.addresses):
        own = ["--rdzv-conf", f"is_host={1 - node}", "--local-addr", address, "--", *script]
        agents.append(nodes.start(node, [*launch, *own]))
    for agent in agents:
        out, _ = agent.communicate(timeout=180)
        assert agent.returncode == 0, out[-3000:]
    assert len(json.loads((tmp_path / "out" / "parallel.json").read_text())["losses"]) == 4
    assert (tmp_path / "ckpts" / "step-00000004" / "checkpoint.json").exists()
