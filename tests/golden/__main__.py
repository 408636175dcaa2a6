"""Write the golden texts anew, and say which changed: `python -m tests.golden`."""

from __future__ import annotations

from tests.golden import FOLDER, read, texts

if __name__ == "__main__":
    before, now = read(), texts()
    for path in sorted(before.keys() | now.keys()):
        if path not in now:
            (FOLDER / path).unlink()
        elif now[path] != before.get(path):
            (FOLDER / path).parent.mkdir(parents=True, exist_ok=True)
            (FOLDER / path).write_text(now[path])
        else:
            continue
        print(f"changed: tests/golden/{path}")
