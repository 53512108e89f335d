"""Argument parser of ``nnxmoe``. Runs the selected command and reports its errors.

Results go to stdout, everything else to stderr.
"""

import argparse
import importlib
import io
import os
import re
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import nnxmoe
from nnxmoe.apps.cli import (
    chat_command,
    convert_command,
    demo_command,
    eval_command,
    finetune_command,
    generate_command,
    inspect_command,
    plan_command,
    serve_command,
)
from nnxmoe.config.printable import did_you_mean
from nnxmoe.models import MODELS
from nnxmoe.runtime.compile_cache import compile_cache
from nnxmoe.runtime.extras import install_command
from nnxmoe.runtime.progress import messages_on_stderr

# Each module defines add_options(parser), run(options) and EXAMPLE. The docstring of run is the command's help.
_COMMANDS = {
    "demo": demo_command,
    "generate": generate_command,
    "chat": chat_command,
    "inspect": inspect_command,
    "plan": plan_command,
    "convert": convert_command,
    "finetune": finetune_command,
    "serve": serve_command,
    "eval": eval_command,
}

_DESCRIPTION = "Mixture-of-experts language models in JAX. Families, by the model_type of their config.json: "
_DEVICES = re.compile(r"--(device|gpu|cuda|cpu|tpu|n-gpu|num-gpu|ngl|tensor-parallel|tp)\b")
_NO_DEVICES = (
    f"; JAX selects the device: use {install_command('cuda13')} (or tpu), set JAX_PLATFORMS=cpu (or cuda, tpu) "
    "to force a platform, and use --mesh tensor=8 for 8 devices"
)


def run(arguments: Sequence[str]) -> int:
    """Run one command line and return its exit code: 0, or 1 after printing an error.

    Raises:
        SystemExit: With code 2 if the command line is invalid.
        KeyboardInterrupt: On Ctrl-C.
        BrokenPipeError: If the reader of the output closed the pipe.
    """
    parser = _parser()
    if not arguments:
        parser.print_help()
        return 0
    options, unknown_arguments = parser.parse_known_args(arguments)
    if unknown_arguments:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown_arguments)}")
    for output in (sys.stdout, sys.stderr):
        if isinstance(output, io.TextIOWrapper):
            output.reconfigure(errors="replace")  # print "?" for characters that the terminal cannot encode
    try:
        with messages_on_stderr():
            _import_modules([*options.imports, *options.command_imports])
            if options.compile_cache:
                compile_cache()
            options.run(options)
        sys.stdout.flush()
        return 0
    except BrokenPipeError:  # an OSError, but not an error to report
        raise
    except (ValueError, OSError, RuntimeError, MemoryError) as error:
        if options.debug:
            raise
        print(f"nnxmoe: error: {_error_line(error, options.flags)}", file=sys.stderr)
        return 1


def _error_line(error: Exception, flags: Sequence[argparse.Action]) -> str:
    reason = str(error)
    if isinstance(error, OSError) and error.filename:
        reason = f"{error.filename}: {error.strerror}"
    return with_flags(" ".join(reason.split()) or type(error).__name__, flags)


def with_flags(message: str, flags: Sequence[argparse.Action]) -> str:
    """Replace Python arguments and calls in an error message with command-line options.

    Messages that mention a JSON file are returned unchanged.
    """
    if ".json" in message:
        return message
    for action in flags:
        flag, name = action.option_strings[0], action.dest
        message = re.sub(rf"(?<![\w.\"'-]){name}=True(?!\w)", flag, message)
        message = re.sub(rf"(?<![\w.\"'-]){name}=False(?!\w)", f"without {flag}", message)
        message = re.sub(rf"(?<![\w.\"'-]){name}=(?=[^\s=])", rf"{flag} ", message)
        if "_" in name:
            message = re.sub(rf"(?<![\w.\"'-]){name}(?!\w)", flag, message)
    return re.sub(r"\b[A-Za-z_.]+\((--[^()]*)\)", r"\1", message)


