"""What tab completion offers for a command line that is being typed: verbs, groups, options, keys, values and flags."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from orchestrator.compose.arguments import CHOICES, REFUSED, SWITCHES, VALUED, VERBS
from orchestrator.compose.settable import NATIVE, Tree
from orchestrator.config.strict import type_of

SETTING_VERBS = ("fit", "choose", "calibrate", "search", "generate")  # verbs whose words are settings
SWEEP_VERBS = ("status", "watch", "logs", "report", "cancel", "resume", "retry", "compare")
SHELLS = ("bash", "zsh", "fish")


def typed_words(line: str) -> list[str]:
    """The words of a line without its program, the last one being typed; it is empty after a space."""
    words = line.split()
    words += [""] if line[-1:].isspace() or len(words) < 2 else []
    is_script = len(words) > 2 and Path(words[0]).name.startswith("python") and words[1].endswith("run.py")
    return words[2:] if is_script else words[1:]


def candidates(
    words: Sequence[str], tree: Tree, flags: Mapping[str, Sequence[str]], sweeps: Iterable[str]
) -> list[str]:
    """The words that the last one may become; those that are complete end in a space.

    flags: of each verb. sweeps: the names of the sweeps of the output folder, the newest last.
    """
    *before, typed = words
    verb = before[0] if before and before[0] in VERBS else ""
    if before and (values := CHOICES.get(before[-1])) and not typed.startswith("-"):
        return _matching(_ended(values), typed)
    if before[-1:] == ["--help"]:
        return _matching([*_ended(VERBS), *_ended(tree.groups), *_ended(_keys(tree, typed))], typed)
    if typed.startswith("-"):
        known = [*flags.get(verb, ()), "--help"] if verb else [*SWITCHES, *VALUED, *CHOICES]
        return _matching(_ended(dict.fromkeys(flag for flag in known if flag not in REFUSED)), typed)
    if verb in SWEEP_VERBS:
        return _matching(_ended(["last", *reversed(list(sweeps))]), typed)
    if verb == "completion":
        return _matching(_ended(SHELLS), typed)
    if verb and verb not in SETTING_VERBS:
        return []
    return _matching([*([] if before else _ended(VERBS)), *_settings(typed, tree)], typed)


def _settings(typed: str, tree: Tree) -> list[str]:
    """Overrides: a group or a key with =, and after it the option or value, also as the next one of a list."""
    name, equals, value = typed.partition("=")
    if not equals:
        return [
            *(f"{group}=" for group in tree.groups),
            *(f"{key}." if key in NATIVE else f"{key}=" for key in _keys(tree, typed)),
        ]
    chosen = value.rpartition(",")[0]
    begun = f"{name}={chosen}," if chosen else f"{name}="
    options = tree.groups.get(name, _values(tree.keys.get(name)))
    return [f"{begun}{option}" for option in options if option not in chosen.split(",")]


def _keys(tree: Tree, typed: str) -> list[str]:
    """The keys of the group that is typed. All keys together are too many to read."""
    return [key for key in tree.keys if key.startswith(typed) and ("." in typed or "." not in key)]


def _values(hint: Any) -> tuple[str, ...]:
    """The values of a key that has few of them."""
    kind, optional = type_of(hint)
    values: list[str] = []
    if kind is bool:
        values = ["true", "false"]
    elif get_origin(kind) is Literal:
        values = [str(value) for value in get_args(kind)]
    elif isinstance(kind, type) and issubclass(kind, Enum):
        values = [str(member.value) for member in kind]
    return (*values, *(["null"] if optional else []))


def _ended(words: Iterable[str]) -> list[str]:
    return [f"{word} " for word in words]


def _matching(words: Iterable[str], typed: str) -> list[str]:
    return [word for word in words if word.startswith(typed)]


BASH = r"""# tab completion of zero-lab in bash:  eval "$(PROGRAM completion bash)"
_zlab() {
    local line="${COMP_LINE:0:COMP_POINT}" word prefix IFS=$'\n'
    local -a program=("${COMP_WORDS[0]}")
    if [[ ${program[0]##*/} == python* ]]; then
        [[ ${COMP_WORDS[1]} == *run.py && COMP_CWORD -gt 1 ]] || return
        program+=("${COMP_WORDS[1]}")
    fi
    COMPREPLY=($("${program[@]}" completion --flags 'FLAGS' --line "$line" 2>/dev/null))
    word="${line##*[[:space:]]}"  # bash replaces only what follows the last = or :
    prefix="${word%"${word##*[=:]}"}"
    COMPREPLY=("${COMPREPLY[@]#"$prefix"}")
}
complete -o nospace -o default -F _zlab NAMES
"""
ZSH = r"""# tab completion of zero-lab in zsh:  eval "$(PROGRAM completion zsh)"
_zlab() {
    local line="${LBUFFER}" word
    local -a program found open closed
    program=("${(Q)words[1]}")
    if [[ ${program[1]:t} == python* ]]; then
        [[ ${words[2]} == *run.py && CURRENT -gt 2 ]] || { _default; return }
        program+=("${(Q)words[2]}")
    fi
    found=("${(@f)$("${program[@]}" completion --flags 'FLAGS' --line "$line" 2>/dev/null)}")
    for word in "${found[@]}"; do
        [[ -z $word ]] && continue
        if [[ $word == *' ' ]]; then closed+=("${word% }"); else open+=("$word"); fi
    done
    if (( ${#open} + ${#closed} == 0 )); then _files; return; fi
    (( ${#open} == 0 )) || compadd -S '' -- "${open[@]}"
    (( ${#closed} == 0 )) || compadd -- "${closed[@]}"
}
compdef _zlab NAMES
"""
FISH = r"""# tab completion of zero-lab in fish:  PROGRAM completion fish | source
function _zlab
    set -l line (commandline -cp)
    set -l program (commandline -opc)[1]
    if string match -q 'python*' (basename $program)
        set program (commandline -opc)[1..2]
    end
    set -l found ($program completion --flags 'FLAGS' --line "$line" 2>/dev/null | string trim --right)
    if test (count $found) -gt 0
        printf '%s\n' $found
    else
        __fish_complete_path (commandline -ct)
    end
end
function _zlab_of_run_py  # all other uses of python complete files, as without zero-lab
    string match -q '*run.py' -- (commandline -opc)[2]
end
REGISTER
"""


def script(shell: str, program: str, flags: Mapping[str, Sequence[str]]) -> str:
    """The shell's code that registers the completion. flags: of each verb; kept in the code, because reading them would
    import every verb at each key press. With `python run.py` it also serves python, for run.py alone."""
    names = ["zlab"] if program.rpartition("/")[2] == "zlab" else ["zlab", "python", "python3"]
    text = {"bash": BASH, "zsh": ZSH, "fish": FISH}[shell]
    only = {name: " -n _zlab_of_run_py" for name in names if name.startswith("python")}
    register = "\n".join(f"complete -c {name}{only.get(name, '')} -f -a '(_zlab)'" for name in names)
    known = ";".join(f"{verb}:{','.join(names)}" for verb, names in flags.items())
    replaced = {"PROGRAM": program, "FLAGS": known, "NAMES": " ".join(names), "REGISTER": register}
    for name, value in replaced.items():
        text = text.replace(name, value)
    return text


def read_flags(text: str) -> dict[str, list[str]]:
    """The flags of each verb, from the text that `script` keeps."""
    pairs = [part.partition(":") for part in text.split(";") if part]
    return {verb: [flag for flag in flags.split(",") if flag] for verb, _, flags in pairs}
