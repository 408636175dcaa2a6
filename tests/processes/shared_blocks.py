"""Train a model that repeats a block on real processes over gloo, beside one device; print the largest difference of a loss.

The ranks are forked here: torch is imported, and the model compiled, once.
"""

from __future__ import annotations

import os
import signal

import torch

from autoptd.compiler.driver import compile_program
from autoptd.ir import machine
from autoptd.model.parallel_model import ParallelModel
from autoptd.options import make_options
from autoptd.program.program import Program
from tests.hostile.test_shared_blocks import MODELS, batch
from tests.ports import free_port

OPTIONS = make_options(t=2, p=2, num_microbatches=3, backend="gloo", timeout=60.0, machine=machine.Machine())


def model_of() -> torch.nn.Module:
    torch.manual_seed(0)
    return MODELS["albert"]().double()


def worst_loss(program: Program) -> float:
    """Three steps; how far the losses are from those of one device."""
    model, (x, y) = model_of(), batch()
    pm = ParallelModel(program, OPTIONS, model.state_dict())
    ours, theirs = pm.optimizer(torch.optim.AdamW, lr=1e-2), torch.optim.AdamW(model.parameters(), lr=1e-2)
    worst = 0.0
    for _ in range(3):
        wanted = model(x, y)
        wanted.backward()
        worst = max(worst, abs(float(pm.step(x, y)) - float(wanted.detach())))
        for optimizer in (ours, theirs):
            optimizer.step()
            optimizer.zero_grad()
    pm.close()
    return worst


def main() -> None:
    program = compile_program(model_of(), OPTIONS, batch(), {}, replicas=1, check=False)
    port, ranks = free_port(), []
    for rank in range(program.mesh.size):
        ranks.append(os.fork())
        if ranks[-1] == 0:
            signal.alarm(200)  # whatever hangs is killed, and seen by its code
            env = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": program.mesh.size, "MASTER_PORT": port}
            os.environ.update({key: str(value) for key, value in env.items()}, MASTER_ADDR="127.0.0.1")
            os.write(1, f"{worst_loss(program)}\n".encode())  # whole: two ranks write to one pipe
            os._exit(0)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in ranks]
    if any(codes):
        raise RuntimeError(f"the ranks ended with {codes}")


if __name__ == "__main__":
    main()
