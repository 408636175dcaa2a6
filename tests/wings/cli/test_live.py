"""What a command says on stderr while it runs; stdout has the result alone."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys

import pytest

from autoptd.ir.scopes import LOGGER, activity
from autoptd.wings.cli import main
from autoptd.wings.cli.live import Lines, Terminal, shown

SHOW = ["show", "gpt2", "--set", "n_layer=1", "--set", "n_embd=16", "--set", "n_head=2", "--seq", "8"]


class Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_passes_and_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SHOW, "--vocab", "8"]) == 0
    loud = capsys.readouterr()
    assert "tracing 2 samples ..." in loud.err and "tracing 4 samples ..." in loud.err
    assert "tracing" not in loud.out
    assert main([*SHOW, "--vocab", "8", "-q"]) == 0
    assert capsys.readouterr().err == ""


def test_the_first_line_comes_before_torch() -> None:
    code = """
import sys
from autoptd.wings.cli.commands import COMMANDS
from autoptd.wings.cli.live import shown
from autoptd.wings.cli.parser import parse

class NoTorch:
    def find_spec(name, *_):
        if name == "torch":
            sys.exit(7)

sys.meta_path.insert(0, NoTorch)
with shown(quiet=False):
    COMMANDS["show"](parse(["show", "gpt2"]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (7, "importing torch ...\n")


def test_lines() -> None:
    stream = io.StringIO()
    handler = Lines(stream)
    for words, seconds, is_brief in (
        ("tracing", None, False),
        ("tracing", 1.25, False),
        ("cut", None, True),
        ("cut", 0.01, True),
        ("annotate", None, True),
        ("annotate", 2.0, True),
        ("comparing", None, False),
        # It failed; another began.
        ("drawing", None, False),
    ):
        handler.emit(record_of(words, seconds, is_brief))
    handler.close()
    assert stream.getvalue() == "tracing ... 1.2 s\nannotate 2.0 s\ncomparing ...\ndrawing ...\n"


def record_of(words: str, seconds: float | None, is_brief: bool) -> logging.LogRecord:
    extra = {"words": words, "seconds": seconds, "is_brief": is_brief}
    return LOGGER.makeRecord(LOGGER.name, logging.INFO, "", 0, words, (), None, extra=extra)


def test_a_terminal_has_one_line_and_then_none(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Screen()
    monkeypatch.setattr(sys, "stderr", screen)
    with shown(quiet=False):
        assert isinstance(LOGGER.handlers[-1], Terminal)
        with activity("annotate"):
            assert re.search(r"\r\d\d:\d\d  annotate\x1b\[K$", screen.getvalue())
        assert screen.getvalue().endswith("\r\x1b[K")
        with activity("w" * 200):
            assert len(screen.getvalue().rpartition("\r")[2]) == len("\x1b[K") + 79, "it would be two lines"
    assert screen.getvalue().endswith("\r\x1b[K") and not LOGGER.handlers


def test_other_ranks_and_python_are_silent(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "1")
    with shown(quiet=False), activity("tracing"):
        pass
    assert capsys.readouterr().err == ""


def test_a_logger_hears_what_python_does(monkeypatch: pytest.MonkeyPatch) -> None:
    handler = logging.StreamHandler(stream := io.StringIO())
    monkeypatch.setattr(LOGGER, "handlers", [handler])
    with activity("nobody asked"):
        pass
    LOGGER.setLevel(logging.INFO)
    try:
        with activity("tracing"):
            pass
    finally:
        LOGGER.setLevel(logging.NOTSET)
    assert stream.getvalue() == "tracing: 0.0 s\n"
