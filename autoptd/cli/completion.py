"""`autoptd completion SHELL`: what lets a shell complete commands, flags, known models and files.

The text is made from the parser, so it names what there is.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from autoptd.cli.known import KNOWN
from autoptd.cli.parser import make_parser

BASH = """# bash completion of autoptd; zsh reads it after `autoload -U bashcompinit; bashcompinit`
_autoptd() {{
  local word="${{COMP_WORDS[COMP_CWORD]}}" before="${{COMP_WORDS[COMP_CWORD-1]}}" flags=""
  if [ "$COMP_CWORD" -eq 1 ]; then COMPREPLY=($(compgen -W "{commands}" -- "$word")); return; fi
  case "$before" in
{choices}
  esac
  case "${{COMP_WORDS[1]}}" in
{flags}
  esac
  case "$word" in
    -*) COMPREPLY=($(compgen -W "$flags" -- "$word")) ;;
    *) COMPREPLY=($(compgen -W "{models}" -- "$word") $(compgen -f -- "$word")) ;;
  esac
}}
complete -o filenames -F _autoptd autoptd
"""


def completion(asked: Namespace) -> int:
    """Print the script; 0."""
    print(("autoload -U bashcompinit; bashcompinit\n" if asked.shell == "zsh" else "") + script(), end="")
    return 0


def script() -> str:
    """The bash script."""
    _, commands = make_parser()
    flags = "\n".join(f'    {name}) flags="{" ".join(_flags(one))}" ;;' for name, one in commands.items())
    choices: dict[str, str] = {}
    for one in commands.values():
        for action in one._actions:
            for flag in action.option_strings if action.choices else ():
                choices[flag] = " ".join(map(str, action.choices or ()))
    told = "\n".join(
        f'    {flag}) COMPREPLY=($(compgen -W "{words}" -- "$word")); return ;;' for flag, words in choices.items()
    )
    return BASH.format(commands=" ".join(commands), choices=told, flags=flags, models=" ".join(KNOWN))


def _flags(parser: ArgumentParser) -> list[str]:
    return [flag for action in parser._actions for flag in action.option_strings if flag.startswith("--")]
