"""Names of the user's in emitted files, globs and pictures."""

from __future__ import annotations

from tests.mutations import Mutation

WRITTEN = "tests/codegen/test_written_names.py"
HOSTILE = "tests/hostile/test_names.py"

MUTATIONS = (
    Mutation(
        "autoptd/codegen/body.py",
        'writer.comment(2, f"{module}{source}")',
        'writer.add(2, f"# {module}{source}")',
        HOSTILE,
    ),
    Mutation(
        "autoptd/codegen/update_file.py",
        "{quoted(name)}: ",
        "{chr(34)}{name}{chr(34)}: ",
        f"{HOSTILE} -k updated",
    ),
    Mutation("autoptd/codegen/writer.py", " or len(parts) == 1:", ":", WRITTEN),
    Mutation(
        "autoptd/codegen/writer.py", "shown(text),\n            WIDTH", "text,\n            WIDTH", WRITTEN
    ),
    Mutation("autoptd/codegen/program_files.py", "check_source(name, source)", "pass", HOSTILE),
    Mutation(
        "autoptd/ir/names.py",
        'name = free_name(identifier(wanted, "layer_"))\n',
        "return free_name(wanted)\n",
        WRITTEN,
    ),
    Mutation("autoptd/ir/names.py", 'unicodedata.normalize("NFKC", text)', "text", WRITTEN),
    Mutation(
        "autoptd/runtime/params/optimizer.py",
        "[spec.name for spec in specs if item in (spec.name, *spec.aliases)]",
        "[]",
        f"{HOSTILE} -k globs",
    ),
    Mutation(
        "autoptd/passes/kept/requested.py",
        "if any(glob == path or fnmatchcase(path, glob) for path in paths):",
        "if not paths:",
        f"{HOSTILE} -k globs",
    ),
    Mutation("autoptd/trace/read.py", "in reversed(frames)", "in reversed(frames[:0])", f"{HOSTILE} -k file"),
    Mutation("autoptd/wings/words.py", "escape(visible(text))", "escape(text)", "tests/wings/test_words.py"),
)
