"""Commands and recipes in the documents are ones that the programs accept: parsed, not run.

`python checks/command_lines.py` prints one line a finding, `path:line: what`, and exits 1.
"""

import contextlib
import importlib
import io
import re
import shlex
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import click
import yaml
from mindspeed_runtime.config import ConfigError, build_recipe, load_recipe

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = ("*.md", "docs/**/*.md", "examples/**/*.md", "packages/*/README.md")
GUIDES = "docs/guides/*.md"
_BLOCK = re.compile(
    r"^(?P<indent> *)```(?P<kind>\w+)(?: title=\"(?P<title>[^\"]+)\")?[^\n]*\n(?P<body>.*?)^(?P=indent)```",
    re.MULTILINE | re.DOTALL,
)
_LAUNCHERS = (("uv", "run"), ("torchrun",), ("env",), ("time",))  # what may stand before a program of ours
_SEPARATORS = frozenset("();<>|&")
_SMALLEST: dict[str, Any] = {"model": {"path": "model"}, "data": {"train": ["rows.jsonl"]}}


@dataclass(frozen=True, kw_only=True)
class Block:
    """A fenced block of a document."""

    path: str
    line: int  # of its first line of text
    kind: str
    title: str | None  # the file that it is to be
    body: str


@dataclass(frozen=True, kw_only=True)
class CommandLine:
    """A call of one of this project's programs."""

    origin: str  # path:line
    words: tuple[str, ...]


@cache
def programs() -> Mapping[str, click.Group]:
    """The console scripts of all packages, by name."""
    found: dict[str, click.Group] = {}
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        for name, target in tomllib.loads(path.read_text())["project"].get("scripts", {}).items():
            found[name] = importlib.import_module(target.partition(":")[0]).GROUP
    return found


def blocks(path: str, text: str) -> Iterator[Block]:
    """The fenced blocks of a document that say what they are."""
    for match in _BLOCK.finditer(text):
        line = text.count("\n", 0, match.start("body")) + 1
        yield Block(path=path, line=line, kind=match["kind"], title=match["title"], body=match["body"])


def command_lines(block: Block) -> Iterator[CommandLine]:
    """Calls of this project's programs in a bash block, whatever starts them."""
    number, pending, begun = block.line, "", block.line
    for line in block.body.splitlines():
        begun = begun if pending else number
        number += 1
        if line.endswith("\\"):
            pending += line[:-1] + " "
            continue
        text = pending + line
        mentioned = any(name in text for name in programs())  # other lines need not be shell: a here-document, say
        for words in _commands(text) if mentioned else ():
            ours = _ours(words)
            if ours is not None:
                yield CommandLine(origin=f"{block.path}:{begun}", words=ours)
        pending = ""


def fault(words: Sequence[str]) -> str | None:
    """Why the program would refuse these words, in a sentence; None when it would not."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            context = _parsed(programs()[words[0]], words[0], words[1:])
    except click.exceptions.Exit:  # --help, --version
        return None
    except click.NoSuchOption as error:
        return error.message
    except click.exceptions.NoArgsIsHelpError:
        return "a command is missing"
    except click.UsageError as error:
        return error.format_message()
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "recipe.yaml"
        recipe.write_text(yaml.safe_dump(_SMALLEST))
        try:
            load_recipe(recipe, context.params.get("overrides", ()))
        except ConfigError as error:
            return str(error)
    return None


def recipe_fault(text: str) -> str | None:
    """Why this YAML, a recipe or some of its keys, would be refused; None when it would not."""
    try:
        tree = yaml.safe_load(text)
        if not isinstance(tree, dict):
            return "not a mapping of a recipe's sections"
        build_recipe(_merged(_SMALLEST, tree))
    except (yaml.YAMLError, ConfigError) as error:
        return str(error)
    return None


def findings(path: str, text: str, *, recipes: bool) -> list[str]:
    """All findings in one document; with ``recipes`` its yaml blocks must be recipes, or keys of one."""
    found: list[str] = []
    for block in blocks(path, text):
        if block.kind == "bash":
            faults = ((line, fault(line.words)) for line in command_lines(block))
            found += [f"{line.origin}: {' '.join(line.words)}: {what}" for line, what in faults if what]
        elif block.kind == "yaml" and recipes and (what := recipe_fault(block.body)):
            found.append(f"{path}:{block.line}: {what}")
    return found


def documents(root: Path) -> list[Path]:
    """The documents whose commands are checked."""
    return sorted({path for pattern in DOCUMENTS for path in root.glob(pattern)})


def tree_findings(root: Path) -> list[str]:
    """All findings in the documents of a tree."""
    guides = set(root.glob(GUIDES))
    return [
        line
        for path in documents(root)
        for line in findings(str(path.relative_to(root)), path.read_text(), recipes=path in guides)
    ]


def _commands(line: str) -> Iterator[list[str]]:
    """The simple commands of a line of shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    words: list[str] = []
    for word in lexer:
        if set(word) <= _SEPARATORS:
            yield words
            words = []
        else:
            words.append(word)
    yield words


def _ours(words: list[str]) -> tuple[str, ...] | None:
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    names = [Path(word).name for word in words]
    at = next((i for i, name in enumerate(names) if name in programs()), None)
    if at is None or (at > 0 and not any(tuple(names[: len(start)]) == start for start in _LAUNCHERS)):
        return None
    return (names[at], *words[at + 1 :])


def _parsed(command: click.Command, name: str, words: Sequence[str], parent: click.Context | None = None) -> Any:
    """The context of the command at the end of ``words``, which are parsed and not acted on."""
    if not isinstance(command, click.Group):
        return command.make_context(name, list(words), parent=parent)
    context = click.Context(command, info_name=name, parent=parent)
    if not words:
        raise click.exceptions.NoArgsIsHelpError(context)
    # Not make_context: where it keeps what is left for the subcommand is private to click.
    given, rest, _ = command.make_parser(context).parse_args(list(words))
    if not rest:
        if given:
            raise click.exceptions.Exit
        raise click.exceptions.NoArgsIsHelpError(context)
    inner, found, rest = command.resolve_command(context, rest)
    assert inner is not None and found is not None
    return _parsed(found, inner, rest, context)


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    both = {
        key: _merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
        for key, value in over.items()
    }
    return {**base, **both}


def main() -> None:
    """Print all findings of this tree and exit 1 if there are any."""
    found = tree_findings(ROOT)
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
