#!/usr/bin/env bash
# torch 2.13.0, gloo on the CPU: whether all_reduce(MAX) and all_reduce(MIN) give a NaN depends on which rank has it.
#
# A NaN of rank 0 reaches both ranks; one of rank 1 is lost on both, without an error, in float32, float64 and bfloat16. torch.max and
# torch.maximum give NaN always, and so does all_reduce(SUM). A check such as "the largest gradient entry is finite" that reduces by
# MAX thus misses an overflow on one rank and finds the same on another. Reduce a flag (isnan) as well, or a sum.
#
# Expected output:
#   NaN on rank 0, MAX: [[nan, nan], [nan, nan], [nan, nan]]
#   NaN on rank 0, MIN: [[nan, nan], [nan, nan], [nan, nan]]
#   NaN on rank 0, SUM: [[nan, nan], [nan, nan], [nan, nan]]
#   NaN on rank 1, MAX: [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
#   NaN on rank 1, MIN: [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
#   NaN on rank 1, SUM: [[nan, nan], [nan, nan], [nan, nan]]
#   torch.max: nan, torch.maximum: nan
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy

cat > "$folder/ranks.py" <<'PY'
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

KINDS = ("MAX", "MIN", "SUM")
TYPES = (torch.float32, torch.float64, torch.bfloat16)


def body(rank, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    for owner in range(2):
        for kind in KINDS:
            found = []
            for dtype in TYPES:
                x = torch.tensor([float("nan") if rank == owner else 1.0], dtype=dtype)
                dist.all_reduce(x, getattr(dist.ReduceOp, kind))
                both = [torch.empty_like(x) for _ in range(2)]
                dist.all_gather(both, x)
                found.append([one.item() for one in both])
            if rank == 0:
                print(f"NaN on rank {owner}, {kind}: {found}", flush=True)
    x = torch.tensor([1.0, float("nan")])
    if rank == 0:
        print(f"torch.max: {x.max().item()}, torch.maximum: {torch.maximum(x[0], x[1]).item()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(body, (sys.argv[1],), 2)
PY
cat > "$folder/expected" <<'TXT'
NaN on rank 0, MAX: [[nan, nan], [nan, nan], [nan, nan]]
NaN on rank 0, MIN: [[nan, nan], [nan, nan], [nan, nan]]
NaN on rank 0, SUM: [[nan, nan], [nan, nan], [nan, nan]]
NaN on rank 1, MAX: [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
NaN on rank 1, MIN: [[1.0, 1.0], [1.0, 1.0], [1.0, 1.0]]
NaN on rank 1, SUM: [[nan, nan], [nan, nan], [nan, nan]]
torch.max: nan, torch.maximum: nan
TXT
timeout 120 "$folder/env/bin/python" "$folder/ranks.py" "$folder/rendezvous" 2> "$folder/stderr" > "$folder/found" || { cat "$folder/stderr" >&2; exit 1; }
cat "$folder/found"
diff "$folder/expected" "$folder/found"
