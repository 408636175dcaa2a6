"""What a message between stages costs over gloo on this machine: tensors alone or packed; whole, or scattered and gathered.

Four processes, t=2 p=2: both tensor ranks of stage 0 send to their peers of stage 1, which gather where the message was
scattered, and answer with one number. Printed is the median of the round trip. All four share one
machine, whose links are all alike: here scattering can only lose, which is why `p2p="auto"` sends whole within a node. Between
nodes 1/t of the bytes is sent: the last table, counted from the compiled program.

    python benchmarks/links.py           # tables, and benchmarks/results/links.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp

import autoptd
from autoptd.ir.mesh import Mesh
from autoptd.program.specs import TransferBuffer
from autoptd.runtime.step.messages import gather, pack
from autoptd.runtime.world.processes import DistributedWorld
from autoptd.runtime.world.world import Communicators, World

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from examples.gpt import GPT, GPTConfig  # noqa: E402

T = 2
SIZES = (2**8, 2**12, 2**16, 2**20)  # elements of one tensor, float32
COMMUNICATORS = Communicators(links=((0, 1), (1, 0)))
Row = dict[str, Any]


def buffer(count: int, size: int, parts: int) -> TransferBuffer:
    """`count` tensors of `size` elements end to end."""
    return TransferBuffer(0, 1, False, tuple(f"x{i}" for i in range(count)), "float32", count * size, parts)


def seconds(world: World, buffers: list[TransferBuffer], rounds: int) -> float:
    """Median of the round trip of a message of `buffers`, on every rank."""
    at, tp = world.coordinate, world.group(("tp",))
    peer = world.rank + (T if at.pp == 0 else -T)
    values = {name: torch.ones(one.numel // len(one.names)) for one in buffers for name in one.names}
    like, answer = [((one.piece,), torch.float32) for one in buffers], [((1,), torch.float32)]
    taken = []
    for _ in range(rounds):
        start = time.perf_counter()
        if at.pp == 0:
            receipt = world.incoming(peer).receive(answer, "answer")
            sent = world.outgoing(peer).send([pack(one, values, tp) for one in buffers], "message")
            receipt.wait()
        else:
            arrived = world.incoming(peer).receive(like, "message").wait()
            for one, x in zip(buffers, arrived, strict=True):
                gather(one, x, tp)
            sent = world.outgoing(peer).send([torch.ones(1)], "answer")
        sent.wait()
        taken.append(time.perf_counter() - start)
    return statistics.median(taken)


def measure(rank: int, port: int, rounds: int, results: Any) -> None:
    """The life of one process."""
    store = torch.distributed.TCPStore("127.0.0.1", port, 2 * T, rank == 0)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=2 * T)
    torch.set_num_threads(1)
    world = DistributedWorld(Mesh(t=T, p=2), COMMUNICATORS, timeout=60.0)
    rows = []
    for size in SIZES:
        ways = {
            "four, each alone": [buffer(1, size, 1)] * 4,
            "four, packed": [buffer(4, size, 1)],
            "one, whole": [buffer(1, size, 1)],
            "one, scattered": [buffer(1, size, T)],
        }
        took = {way: 1e6 * seconds(world, buffers, rounds) for way, buffers in ways.items()}
        rows.append({"bytes": 4 * size, **took})
    world.close()
    torch.distributed.destroy_process_group()
    if rank == 0:
        results.put(rows)


def sent_bytes(t: int) -> Row:
    """Bytes that one tensor rank sends over the one boundary of a GPT, one way and one microbatch."""
    example = tuple(torch.zeros(2, 64, dtype=torch.long, device="meta") for _ in range(2))
    with torch.device("meta"):
        model = GPT(GPTConfig(n_embd=1024, n_head=16, n_layer=2, block_size=64))
    found: Row = {"t": t}
    for p2p in ("direct", "scatter_gather"):
        program = autoptd.compile(
            model, t=t, p=2, num_microbatches=1, ranks=autoptd.RankOptions(p2p=p2p), example_inputs=example
        )
        found[p2p] = sum(one.sent_bytes for one in program.transfers if not one.is_gradient)
    return found


def table(rows: list[Row]) -> None:
    widths = [max(len(name), 10) for name in rows[0]]
    print("  ".join(name.rjust(width) for name, width in zip(rows[0], widths, strict=True)))
    for row in rows:
        cells = [f"{value:.0f}" for value in row.values()]
        print("  ".join(cell.rjust(width) for cell, width in zip(cells, widths, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=200)
    rounds = parser.parse_args().rounds
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    results = mp.get_context("spawn").SimpleQueue()
    mp.spawn(measure, (port, rounds, results), nprocs=2 * T)
    rows, counted = results.get(), [sent_bytes(t) for t in (1, 2, 4, 8)]
    print("microseconds of a message and its answer over gloo, t=2 p=2, 4 processes")
    table(rows)
    print("\nbytes that a tensor rank sends over a boundary of b s h = 2 x 64 x 1024 float32")
    table(counted)
    told = {
        "machine": platform.processor() or platform.machine(),
        "torch": torch.__version__,
        "rounds": rounds,
        "load": os.getloadavg()[0],
    }
    path = Path(__file__).parent / "results" / "links.json"
    path.write_text(json.dumps({**told, "microseconds": rows, "bytes": counted}, indent=1) + "\n")


if __name__ == "__main__":
    main()
