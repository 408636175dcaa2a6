"""Run by `test_adapter.py` as one of four ranks over gloo: saves an adapter, loads another, and one that not all ranks have.

In: a folder for what is written, in which `given/` is an adapter of PEFT's. Prints one JSON line: whether the adapter that was
loaded and saved again has the bytes of the given one, and what the ranks said of the folder that rank 3 does not have.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import autoptd
from tests.model.test_adapters import WEIGHTS, fresh
from tests.parity.test_peft import MACHINE, batch


def main(folder: Path) -> None:
    is_last = os.environ["RANK"] == "3"
    mesh = {"t": 2, "p": 2, "num_microbatches": 2, "machine": MACHINE}
    pm = autoptd.parallelize(fresh(), **mesh, example_inputs=batch(), timeout=60)
    pm.load_adapter(folder / "given")
    pm.save_adapter(folder / "saved")
    # Rank 0 wrote it before others return from the call.
    is_same = (folder / "saved" / WEIGHTS).read_bytes() == (folder / "given" / WEIGHTS).read_bytes()
    said = ""
    try:
        pm.load_adapter(folder / ("nowhere" if is_last else "given"))
    except autoptd.PlanError as error:
        said = str(error)
    loss = float(pm.step(**pm.local_batch(**batch())))
    print(json.dumps({"is_same": is_same, "said": said, "loss": loss}))
    pm.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
