"""The top level of the package, and what tests share."""

from tests.mutations import planted

MUTATIONS = (
    *planted(
        "autoptd/__init__.py",
        "tests/test_imports.py -k public_names",
        ("        with paused_collection():\n", "        if True:\n"),
    ),
    *planted(
        "autoptd/options/elsewhere.py",
        "tests/test_keywords.py",
        ('RECOMPUTE = \'recompute="full"', 'RECOMPUTE = \'recomputed="full"'),
    ),
    *planted(
        "autoptd/options/spelling.py",
        "tests/test_options.py -k differs_from_its_defaults",
        (
            "if not said[place.name] == place.default == getattr(unset, place.field)",
            "if said[place.name] != place.default",
        ),
    ),
    *planted(
        "autoptd/errors.py",
        "tests/trace/test_loss.py",
        ("{fact.removesuffix('.')}", "{fact}"),
    ),
    *planted(
        "tests/measured.py",
        "tests/test_measured.py",
        ("(?:e[-+]?\\d+)?|inf|nan)", "(?:e-?\\d+)?|inf|nan)"),
        ("|inf|nan)", ")"),
    ),
)
