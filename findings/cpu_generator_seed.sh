#!/usr/bin/env bash
# torch 2.13.0: the CPU's generator draws from the low 32 bits of a seed only, though it takes and reports 64.
#
# manual_seed(s) and manual_seed(s + 2**32) give the same numbers, while initial_seed() tells them apart. Who derives a seed for each
# parameter or rank by hashing to 64 bits and expects no collisions gets those of 32 bits: 46,848 seeds, as many as there are expert
# weights in a large mixture of experts, hold a pair that draws the same with probability 0.23, 1 - exp(-n**2 / 2**33). A counter-based
# generator, or one generator per process that goes on, has no such pairs.
#
# Expected output:
#   initial_seed           7: True
#   initial_seed  4294967303: True
#   initial_seed 21474836487: True
#   initial_seed           8: False
#   torch.manual_seed: True
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy

cat > "$folder/show.py" <<'PY'
import torch

SEED = 7
for seed in (SEED, SEED + 2**32, SEED + 5 * 2**32, SEED + 1):
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randint(1000, (4,), generator=generator).tolist()
    print(f"initial_seed {generator.initial_seed():11}: {drawn == torch.randint(1000, (4,), generator=torch.Generator().manual_seed(SEED)).tolist()}")
torch.manual_seed(SEED)
x = torch.randn(8)
torch.manual_seed(SEED + 2**40)
print(f"torch.manual_seed: {torch.equal(x, torch.randn(8))}")
PY
cat > "$folder/expected" <<'TXT'
initial_seed           7: True
initial_seed  4294967303: True
initial_seed 21474836487: True
initial_seed           8: False
torch.manual_seed: True
TXT
timeout 120 "$folder/env/bin/python" "$folder/show.py" 2> "$folder/stderr" > "$folder/found" || { cat "$folder/stderr" >&2; exit 1; }
cat "$folder/found"
diff "$folder/expected" "$folder/found"
