"""The command line: turns the typed arguments into an exit code. Errors in them are reported before anything starts."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence

from orchestrator import wings
from orchestrator.compose import arguments
from orchestrator.compose.arguments import SHARED_PARSER, VERBS
from orchestrator.config.cluster import ClusterError
from orchestrator.config.strict import Refusal
from orchestrator.exit_codes import FAILED, INTERRUPTED
from orchestrator.records.record_file import BadRecord, explained
from orchestrator.text.streams import complain, refuse, take_any_text
from zero_runtime.limits import ConfigError

_OF_STREAMS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def _drop_unshown() -> None:
    """Discards output that cannot be printed, as on a full disk. Python would report the error again at exit, and end
    with another exit code."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # noqa: PERF203
            os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _end_quietly() -> int:
    """Handles a closed pipe, as with `| head`. Python would report the error again at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _error_line(error: BadRecord | OSError) -> str:
    """One line for the error. Errors on our files name the file; for errors of standard output the name is added."""
    if isinstance(error, BadRecord) or error.filename is not None:
        return explained(error)
    return f"standard output: {explained(error)}" if error.errno in _OF_STREAMS else explained(error)


def main(argv: Sequence[str]) -> int:
    """0: every point has a result. 1: at least one failed. 2: the arguments were wrong, nothing was started."""
    take_any_text()
    code = _answered(argv)
    _drop_unshown()
    return code


def _answered(argv: Sequence[str]) -> int:
    """The exit code, also where an error ends the command."""
    try:
        code = _carried_out(argv)
        sys.stdout.flush()
        return code
    except Refusal as refusal:
        return refuse(refusal.problems)
    except ClusterError as error:
        return refuse(["; ".join(str(error).splitlines())])
    except BrokenPipeError:
        return _end_quietly()
    except (BadRecord, OSError) as error:
        _drop_unshown()  # first: the message follows what could still be printed
        complain(f"error: {_error_line(error)}")
        return FAILED
    except ConfigError as error:
        complain(f"error: a record has a setting that this version does not have: {error}")
        return FAILED
    except MemoryError:
        complain("error: this process reached its limit of memory: raise it (ulimit -v)")
        return FAILED
    except KeyboardInterrupt:
        return INTERRUPTED


def _carried_out(argv: Sequence[str]) -> int:
    if "--version" in (argv[1:2] if argv[:1] == ["launch"] else argv):  # the words of a script are its own
        from orchestrator.machine import provenance  # imported here: it imports modules that only a run needs

        print(f"zero-lab {provenance.version_of('zero-lab') or '(not installed: no version)'}")
        return 0
    if argv[:1] == ["--help"] and argv[1:2] and argv[1] in VERBS:
        argv = [argv[1], "--help"]
    if argv and argv[0] in VERBS:
        place = VERBS[argv[0]]
        return int(wings.load(place).main(argv if place == SHARED_PARSER else argv[1:]))
    from orchestrator.commands import typed  # imported here: a verb, and above all tab completion, does without it

    return typed.answer(arguments.split(argv))