class _Parser(argparse.ArgumentParser):
    """Parser that reports a usage error in one line and suggests the closest valid option or value."""

    def error(self, message: str) -> NoReturn:
        hint = ""
        if unknown_flag := re.search(r"unrecognized arguments: .*?(--[\w-]+)", message):
            hint = self._flag_hint(unknown_flag[1])
        elif invalid_choice := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            hint = did_you_mean(invalid_choice[1], re.findall(r"[\w-]+", invalid_choice[2]))
        self.exit(2, f"{self.prog}: error: {message}{hint} (see {self.prog} --help)\n")

    def _flag_hint(self, flag: str) -> str:
        if _DEVICES.match(flag):
            return _NO_DEVICES
        letters, flags = flag.replace("-", ""), self._option_string_actions
        matches = [name for name in flags if name.replace("-", "").startswith(letters)]
        if matches and len(letters) > 2:
            return f"; did you mean {matches[0]}?"
        return did_you_mean(flag, flags, cutoff=0.75)


class _Help(argparse.RawDescriptionHelpFormatter):
    """Help formatter whose usage line has only the required arguments. The list below it has all options."""

    def add_usage(self, usage: Any, actions: Any, groups: Any, prefix: str | None = None) -> None:
        groups = [group for group in groups if group.required]
        group_actions = [action for group in groups for action in group._group_actions]
        usage_actions = [
            action for action in actions if action.required or not action.option_strings or action in group_actions
        ]
        super().add_usage(usage, [argparse.Action(["options"], "options", nargs=0), *usage_actions], groups, prefix)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="nnxmoe",
        description=textwrap.fill(_DESCRIPTION + ", ".join(sorted(MODELS)) + ".", 100),
        epilog="example:\n  nnxmoe demo\n  nnxmoe generate demo 'Once upon a time'",
        formatter_class=_Help,
    )
    parser.add_argument("--version", action="version", version=f"nnxmoe {nnxmoe.__version__}")
    _add_import(parser, "imports")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND", prog="nnxmoe")
    for name, command in _COMMANDS.items():
        text = " ".join((command.run.__doc__ or "").split())
        epilog = f"example:\n  nnxmoe {command.EXAMPLE}"
        subparser = subparsers.add_parser(name, help=text, description=text, epilog=epilog, formatter_class=_Help)
        subparser.add_argument("--debug", action="store_true", help="show the traceback of an error")
        subparser.add_argument(
            "--no-compile-cache",
            dest="compile_cache",
            action="store_false",
            help="do not cache compiled programs on disk (environment variable: NNXMOE_COMPILE_CACHE=FOLDER or off)",
        )
        # The name differs from `imports` because argparse would overwrite an --import before the command with the
        # default of the subparser.
        _add_import(subparser, "command_imports")
        command.add_options(subparser)
        flags = [action for action in subparser._actions if action.option_strings]
        subparser.set_defaults(run=command.run, flags=flags, parser=subparser)
    return parser


def _add_import(parser: argparse.ArgumentParser, dest: str) -> None:
    text = "import a Python module or FILE.py that calls nnxmoe.models.register; may be repeated"
    parser.add_argument("--import", dest=dest, action="append", default=[], metavar="MODULE", help=text)


def _import_modules(names: Sequence[str]) -> None:
    """Import modules by file path or by name. The current folder is on the search path.

    Raises ValueError if an import fails.
    """
    for name in names:
        path = Path(name).expanduser().resolve() if name.endswith(".py") else None
        if path is not None and not path.is_file():
            raise ValueError(f"--import {name}: file not found")
        folder = os.getcwd() if path is None else str(path.parent)
        if folder not in sys.path:
            sys.path.insert(0, folder)  # stays on the path because the module may later import files from its folder
        try:
            module = importlib.import_module(name if path is None else path.stem)
        except Exception as error:  # a user's module may raise any exception
            raise ValueError(f"--import {name}: {type(error).__name__}: {error}") from error
        if path is not None and path != Path(module.__file__ or "").resolve():
            raise ValueError(
                f"--import {name}: another module is already named {path.stem} ({module.__file__}): rename the file"
            )
