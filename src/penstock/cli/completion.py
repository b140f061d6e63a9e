"""`penstock completion SHELL`: completion of the whole command, found in the command tree itself.

The printed script only asks `penstock __complete WORD...` at each Tab, so it never gets old: a
line per candidate with what it is, or `:files` where a path may stand. Needs no library.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from penstock.hub.folder import known_names

FILES = ":files"
_MODEL_FLAGS = {"--model", "--tokenizer", "--delete"}
_FILE_METAVARS = {"FILE", "DIR", "PATH"}

_BASH = """\
# penstock completion bash: put  eval "$(penstock completion bash)"  into ~/.bashrc
_penstock() {
    local cur=${COMP_WORDS[COMP_CWORD]} value about
    COMPREPLY=()
    while IFS=$'\\t' read -r value about; do
        if [[ $value == :files ]]; then
            compopt -o filenames 2>/dev/null
            while IFS= read -r value; do COMPREPLY+=("$value"); done < <(compgen -f -- "$cur")
        else
            COMPREPLY+=("$value")
        fi
    done < <("$1" __complete "${COMP_WORDS[@]:1:COMP_CWORD}" 2>/dev/null)
}
complete -F _penstock penstock
"""

_ZSH = """\
#compdef penstock
# penstock completion zsh: put  source <(penstock completion zsh)  into ~/.zshrc, after compinit
_penstock() {
    local line has_files
    local -a values shown
    for line in "${(@f)$("$words[1]" __complete "${(@)words[2,CURRENT]}" 2>/dev/null)}"; do
        case $line in
            '') ;;
            :files) has_files=1 ;;
            *) values+=("${line%%$'\\t'*}"); shown+=("${line/$'\\t'/  -- }") ;;
        esac
    done
    (( $#values )) && compadd -l -d shown -- "${(@)values}"
    [[ -n $has_files ]] && _files
    return 0
}
compdef _penstock penstock
"""

_FISH = """\
# penstock completion fish: put  penstock completion fish | source  into config.fish
function __penstock_complete
    set -l words (commandline -opc)
    set -l current (commandline -ct)
    for line in ($words[1] __complete $words[2..-1] "$current" 2>/dev/null)
        if test "$line" = :files
            __fish_complete_path "$current"
        else
            echo $line
        end
    end
end
complete -c penstock -f -a '(__penstock_complete)'
"""

SCRIPTS = {"bash": _BASH, "zsh": _ZSH, "fish": _FISH}


def run(args: argparse.Namespace) -> int:
    sys.stdout.write(SCRIPTS[args.shell])
    return 0


def complete(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Prints what the last of `words`, which may be empty, can become."""
    for line in candidates(parser, words):
        print(line)
    return 0


def candidates(parser: argparse.ArgumentParser, words: Sequence[str]) -> Iterator[str]:
    # Bash takes --flag=value apart at the equals sign.
    *before, current = [word for word in words if word != "="] or [""]
    if words and words[-1] == "=":
        before, current = [*before, current], ""
    parser, before = _command(parser, before)
    flag, equals, value = current.partition("=")
    if equals and (action := _flag(parser, flag)) is not None:
        for line in _values(action, value):
            yield line if line == FILES else f"{flag}={line}"
        return
    if before and (action := _flag(parser, before[-1])) is not None and action.nargs != 0:
        yield from _values(action, current)
    elif current.startswith("-"):
        yield from _flags(parser, current)
    else:
        place = len(_plain(parser, before))
        positionals = [one for one in parser._actions if not one.option_strings]
        if positionals[place:]:
            yield from _values(positionals[place], current)


def _command(
    parser: argparse.ArgumentParser, words: list[str]
) -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser of the innermost sub-command, and the words that are its arguments."""
    for position, word in enumerate(words):
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                return _command(action.choices[word], words[position + 1 :])
    return parser, words


def _plain(parser: argparse.ArgumentParser, words: list[str]) -> list[str]:
    """Those that are neither flags nor values of flags."""
    found, is_value = [], False
    for word in words:
        if word.startswith("-"):
            action = _flag(parser, word)
            is_value = action is not None and action.nargs != 0 and "=" not in word
        elif is_value:
            is_value = False
        else:
            found.append(word)
    return found


def _flag(parser: argparse.ArgumentParser, word: str) -> argparse.Action | None:
    name = word.partition("=")[0]
    spelled = f"--{name[2:].replace('-', '_')}" if name.startswith("--") else name
    return parser._option_string_actions.get(spelled)


def _flags(parser: argparse.ArgumentParser, current: str) -> Iterator[str]:
    """In the spelling that was begun: with dashes, where it has one."""
    is_dashed = "-" in current[2:]
    for action in parser._actions:
        if action.help == argparse.SUPPRESS:
            continue
        for name in action.option_strings:
            spelled = f"{name[:2]}{name[2:].replace('_', '-')}" if is_dashed else name
            if spelled.startswith(current):
                yield _line(spelled, _about(parser, action))


def _values(action: argparse.Action, current: str) -> Iterator[str]:
    if isinstance(action, argparse._SubParsersAction):
        texts = {one.dest: one.help or "" for one in action._choices_actions}
        known = {name: texts.get(name, "") for name in action.choices}
    elif action.choices is not None:
        known = dict.fromkeys(map(str, action.choices), "")
    elif action.dest == "model" or _MODEL_FLAGS.intersection(action.option_strings):
        known = dict.fromkeys(_models(), "model")
    elif "--recipe" in action.option_strings or action.dest == "name":
        known = dict.fromkeys(_recipes(), "recipe")
    else:
        known = {}
    yield from (_line(name, text) for name, text in known.items() if name.startswith(current))
    is_path = action.type is Path or action.metavar in _FILE_METAVARS
    if is_path or (action.dest == "model" and not action.option_strings):
        yield FILES


def _models() -> list[str]:
    """Short names, and what lies in the hub's cache."""
    from huggingface_hub import constants

    folders = Path(constants.HF_HUB_CACHE).glob("models--*")
    return [*known_names(), *sorted(one.name[8:].replace("--", "/") for one in folders)]


def _recipes() -> list[str]:
    from penstock.config.recipe import recipe_names

    return recipe_names()


def _about(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    return str(parser._get_formatter()._expand_help(action)) if action.help else ""


def _line(name: str, text: str) -> str:
    return f"{name}\t{' '.join(text.split())}"
