"""Build the docs as a site in site/: `make docs`.

Pages are copied to build/docs, with README.md as the first one, and Sphinx turns the copies into HTML. A broken link fails
the build, and so does a page that NAVIGATION lacks. The pages themselves need nothing from Sphinx, so that they read well in
a repository: tables of contents and the places of files on the site are added to the copies.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
BUILD, SITE = ROOT / "build", ROOT / "site"
# Pages at the root of the repository -> their place on the site.
MOVED = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
# The navigation, below the pages that have it: caption -> pages, in order.
NAVIGATION = {
    "index.md": {
        "Get started": ("getting-started", "bring-your-own-model", "models", "faq"),
        "How-to": ("howto/index",),
        "Concepts": ("architecture", "pipeline", "plan", "planner", "glossary"),
        "Reference": ("api", "cli"),
        "Results": ("benchmarks", "compare", "real-models", "silent-errors"),
        "Project": ("decisions/index", "contributing", "changelog"),
    },
    "howto/index.md": {
        "": tuple(
            f"howto/{page}"
            for page in """
        hugging-face port-a-loop data choose-a-mesh train-on-8-gpus trainer lightning evaluation optimizers lora huge-models
        multi-node launchers check-a-launch read-a-hang run-time-checks checkpoints restart pipeline-schedules
        sequence-parallelism long-sequences experts inspect pin-a-plan precision zero recompute fused-operators overlap
        gpu losses buffers lengths random-numbers
    """.split()
        )
    },
    "decisions/index.md": {
        "": (
            "decisions/checkpoints",
            "decisions/cost-of-a-change",
            "decisions/new-mesh-axis",
            "decisions/structure",
        )
    },
}
# The target of a link or picture, up to its anchor.
LINK = re.compile(r"(?<=\]\()(?!https?:|#)([^)#\s]+)")


def place_of(path: str) -> str:
    """Return where the site has a file, by its path in the repository."""
    return MOVED.get(path, path.removeprefix("docs/"))


def stage(folder: Path) -> None:
    """Copy the pages to a folder, and whatever they link to."""
    waiting = [*MOVED, *(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md"))]
    seen: set[str] = set()
    while waiting:
        path = waiting.pop()
        if path not in seen and (ROOT / path).is_file():
            seen.add(path)
            waiting += copy(path, folder)


def copy(path: str, folder: Path) -> list[str]:
    """Copy one file to its place; return the files that it links to."""
    place = place_of(path)
    (folder / place).parent.mkdir(parents=True, exist_ok=True)
    if not path.endswith(".md"):
        shutil.copyfile(ROOT / path, folder / place)
        return []
    linked = []

    def on_site(match: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(path), match[1]))
        linked.append(target)
        return os.path.relpath(place_of(target), os.path.dirname(place) or ".")

    text = LINK.sub(on_site, (ROOT / path).read_text())
    is_listed = path.startswith("docs/") or path in MOVED
    # A page of results is reached through a link only.
    head = "" if is_listed else "---\norphan: true\n---\n"
    (folder / place).write_text(head + text + "".join(contents(place)))
    return linked


def contents(place: str) -> Iterator[str]:
    """Yield the tables of contents of a page, which the sidebar shows."""
    for caption, pages in NAVIGATION.get(place, {}).items():
        entries = "\n".join(os.path.relpath(page, os.path.dirname(place) or ".") for page in pages)
        title = f":caption: {caption}\n" if caption else ""
        yield f"\n```{{toctree}}\n:hidden:\n{title}\n{entries}\n```\n"


def build() -> int:
    """Build the site from nothing; return the exit status of Sphinx."""
    from sphinx.cmd.build import main

    pages, trees = BUILD / "docs", BUILD / "doctrees"
    for folder in (pages, trees, SITE):
        shutil.rmtree(folder, ignore_errors=True)
    stage(pages)
    status = main(
        ["-q", "-W", "--keep-going", "-c", str(ROOT / "docs"), "-d", str(trees), str(pages), str(SITE)]
    )
    print(SITE / "index.html" if status == 0 else "The site was not built.")
    return status


if __name__ == "__main__":
    sys.exit(build())
