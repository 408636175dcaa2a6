#!/usr/bin/env bash
# torch 2.13.0 on the CPU: batch norm gives a wrong gradient, without an error, for an input with channels last and a
# last dim of size 1 and stride 1, as `x.mT[..., None]` makes it (tokens with channels in the last dim, unsqueezed for BatchNorm2d).
#
# The output is right; the gradient of the input differs by as much as it is large, in float64. A contiguous copy of the same numbers,
# BatchNorm1d of x.mT, or the added dim elsewhere have the right one: that of finite differences. BatchNorm3d with two added dims has
# a wrong one too, in evaluation as in training. A model with such a layer trains on wrong gradients below it; call .contiguous() before.
#
# Expected output (the gradient of a weighted sum of the output, at one entry of x: of the view, of a contiguous copy of it, and by
# finite differences):
#   BatchNorm1d of x.mT                        stride (32, 1, 8)        output equal, gradient  0.120  0.120  0.120
#   BatchNorm2d of x.mT[:, :, None]            stride (32, 1, 32, 8)    output equal, gradient  0.120  0.120  0.120
#   BatchNorm2d of x.mT[..., None]             stride (32, 1, 8, 1)     output equal, gradient -0.076  0.120  0.120
#   BatchNorm3d of x.mT[..., None, None]       stride (32, 1, 8, 1, 1)  output equal, gradient -0.076  0.120  0.120
#   BatchNorm2d in evaluation, x.mT[..., None] stride (32, 1, 8, 1)     output equal, gradient -0.032 -0.005 -0.005
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy

cat > "$folder/norms.py" <<'PY'
import torch
from torch import nn

torch.set_default_dtype(torch.float64)
torch.manual_seed(0)
START, WEIGHTS = torch.randn(8, 4, 8), torch.randn(8, 8, 4)


def show(name, norm, view):
    x = START.clone().requires_grad_()

    def loss(x, copy=False):
        z = view(x)
        out = norm(z.contiguous() if copy else z)
        return (out * WEIGHTS.view(out.shape)).sum()

    step = torch.zeros_like(x)
    step[0, 1, 2] = 1e-6
    with torch.no_grad():
        rise = (loss(x + step) - loss(x - step)) / 2e-6
        is_equal = torch.allclose(norm(view(x)), norm(view(x).contiguous()))
    found = [torch.autograd.grad(loss(x, copy), x)[0][0, 1, 2] for copy in (False, True)] + [rise]
    numbers = " ".join(f"{float(one):6.3f}" for one in found)
    print(f"{name:42} stride {view(x).stride()!s:17} output {'equal' if is_equal else 'differs'}, gradient {numbers}")


show("BatchNorm1d of x.mT", nn.BatchNorm1d(8), lambda x: x.mT)
show("BatchNorm2d of x.mT[:, :, None]", nn.BatchNorm2d(8), lambda x: x.mT[:, :, None])
show("BatchNorm2d of x.mT[..., None]", nn.BatchNorm2d(8), lambda x: x.mT[..., None])
show("BatchNorm3d of x.mT[..., None, None]", nn.BatchNorm3d(8), lambda x: x.mT[..., None, None])
show("BatchNorm2d in evaluation, x.mT[..., None]", nn.BatchNorm2d(8).eval(), lambda x: x.mT[..., None])
PY
cat > "$folder/expected" <<'TXT'
BatchNorm1d of x.mT                        stride (32, 1, 8)        output equal, gradient  0.120  0.120  0.120
BatchNorm2d of x.mT[:, :, None]            stride (32, 1, 32, 8)    output equal, gradient  0.120  0.120  0.120
BatchNorm2d of x.mT[..., None]             stride (32, 1, 8, 1)     output equal, gradient -0.076  0.120  0.120
BatchNorm3d of x.mT[..., None, None]       stride (32, 1, 8, 1, 1)  output equal, gradient -0.076  0.120  0.120
BatchNorm2d in evaluation, x.mT[..., None] stride (32, 1, 8, 1)     output equal, gradient -0.032 -0.005 -0.005
TXT
timeout 120 "$folder/env/bin/python" "$folder/norms.py" > "$folder/found"
cat "$folder/found"
diff "$folder/expected" "$folder/found"
