"""One rank of a world of 3,072 runs a step: every shape, action and communicator of SC'21's trillion-parameter mesh.

Nobody else is there (torch's "fake" process group hands back local data), so the values mean nothing.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

MESH = "t=8, p=64, d=6, v=2"
RUN = """
import sys, torch, autoptd
from benchmarks.lib.fake_world import fake_process_group
from examples.gpt import GPT, GPTConfig

fake_process_group(rank=int(sys.argv[1]), world_size=3072)
torch.manual_seed(0)
model = GPT(GPTConfig(vocab_size=64, block_size=4, n_layer=64, n_head=8, n_embd=16))
ids, targets = torch.randint(0, 64, (2, 6 * 64, 4))  # of all 6 replicas
machine = autoptd.Machine(latency=1e-9)  # for which half a layer is much
pm = autoptd.parallelize(model, MESH, machine=machine, nan="ignore", num_microbatches=64, example_inputs=(ids, targets))
pm.run.ranks.here[0].executor._loss_dtype = torch.float32  # what the rank with the loss would tell
loss = pm.step(*pm.local_batch(ids, targets))
assert loss.shape == () and pm.program.mesh.size == 3072 and len(pm.program.stages) == 128
print("parameters", sum(one.grad is not None for one in pm.parameters()))
""".replace("MESH", MESH)


@pytest.mark.thorough  # half a minute
def test_one_rank_of_3072_runs_a_step() -> None:
    """The last one: its stages 63 and 127 receive from both sides, the second has the loss."""
    done = subprocess.run([sys.executable, "-c", RUN, "3071"], capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (
        int(done.stdout.split("parameters ")[1]) >= 12
    )  # an attention and an MLP at least: this rank's two stages
