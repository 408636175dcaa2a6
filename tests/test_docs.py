"""Docs: the commands that are marked run, links lead somewhere, the list of public names is up to date."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

import autoptd
from autoptd.cli import main
from docs.make_api import PAGE, page

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
MARKED = re.compile(r"<!-- run -->\n```sh\n(.*?)```", re.S)


def marked() -> dict[str, list[list[str]]]:
    """The marked blocks: name -> the words of each command."""
    found = {}
    for path in PAGES:
        for number, block in enumerate(MARKED.findall(path.read_text())):
            name = f"{path.relative_to(ROOT)} {number}"
            found[name] = [shlex.split(line, comments=True) for line in block.splitlines() if line.strip()]
    return found


def test_pages_have_marked_commands() -> None:
    assert len(marked()) >= 8 and {name.split()[0] for name in marked()} >= {"README.md", "docs/howto/pin-a-plan.md"}


@pytest.mark.parametrize("page", {name.split()[0] for name in marked()})
def test_marked_commands_end_well(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, commands in marked().items():
        for words in commands if name.split()[0] == page else ():
            assert words[0] == "autoptd", "only our own commands are run"
            assert main(words[1:]) == 0, " ".join(words)


def test_links_lead_somewhere() -> None:
    for path in PAGES:
        for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", path.read_text()):
            if not target.startswith("http"):
                assert (path.parent / target).exists(), f"{path.relative_to(ROOT)}: {target}"


def test_public_names_are_told() -> None:
    """PYTHONPATH=. python docs/make_api.py writes the page."""
    text = page()
    assert all(f"\n## autoptd.{name}\n" in text for name in autoptd.__all__)
    assert "### ParallelModel.step" in text and "at 0x" not in text
    assert PAGE.read_text() == text


def test_what_the_package_says_it_has() -> None:
    assert set(autoptd.__all__) == set(autoptd.HOME_OF) and sorted(autoptd.__all__) == autoptd.__all__
    for name, home in autoptd.HOME_OF.items():
        assert getattr(autoptd, name).__module__.startswith("autoptd"), home
    import autoptd.compile as module_or_function  # the submodule of the same name does not hide the function

    assert callable(autoptd.compile) and module_or_function is autoptd.compile
    with pytest.raises(AttributeError, match="no attribute 'compil'"):
        _ = autoptd.compil
