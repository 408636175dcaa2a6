#!/usr/bin/env bash
# torch 2.13.0, gloo on the CPU: ProcessGroup.abort() returns without an error and ends nothing; a receive that times out ends
# every later call of its group.
#
# Its docstring says that it aborts operations and connections if the backend supports that; gloo gives no sign that it does not.
# The receive below goes on until its own timeout, three seconds after abort() has returned. From then on every call of that group
# fails on *both* ranks, also on the one whose calls were all in time, while the default group still works.
# So a watchdog that wants to end what another thread waits for has to let a receive of its own time out.
#
# Expected output:
#   rank 0: abort() returned None after 1 s
#   rank 0: receive ended after 4 s: Timed out
#   rank 0: all_reduce of the same group: RuntimeError
#   rank 0: all_reduce of the default group: 2.0
#   rank 1: all_reduce of the same group: RuntimeError
#   rank 1: all_reduce of the default group: 2.0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/env"
"$folder/env/bin/pip" install -q torch==2.13.0 numpy

cat > "$folder/ranks.py" <<'PY'
import datetime
import sys
import threading
import time

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

SECONDS = 4


def abort(group, start):
    time.sleep(1)
    found = group.abort()
    print(f"rank 0: abort() returned {found} after {time.monotonic() - start:.0f} s", flush=True)


def outcome(group):
    x = torch.ones(1)
    try:
        dist.all_reduce(x, group=group)
        return float(x)
    except RuntimeError as error:
        return type(error).__name__


def body(rank, rendezvous):
    limit = datetime.timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2, timeout=limit)
    group = dist.new_group([0, 1], timeout=datetime.timedelta(seconds=SECONDS))
    dist.all_reduce(torch.ones(1), group=group)
    if rank == 0:
        start = time.monotonic()
        threading.Thread(target=abort, args=(group, start)).start()
        try:
            dist.recv(torch.empty(1), 1, group=group)
        except RuntimeError as error:
            what = "Timed out" if "Timed out" in str(error) else str(error)
            print(f"rank 0: receive ended after {time.monotonic() - start:.0f} s: {what}", flush=True)
    # Rank 1 comes to the next call of the group after that.
    dist.barrier()
    for turn in range(2):
        if turn == rank:
            print(f"rank {rank}: all_reduce of the same group: {outcome(group)}", flush=True)
        else:
            outcome(group)
        dist.barrier()
        found = outcome(None)
        if turn == rank:
            print(f"rank {rank}: all_reduce of the default group: {found}", flush=True)
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    mp.spawn(body, (sys.argv[1],), 2)
PY
cat > "$folder/expected" <<'TXT'
rank 0: abort() returned None after 1 s
rank 0: receive ended after 4 s: Timed out
rank 0: all_reduce of the same group: RuntimeError
rank 0: all_reduce of the default group: 2.0
rank 1: all_reduce of the same group: RuntimeError
rank 1: all_reduce of the default group: 2.0
TXT
timeout 120 "$folder/env/bin/python" "$folder/ranks.py" "$folder/rendezvous" 2> "$folder/stderr" > "$folder/found" || { cat "$folder/stderr" >&2; exit 1; }
cat "$folder/found"
diff "$folder/expected" "$folder/found"
