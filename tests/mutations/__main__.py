"""Plant every mutation by itself and see its tests fail: `python -m tests.mutations [WORD ...]`; exits 1 if one survives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.mutations import Mutation, all_mutations

ROOT = Path(__file__).parents[2]
COPIED = ("autoptd", "benchmarks", "docs", "examples", "tests", "Makefile", "README.md", "pyproject.toml")
# What pytest exits with when tests ran, and some failed.
FAILED = 1


def is_noticed(mutation: Mutation, root: Path) -> bool:
    """Return whether the mutation's tests fail with it planted in the copy at `root`, which is put back as it was."""
    path = root / mutation.file
    source = path.read_text()
    path.write_text(source.replace(mutation.before, mutation.after))
    command = [sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", *mutation.tests.split()]
    environment = {**os.environ, "PYTHONPATH": str(root), "PYTHONDONTWRITEBYTECODE": "1"}
    done = subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True)
    path.write_text(source)
    return done.returncode == FAILED


def main(words: list[str]) -> int:
    """Plant the mutations that `words` name, all without any; return how many survive."""
    chosen = [one for one in all_mutations() if all(word in repr(one) for word in words)]
    survivors = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            copy(ROOT / name, root / name)
        for mutation in chosen:
            noticed = is_noticed(mutation, root)
            survivors += not noticed
            print(
                f"{'noticed ' if noticed else 'SURVIVES'}  {mutation.file}: {mutation.after.strip()!r}",
                flush=True,
            )
    print(f"{len(chosen)} mutations, {survivors} survive")
    return survivors


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]) > 0)
