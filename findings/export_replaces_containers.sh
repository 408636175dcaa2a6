#!/usr/bin/env bash
# torch 2.13.0: torch.export.export (strict=False, the default) leaves the exported module with copies of its lists and dicts.
#
# Lists and dicts that are attributes of the user's module, nested ones too, are other objects after the export, with equal contents.
# Whoever else holds the old ones (an optimizer's or a logger's list, two modules that share a schedule) is cut off without a word: an
# append there is no longer seen by the module. With strict=True the objects stay. A caller can keep the attributes and put them back.
#
# Expected output:
#   strict=False: same objects [False, False, False], length seen by the module after an append: 2
#   strict=True: same objects [True, True, True], length seen by the module after an append: 3
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy

cat > "$folder/show.py" <<'PY'
import torch


class Scaled(torch.nn.Module):
    def __init__(self, factors, table):
        super().__init__()
        self.linear = torch.nn.Linear(2, 2)
        self.factors = factors
        self.table = table

    def forward(self, x):
        return self.linear(x) * len(self.factors) * self.table["scale"][0]


for strict in (False, True):
    factors, table = [1, 2], {"scale": [3]}
    model = Scaled(factors, table)
    torch.export.export(model, (torch.ones(1, 2),), strict=strict)
    kept = [model.factors is factors, model.table is table, model.table["scale"] is table["scale"]]
    factors.append(4)
    print(f"strict={strict}: same objects {kept}, length seen by the module after an append: {len(model.factors)}")
PY
cat > "$folder/expected" <<'TXT'
strict=False: same objects [False, False, False], length seen by the module after an append: 2
strict=True: same objects [True, True, True], length seen by the module after an append: 3
TXT
timeout 120 "$folder/env/bin/python" "$folder/show.py" 2> "$folder/stderr" > "$folder/found" || { cat "$folder/stderr" >&2; exit 1; }
cat "$folder/found"
diff "$folder/expected" "$folder/found"
