"""Run a command of `autoptd`, and print by how many bytes its memory grew at most: what no file stands behind."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import autoptd.wings.cli.checkpoint  # noqa: F401 - what is imported is not of the command
from autoptd.wings.cli import main


def anonymous_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    [line] = [line for line in lines if line.startswith("RssAnon:")]
    return 1024 * int(line.split()[1])


def run(words: list[str]) -> int:
    before, over, peak = anonymous_bytes(), threading.Event(), [0]

    def watch() -> None:
        while not over.wait(0.002):
            peak[0] = max(peak[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    code = main(words)
    over.set()
    thread.join()
    print(max(0, peak[0] - before))
    return code


if __name__ == "__main__":
    sys.exit(run(sys.argv[1:]))
