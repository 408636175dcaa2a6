#!/usr/bin/env bash
# torch 2.13.0, torch.distributed.checkpoint: load() compares sizes with what was saved, and not dtypes.
#
# A tensor of another size is an error. One of another dtype is filled by Tensor.copy_, without an error or a warning that names the
# key: float32 becomes inf in float16, loses its fractions in int64, and complex64 keeps its real part. A model that was built in half
# precision thus resumes with infinite weights or second moments from a float32 checkpoint. A Python number is not copied at all: it
# takes the place of a tensor that waited for it. Compare `dtype` in `FileSystemReader(folder).read_metadata()` before loading.
#
# Expected output:
#   size 4 for 3: CheckpointException
#   float32 into torch.float16: [1.5, inf, inf]
#   float32 into torch.int64: [1, 70000, 3000000000]
#   complex64 into torch.float32: [1.0]
#   int into a tensor: 5, now of type int
#   saved as: torch.float32
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy

cat > "$folder/load.py" <<'PY'
import sys
import warnings

import torch
import torch.distributed.checkpoint as dcp

warnings.simplefilter("ignore")  # of running in one process
folder = sys.argv[1]
saved = {"w": torch.tensor([1.5, 7e4, 3e9]), "c": torch.tensor([1 + 2j]), "n": 5}
dcp.save(saved, checkpoint_id=folder, no_dist=True)


def load(key, into):
    state = {key: into}
    dcp.load(state, checkpoint_id=folder, no_dist=True)
    return state[key]


try:
    print("size 4 for 3:", load("w", torch.zeros(4)))
except dcp.api.CheckpointException as error:
    print("size 4 for 3:", type(error).__name__)
for dtype in (torch.float16, torch.int64):
    print(f"float32 into {dtype}:", load("w", torch.zeros(3, dtype=dtype)).tolist())
print("complex64 into torch.float32:", load("c", torch.zeros(1)).tolist())
number = load("n", torch.tensor(7))
print(f"int into a tensor: {number}, now of type {type(number).__name__}")
print("saved as:", dcp.FileSystemReader(folder).read_metadata().state_dict_metadata["w"].properties.dtype)
PY

cat > "$folder/expected" <<'TXT'
size 4 for 3: CheckpointException
float32 into torch.float16: [1.5, inf, inf]
float32 into torch.int64: [1, 70000, 3000000000]
complex64 into torch.float32: [1.0]
int into a tensor: 5, now of type int
saved as: torch.float32
TXT
"$folder/env/bin/python" "$folder/load.py" "$folder/saved" > "$folder/output" 2> "$folder/log" || { cat "$folder/output" "$folder/log"; exit 1; }
cat "$folder/output"
diff "$folder/expected" "$folder/output"
