"""A disk that is full in the middle of a save, a real one of 20 MB: one error, and the checkpoint before is whole."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoptd.runtime.checkpoint.series import LOCK
from tests.waits import LONG


def mounted(folder: Path) -> list[str]:
    """A command that runs another one where a tmpfs is mounted, which nobody else sees."""
    # A user who is root in a namespace of his own may mount there.
    own = [] if os.geteuid() == 0 else ["--map-root-user"]
    script = f'mount -t tmpfs -o size=20m none {folder} && exec "$@"'
    return ["unshare", *own, "--mount", "sh", "-c", script, "sh"]


@pytest.mark.thorough
def test_a_disk_that_is_full(tmp_path: Path) -> None:
    try:
        tried = subprocess.run([*mounted(tmp_path), "true"], capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no unshare, by which a small disk is mounted")
    if tried.returncode:
        pytest.skip(f"no tmpfs can be mounted here: {tried.stderr.strip()}")
    command = [*mounted(tmp_path), sys.executable, "-m", "tests.runtime.checkpoint.full_disk", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LONG)
    assert done.returncode == 0, done.stderr[-2000:]
    told = json.loads(done.stdout.splitlines()[-1])
    beside, replacing, alone = told["errors"]
    for error in (beside, replacing):
        assert error.startswith("RuntimeFault: pm.checkpointer: a save failed: rank 0: "), error
    for error in told["errors"]:
        assert error.count("No space left on device") == 1 and error.count("Remedy") <= 2, error
    assert alone.startswith("RuntimeFault: pm.save: OSError: [Errno 28]"), alone
    assert told["names"] == [[LOCK, "step-00000001"]] * 4
    assert told["resumed"] == "step-00000001"
