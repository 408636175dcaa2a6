#!/usr/bin/env bash
# torch 2.13.0, a CPU with AMX: with ATEN_CPU_CAPABILITY=avx2 or =default, scaled_dot_product_attention in bfloat16 raises from 64
# tokens on.
#
# The variable limits ATen to the kernels of lesser CPUs, and is how one tries those. By the message, attention takes the path that
# packs for AMX, which the machine has, within kernels that were compiled for the capability the variable names. Shorter sequences,
# float32 and float16 work. Without the variable, or with =avx512, so does this. On a machine without AMX the script says so and ends.
#
# Expected output:
#   capability AVX2
#   torch.float32, 16 tokens: works
#   torch.float32, 64 tokens: works
#   torch.float16, 16 tokens: works
#   torch.float16, 64 tokens: works
#   torch.bfloat16, 16 tokens: works
#   torch.bfloat16, 64 tokens: pack_vnni2 is only supported when avx512 is supported
set -euo pipefail
grep -q -w amx_bf16 /proc/cpuinfo || { echo "needs a CPU with amx_bf16" >&2; exit 2; }
export ATEN_CPU_CAPABILITY=avx2
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy

cat > "$folder/show.py" <<'PY'
import torch
from torch.nn.functional import scaled_dot_product_attention

print(f"capability {torch.backends.cpu.get_cpu_capability()}")
for dtype in (torch.float32, torch.float16, torch.bfloat16):
    for tokens in (16, 64):
        q = torch.ones(1, 2, tokens, 16, dtype=dtype)
        try:
            scaled_dot_product_attention(q, q, q, is_causal=True)
            found = "works"
        except RuntimeError as error:
            found = str(error).splitlines()[0]
        print(f"{dtype}, {tokens} tokens: {found}")
PY
cat > "$folder/expected" <<'TXT'
capability AVX2
torch.float32, 16 tokens: works
torch.float32, 64 tokens: works
torch.float16, 16 tokens: works
torch.float16, 64 tokens: works
torch.bfloat16, 16 tokens: works
torch.bfloat16, 64 tokens: pack_vnni2 is only supported when avx512 is supported
TXT
timeout 120 "$folder/env/bin/python" "$folder/show.py" 2> "$folder/stderr" > "$folder/found" || { cat "$folder/stderr" >&2; exit 1; }
cat "$folder/found"
diff "$folder/expected" "$folder/found"
