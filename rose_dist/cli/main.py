"""The `rose` command. Subcommands load when they run, so that `rose --help` needs neither torch nor MPI."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn

import click

from rose_dist.errors import RoseError

COMMANDS = {
    "bench": "Measure prefill and decode.",
    "chat": "Talk with a model in the terminal.",
    "convert": "Make or translate a checkpoint.",
    "doctor": "Say what this machine has and what that allows.",
    "generate": "Continue prompts, without a server.",
    "harmony": "Render and parse the chat format of gpt-oss.",
    "kernels": "Compile every GPU kernel, with or without a GPU.",
    "launch": "Start a rose command on several MPI ranks.",
    "serve": "Serve a model behind an OpenAI-compatible API.",
}
"""Name to one line of help. Command `x` is `rose_dist.cli.x:command`."""


class LazyGroup(click.Group):
    """A group whose subcommands are imported when they are first needed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"rose_dist.cli.{cmd_name}").command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group("rose", cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="rose-dist", message="rose %(version)s")
def rose() -> None:
    """Serve mixture-of-experts models from one GPU, many nodes or CPU ranks."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run `rose` and exit: 0 when all went well, 1 on a failure, 2 on wrong usage, 130 on Ctrl-C."""
    try:
        code = rose.main(args=arguments, prog_name="rose", standalone_mode=False)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "rose"
        _fail(f"{error.format_message().rstrip('.')}; see `{path} --help`", 2)
    except click.Abort:
        _fail("interrupted", 130)
    except click.ClickException as error:
        _fail(error.format_message(), 1)
    except BrokenPipeError:  # the reader of our output has gone, as in `rose doctor | head -1`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    except (RoseError, OSError) as error:
        _fail(str(error), 1)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    click.echo(f"error: {' '.join(message.split())}", err=True)
    sys.exit(code)
