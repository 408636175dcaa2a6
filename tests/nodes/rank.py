"""One rank of a run over two nodes; what it says is added to the file `SAID/<rank>`.

RANK=0 WORLD_SIZE=4 MASTER_ADDR=10.9.0.1 MASTER_PORT=29500 python -m tests.nodes.rank FOLDER SAID 8 6.0
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

from tests.runtime.checkpoint.forked_runs import compiled, train

MESH = {"t": 2, "p": 2}


def main(folder: Path, said: Path, steps: int, timeout: float) -> None:
    torch.set_num_threads(1)

    def say(**facts: Any) -> None:
        with (said / os.environ["RANK"]).open("a") as file:
            file.write(json.dumps({**facts, "time": time.monotonic()}) + "\n")

    code = 0
    try:
        train(compiled(MESH, timeout), folder, steps, 2, say)
    except BaseException as exc:
        say(error=f"{type(exc).__name__}: {exc}")
        code = 1
    # What is left would wait for the other node.
    os._exit(code)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
