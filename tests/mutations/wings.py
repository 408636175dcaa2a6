"""The command line, pictures and reports."""

from tests.mutations import planted

MUTATIONS = (
    *planted(
        "autoptd/wings/planner/auto.py",
        "tests/wings/planner/test_auto.py",
        ("keywords.get(degree) or mesh.get(degree, 1)", "keywords.get(degree) or 1"),
        ("return ranks // size", "return ranks"),
    ),
    *planted(
        "autoptd/wings/cli/commands.py",
        "tests/wings/cli/test_parser.py",
        ('if getattr(args, "list", False):', "if False:"),
    ),
    *planted(
        "autoptd/wings/cli/commands.py",
        "tests/wings/cli/test_request.py",
        ("        check_request(args)\n", ""),
    ),
    *planted(
        "autoptd/wings/cli/live.py",
        "tests/test_imports.py",
        ("from typing import TextIO", "import tqdm\nfrom typing import TextIO"),
    ),
    *planted(
        "autoptd/wings/cli/live.py",
        "tests/wings/cli/test_live.py",
        ("[: self._columns - 1]", ""),
    ),
    *planted(
        "autoptd/wings/cli/models.py",
        "tests/wings/cli/test_models.py -k fails_while",
        ("_import(str(path), lambda: spec", "(lambda _, load: load())(str(path), lambda: spec"),
        ('f"{name}.".startswith(f"{error.name}.")', "True"),
        (
            '    except Exception as error:\n        fact = f"transformers cannot',
            '    except ValueError as error:\n        fact = f"transformers cannot',
        ),
    ),
    *planted(
        "autoptd/wings/cli/request.py",
        "tests/wings/cli/test_request.py",
        ("args.command not in BESIDES.get(name, ())", "True"),
        ('if backend == "local":', "if True:"),
    ),
    *planted(
        "autoptd/wings/doctor/checks.py",
        "tests/wings/doctor/test_checks.py",
        ("if is_alike and torch.equal(got, right):", "if is_alike:"),
    ),
    *planted(
        "autoptd/wings/reports/progress.py",
        "tests/wings/reports/test_slow_ranks.py",
        ("torch.get_num_threads() + 1", "torch.get_num_threads()"),
    ),
    *planted(
        "autoptd/wings/viz/graphviz.py",
        "tests/wings/viz/test_picture.py",
        ("    if line.bar:\n", "    if False:\n"),
    ),
    *planted(
        "autoptd/wings/words.py",
        "tests/test_measured.py",
        ('{_three(count)} {prefix}{unit}"', '{_three(count)}{prefix}{unit}"'),
    ),
    *planted(
        "autoptd/wings/words.py",
        "tests/wings/test_words.py",
        ("escape(visible(text))", "escape(text)"),
    ),
    *planted(
        "autoptd/wings/planner/plan.py",
        "tests/wings/planner/test_plan.py -k column",
        ('head = ["", "seconds", "TFLOP/s", "GB",', 'head = ["", "seconds", "GB", "TFLOP/s",'),
    ),
)
