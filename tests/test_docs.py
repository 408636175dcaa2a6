"""Docs: the commands that are marked run, dumps that are shown are real, links lead somewhere, public names are all told."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest
import torch

import autoptd
from autoptd.ir.machine import Machine
from autoptd.wings.cli import main
from autoptd.wings.cli.parser import parse
from benchmarks.gpu.rows import Journal
from benchmarks.gpu.sections import SECTIONS
from docs import make_benchmarks, make_site
from docs.make_api import PAGE, page
from examples.gpt import GPT, GPTConfig

ROOT = Path(__file__).parents[1]
PAGES = [
    *(ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "examples/README.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
]
MARKED = re.compile(r"<!-- run -->\n```sh\n(.*?)```", re.S)
FILES = re.compile(r"<!-- file: (\S+) -->\n```\w+\n(.*?)```", re.S)


def marked() -> dict[str, list[list[str]]]:
    """The marked blocks: name -> the words of each command."""
    found = {}
    for path in PAGES:
        for number, block in enumerate(MARKED.findall(path.read_text())):
            name = f"{path.relative_to(ROOT)} {number}"
            found[name] = [shlex.split(line, comments=True) for line in block.splitlines() if line.strip()]
    return found


def test_pages_have_marked_commands() -> None:
    assert len(marked()) >= 8 and {name.split()[0] for name in marked()} >= {
        "README.md",
        "docs/howto/pin-a-plan.md",
    }
    for commands in marked().values():
        for words in commands:
            assert words[0] == "autoptd", "only our own commands are run"
            parse(words[1:])


# GPT-2 in full, twice, is thorough.
LARGE = {"docs/howto/long-sequences.md"}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.thorough if page in LARGE else [])
        for page in sorted({name.split()[0] for name in marked()})
    ],
)
def test_marked_commands_end_well(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In order, in a folder of their own."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for name, commands in marked().items():
        for words in commands if name.split()[0] == page else ():
            assert main(words[1:]) == 0, " ".join(words)
    for name, text in FILES.findall((ROOT / page).read_text()):
        (tmp_path / name).write_text(text)
        asked = parse(["train", "--config", name])
        assert all(getattr(asked, key) == value for key, value in tomllib.loads(text).items())


def test_the_glossary_has_one_row_for_a_term() -> None:
    rows = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs/glossary.md").read_text(), re.M)
    terms = Counter(term.strip() for row in rows for term in re.split(r"[;,]", re.sub(r"\(.*?\)", "", row)))
    assert not {term for term, count in terms.items() if count > 1} - {"term", "---"}


def test_files_that_pages_name_exist() -> None:
    """By a path from the root or from autoptd/, or by their name alone."""
    files = [path.relative_to(ROOT) for path in ROOT.rglob("*.py") if ".venv" not in path.parts]
    known = {str(path.relative_to("autoptd")) for path in files if path.parts[0] == "autoptd"}
    known |= {str(path) for path in files} | {path.name for path in files}
    # What a user has, or a run leaves.
    known |= {"model.py", "train.py", "stage_0.py", "stage_1.py", "layers.py", "updates.py", "finetune.py"}
    known |= {"make_base.py"}
    for path in PAGES:
        prose = re.sub(r"^```.*?^```", "", path.read_text(), flags=re.S | re.M)
        named = {name for name in re.findall(r"`([\w./]+\.py)`", prose) if not name.startswith("out/")}
        assert not named - known, path.relative_to(ROOT)


def plain(text: str) -> list[str]:
    """Lines without prefix, numbers of spaces and empty ones."""
    return [line for one in text.splitlines() if (line := " ".join(one.replace("transformer.", "").split()))]


def test_the_walk_through_the_pipeline_is_the_real_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("autoptd.ir.machine.DEFAULT", Machine())  # not that of the tests
    monkeypatch.setenv("AUTOPTD_DUMP", str(tmp_path))
    ids, targets = torch.randint(256, (2, 16, 64), generator=torch.Generator().manual_seed(0))
    mesh = {"t": 2, "p": 2, "d": 2, "v": 2, "num_microbatches": 4}
    program = autoptd.compile(GPT(GPTConfig()), **mesh, example_inputs=(ids, targets))
    sections = (ROOT / "docs/pipeline.md").read_text().split("\n## ")
    blocks = {text.split("\n")[0]: re.findall(r"```\w+\n(.*?)```", text, re.DOTALL) for text in sections}
    for section in ("trace", "annotate", "communicate", "cut", "localize"):
        (written,) = (tmp_path / "passes").glob(f"??_{section}.txt")
        lines = plain(written.read_text())
        if section == "trace":  # only what it is about: the types come later
            lines = [line.removesuffix(" I") for line in lines]
        assert set(plain(blocks[section][0])) <= set(lines), section
    told = plain(program.explain("transformer.h.0.mlp.c_fc"))
    assert set(plain(blocks["annotate"][2])) - {"..."} <= set(told)
    monkeypatch.setenv("AUTOPTD_DUMP", str(tmp_path / "tokens"))
    autoptd.compile(
        GPT(GPTConfig()),
        **mesh,
        sequence_parallel=True,
        machine=Machine(latency=1e-9),
        example_inputs=(ids, targets),
    )
    lines = plain((tmp_path / "tokens" / "passes" / "03_annotate.txt").read_text())
    assert set(plain(blocks["annotate"][1])) <= set(lines)
    for block, name in zip(blocks["emit"], ("layers.py", "stage_0.py"), strict=False):
        assert "".join(block.split()) in "".join(program.sources[name].split())
    assert (
        plain(blocks["schedule"][-1])[0].removeprefix("pipeline rank 0: ").removesuffix(" ...")
        in program.schedule
    )


@pytest.mark.thorough  # compiles GPT-2, without what the tests change for all
def test_the_pictures_are_those_that_are_drawn() -> None:
    code = """if True:
        from pathlib import Path
        from docs.pictures import architecture, draw
        drawn = {"architecture.svg": architecture.picture(), **draw.pictures()}
        print(*sorted(name for name in drawn if drawn[name] != Path("docs/pictures", name).read_text()))
    """
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == [], "run docs/pictures/draw.py and docs/pictures/architecture.py"


def test_pictures_follow_the_screen() -> None:
    pictures = list((ROOT / "docs/pictures").glob("*.svg"))
    assert len(pictures) == 4
    assert all("screen and (prefers-color-scheme: dark)" in path.read_text() for path in pictures)


def anchors(page: str) -> set[str]:
    """The names by which links reach the headings of a page, on the site and where repositories are shown."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page, flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\s-]", "", text.lower()).strip().replace(" ", "-") for text in headings}


