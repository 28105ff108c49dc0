"""What every command line of this project shares: exit codes, errors in a sentence, help that is quick.

Exit codes: 0 done, 1 a failure, 2 the user's mistake, 130 interrupted. A traceback is shown with --debug only.
"""

import importlib
import os
import sys
import traceback
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click
from mindspeed_kernels.errors import RunError, UserError


class LazyGroup(click.Group):
    """Subcommands that are imported when they are called for: ``name: (module:attribute, one line of help)``."""

    def __init__(self, *args: Any, lazy: Mapping[str, tuple[str, str]] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lazy = dict(lazy or {})

    def list_commands(self, ctx: click.Context) -> list[str]:
        """In the order of their definition."""
        return [*self.lazy, *super().list_commands(ctx)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command."""
        if cmd_name not in self.lazy:
            return super().get_command(ctx, cmd_name)
        module, _, attribute = self.lazy[cmd_name][0].partition(":")
        return getattr(importlib.import_module(module), attribute)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List commands without importing them."""
        rows = [(name, text) for name, (_, text) in self.lazy.items()]
        rows += [(name, command.get_short_help_str(80)) for name, command in self.commands.items()]
        with formatter.section("Commands"):
            formatter.write_dl(rows)


def command_group(name: str, package: str, text: str, lazy: Mapping[str, tuple[str, str]]) -> LazyGroup:
    """The group behind a console script, with --version and --debug."""
    group = LazyGroup(name=name, help=text, lazy=lazy, context_settings={"help_option_names": ["-h", "--help"]})
    group.params += [
        click.Option(
            ["--version"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_show(name, package),
            help="Show the version and leave.",
        ),
        click.Option(
            ["--debug"],
            is_flag=True,
            expose_value=False,
            is_eager=True,
            callback=_debug,
            help="Show tracebacks of errors.",
        ),
    ]
    return group


def run(group: click.Group, arguments: Sequence[str] | None = None) -> None:
    """Run the group as a program and leave with its exit code."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    sys.exit(_code(group, arguments, debug))


class NewFile(click.Path):
    """A file that a command writes at its end: refused at its start if it cannot be written."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, writable=True, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path, checked."""
        path = Path(os.fsdecode(super().convert(value, param, ctx)))
        if not path.parent.is_dir():
            self.fail(f"{path}: there is no folder {path.parent}", param, ctx)
        if not os.access(path.parent, os.W_OK):
            self.fail(f"{path}: the folder {path.parent} cannot be written to", param, ctx)
        return path


def _code(group: click.Group, arguments: list[str], debug: bool) -> int:
    try:
        result = group.main(args=arguments, prog_name=group.name, standalone_mode=False)
        sys.stdout.flush()
        return result if isinstance(result, int) else 0
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return 2
    except click.ClickException as error:
        error.show()
        return 2
    except (KeyboardInterrupt, click.Abort):
        print("interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or Python complains once more at its end
        return 1
    except UserError as error:
        _explain(error, debug)
        return 2
    except RunError as error:
        _explain(error, debug)
        return 1
    except Exception as error:
        if debug:
            traceback.print_exc()
        elif isinstance(error, OSError) and error.filename:
            print(f"error: {error.filename}: {error.strerror}\n(--debug shows where)", file=sys.stderr)
        else:
            print(f"error: unforeseen {type(error).__name__}: {error}\n(--debug shows where)", file=sys.stderr)
        return 1


def _explain(error: Exception, debug: bool) -> None:
    if debug:
        traceback.print_exception(error)
    print(f"error: {error}", file=sys.stderr)


def _show(name: str, package: str) -> Any:
    def callback(ctx: click.Context, _: click.Parameter, value: bool) -> None:
        if value and not ctx.resilient_parsing:
            click.echo(f"{name} {version(package)}")
            ctx.exit()

    return callback


def _debug(ctx: click.Context, _: click.Parameter, value: bool) -> None:
    """Read by ``run`` before parsing, so that it may stand anywhere."""
