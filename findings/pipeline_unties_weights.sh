#!/usr/bin/env bash
# torch 2.13.0, gloo on the CPU: torch.distributed.pipelining.pipeline() trains tied weights apart, without an error or a warning.
#
# The tracer puts a parameter that two stages use into both of them, as two parameters. Nothing sums their gradients: after a step of SGD
# each stage has applied its own part, so that the copies differ, and no stage has the weight of one process. The tracer knows the pair:
# Pipe.replicated_params, an attribute without documentation, lists it, but nothing in torch reads it. Sum the gradients of that list over
# the two stages before each update. Stage 0 also holds a third copy, under the head's name, which no gradient reaches.
#
# Expected output:
#   warnings about it: 0, replicated_params: [{'submod_pp_0': 'embedding.weight', 'submod_pp_1': 'head.weight'}]
#   stage 0: embedding.weight, head.weight; stage 1: middle.weight, head.weight
#   before the step the copies are equal: True
#   after it they are equal: False; that of stage 0 is one process's: False, that of stage 1: False
#   the two updates together are one process's: True; the third copy moved: False
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy

cat > "$folder/ranks.py" <<'PY'
import sys
import warnings

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch.distributed.pipelining import Schedule1F1B, SplitPoint, pipeline


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.middle = torch.nn.Embedding(16, 8), torch.nn.Linear(8, 8, False)
        self.head = torch.nn.Linear(8, 16, False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        return self.head(self.middle(self.embedding(ids)))


def made():
    torch.manual_seed(0)
    return Tied().double()


def loss_of(logits, ids):
    return F.cross_entropy(logits.flatten(0, 1), ids.flatten())


def body(rank, rendezvous):
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    ids = torch.randint(16, (4, 8), generator=torch.Generator().manual_seed(1))
    one = made()
    first = one.head.weight.detach().clone()
    loss_of(one(ids), ids).backward()
    torch.optim.SGD(one.parameters(), lr=0.1).step()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        pipe = pipeline(made(), (ids[:2],), split_spec={"middle": SplitPoint.BEGINNING})
    messages = [str(each.message).lower() for each in caught]
    about = [text for text in messages if "param" in text or "tied" in text or "shared" in text]
    stage = pipe.build_stage(rank, torch.device("cpu"))
    mine = dict(stage.submod.named_parameters())
    before = {name: x.detach().clone() for name, x in mine.items()}
    schedule = Schedule1F1B(stage, 2, loss_of)
    schedule.step(ids) if rank == 0 else schedule.step(target=ids)
    torch.optim.SGD(stage.submod.parameters(), lr=0.1).step()
    everyone = [None, None]
    dist.all_gather_object(everyone, (before, {name: x.detach() for name, x in mine.items()}))
    if rank == 0:
        (old_first, new_first), (old_last, new_last) = everyone
        names = [", ".join(each) for each in (new_first, new_last)]
        embedding, head, right = new_first["embedding.weight"], new_last["head.weight"], one.head.weight.detach()
        print(f"warnings about it: {len(about)}, replicated_params: {pipe.replicated_params}")
        print(f"stage 0: {names[0]}; stage 1: {names[1]}")
        print(f"before the step the copies are equal: {torch.equal(old_first['embedding.weight'], old_last['head.weight'])}")
        are = [torch.allclose(each, right) for each in (embedding, head)]
        equal = torch.allclose(embedding, head)
        print(f"after it they are equal: {equal}; that of stage 0 is one process's: {are[0]}, that of stage 1: {are[1]}")
        both = torch.allclose(embedding + head - first, right)
        moved = not torch.equal(old_first["head.weight"], new_first["head.weight"])
        print(f"the two updates together are one process's: {both}; the third copy moved: {moved}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(body, (sys.argv[1],), 2)
PY
cat > "$folder/expected" <<'TXT'
warnings about it: 0, replicated_params: [{'submod_pp_0': 'embedding.weight', 'submod_pp_1': 'head.weight'}]
stage 0: embedding.weight, head.weight; stage 1: middle.weight, head.weight
before the step the copies are equal: True
after it they are equal: False; that of stage 0 is one process's: False, that of stage 1: False
the two updates together are one process's: True; the third copy moved: False
TXT
timeout 120 "$folder/env/bin/python" "$folder/ranks.py" "$folder/rendezvous" 2> "$folder/stderr" > "$folder/found" || { cat "$folder/stderr" >&2; exit 1; }
cat "$folder/found"
diff "$folder/expected" "$folder/found"