def test_links_lead_somewhere() -> None:
    for path in PAGES:
        for name, anchor in re.findall(r"\]\(([^)#\s]*)#?([^)\s]*)\)", path.read_text()):
            if not name.startswith("http"):
                target = path.parent / name if name else path
                assert target.exists(), f"{path.relative_to(ROOT)}: {name}"
                assert not anchor or anchor in anchors(target.read_text()), f"{path}: {name}#{anchor}"


def test_the_navigation_has_every_page(tmp_path: Path) -> None:
    make_site.stage(tmp_path)
    tables = [pages for table in make_site.NAVIGATION.values() for pages in table.values()]
    listed = [f"{name}.md" for names in tables for name in names]
    pages = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(listed) == sorted({*pages, "changelog.md", "contributing.md"})
    for place in (tmp_path / name for name in ("index.md", *listed)):
        for link in make_site.LINK.findall(place.read_text()):
            assert (place.parent / link).exists(), f"{place}: {link}"


@pytest.mark.thorough  # `make docs` does it before a change lands
def test_the_site_is_built_and_fetches_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx")
    monkeypatch.setattr(make_site, "BUILD", tmp_path / "build")
    monkeypatch.setattr(make_site, "SITE", tmp_path / "site")
    assert make_site.build() == 0
    for path in (tmp_path / "site").rglob("*.html"):
        assert not re.search(
            r'(?:<script[^>]* src|<link[^>]* href|<img[^>]* src)="(?:https?:)?//', path.read_text()
        ), path


def test_public_names_are_told() -> None:
    """PYTHONPATH=. python docs/make_api.py writes the page."""
    text = page()
    assert all(f"\n## autoptd.{name}\n" in text for name in autoptd.__all__)
    assert "### ParallelModel.step" in text and "at 0x" not in text
    assert PAGE.read_text() == text


def test_the_tables_of_benchmarks_are_the_results() -> None:
    """PYTHONPATH=. python docs/make_benchmarks.py writes them."""
    texts = [page.read_text() for page in make_benchmarks.PAGES]
    assert [make_benchmarks.filled(text) for text in texts] == texts
    names = {name for text in texts for _, name, _ in make_benchmarks.MARKED.findall(text)}
    assert set(make_benchmarks.TABLES) | {f"gpu/{section.name}" for section in SECTIONS} == names


def test_a_section_of_a_gpu_is_a_table_once_it_was_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_benchmarks, "RESULTS", tmp_path)
    page = "<!-- table: gpu/kernels -->\n<!-- end of table -->\n"
    assert "Not run" in make_benchmarks.filled(page)
    (tmp_path / "gpu").mkdir()
    journal = Journal.open(tmp_path / "gpu", "kernels")
    journal.put("swiglu", "done", forms=[{"form": "ours", "us": 12.5}])
    assert "| swiglu | ours | 12.5 |" in make_benchmarks.filled(page)


def test_what_the_package_says_it_has() -> None:
    assert set(autoptd.__all__) == set(autoptd.HOME_OF) and sorted(autoptd.__all__) == autoptd.__all__
    for name, home in autoptd.HOME_OF.items():
        assert getattr(autoptd, name).__module__.startswith("autoptd"), home
    import autoptd.verify as module_or_function  # the submodule of the same name does not hide the function

    assert callable(autoptd.verify) and module_or_function is autoptd.verify
    with pytest.raises(AttributeError, match="no attribute 'compil'"):
        _ = autoptd.compil


EXCERPT = re.compile(r"<!-- emitted: (\S+) -->\n```python\n(.*?)```", re.S)


def test_excerpts_of_emitted_files_are_of_those() -> None:
    """The golden ones, which a test holds to what is emitted."""
    found = [(name, text) for path in PAGES for name, text in EXCERPT.findall(path.read_text())]
    assert len(found) >= 2
    for name, text in found:
        assert text in (ROOT / f"tests/golden/emitted/{name}.txt").read_text(), text
