"""The pages of the documentation site that are made of the sources: recipe keys, command lines, modules, examples.

Everything here is text in, text out; docs_site.py hands it to mkdocs.
"""

import ast
import inspect
import io
import posixpath
import re
import tokenize
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
RECIPE = "packages/mindspeed-runtime/src/mindspeed_runtime/recipe.py"
_LINK = re.compile(r"(?<!!)\[(?P<text>[^\]]*)\]\((?P<target>[^)\s#:]+)(?P<anchor>#[^)\s]*)?\)")
_WORDS = {"str": "text", "int": "whole number", "float": "number", "bool": "true or false", "None": "null"}


class PageError(Exception):
    """A page that cannot be made of what the sources say."""


@dataclass(frozen=True, kw_only=True)
class Key:
    """One key of the recipe as its dataclass defines it."""

    name: str
    annotation: str
    default: str | None  # as in YAML; None: the key must be given
    meaning: str


@dataclass(frozen=True, kw_only=True)
class Section:
    """One dataclass of the recipe."""

    name: str
    meaning: str
    keys: tuple[Key, ...]


# Recipe keys


def recipe_sections(source: str) -> dict[str, Section]:
    """The dataclasses in the source of recipe.py, by name. A field's comment is its meaning."""
    comments = dict(_comments(source))
    found = {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.ClassDef) and any(isinstance(item, ast.AnnAssign) for item in node.body):
            keys = tuple(_key(item, comments) for item in node.body if _is_key(item))
            if keys:
                found[node.name] = Section(name=node.name, meaning=_unwrapped(ast.get_docstring(node) or ""), keys=keys)
    return found


def recipe_page(source: str) -> str:
    """Every key of the recipe: type, default, meaning."""
    sections = recipe_sections(source)
    recipe = sections["Recipe"]
    bare = [f"{section.name}.{key.name}" for section in sections.values() for key in section.keys if not key.meaning]
    bare = [
        name for name in bare if name not in {f"Recipe.{key.name}" for key in recipe.keys if key.annotation in sections}
    ]
    if bare:
        raise PageError(f"{RECIPE}: no comment says what {', '.join(bare)} means")
    top = [key for key in recipe.keys if key.annotation not in sections]
    lines = [
        "# Recipe keys",
        "",
        "Every key that a recipe may hold. `mindspeed-train run RECIPE --print-config` shows each with the value that a run",
        "would have and where that value comes from. A key that is not here is an error. A value that a run cannot honour",
        "yet is an error too: [Status](../status.md) lists what runs.",
        "",
        "## At the top",
        "",
        *_key_table(top, ""),
    ]
    for key in recipe.keys:
        section = sections.get(key.annotation)
        if section is not None:
            lines += ["", f"## {key.name}", "", section.meaning, "", *_key_table(section.keys, f"{key.name}.")]
    return "\n".join(lines) + "\n"


def _key_table(keys: Sequence[Key], prefix: str) -> Iterator[str]:
    yield "| key | type | default | meaning |"
    yield "|---|---|---|---|"
    for key in keys:
        default = "must be given" if key.default is None else f"`{key.default}`"
        yield f"| `{prefix}{key.name}` | {_type(key.annotation)} | {default} | {_yaml_words(key.meaning)} |"


def _yaml_words(meaning: str) -> str:
    """A meaning in the words of who writes a recipe, not of who reads the source."""
    return _cell(re.sub(r"\bNone:", "`null`:", meaning))


def _comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments that end a line of code, by line."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT and token.line[: token.start[1]].strip():
            yield token.start[0], token.string.lstrip("# ").strip()


def _is_key(item: ast.stmt) -> bool:
    return isinstance(item, ast.AnnAssign) and not ast.unparse(item.annotation).startswith("ClassVar")


def _key(item: ast.stmt, comments: Mapping[int, str]) -> Key:
    assert isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name) and item.end_lineno is not None
    return Key(
        name=item.target.id,
        annotation=ast.unparse(item.annotation),
        default=None if item.value is None else _default(item.value),
        meaning=comments.get(item.end_lineno, ""),
    )


def _default(value: ast.expr) -> str:
    if isinstance(value, ast.Call):  # field(default_factory=...)
        return "{}"
    literal = ast.literal_eval(value)
    if literal is None or isinstance(literal, bool):
        return {None: "null", True: "true", False: "false"}[literal]
    return f"[{', '.join(map(str, literal))}]" if isinstance(literal, tuple) else f"{literal}"


def _type(annotation: str) -> str:
    parts = [part.strip() for part in re.split(r"\|(?![^\[]*\])", annotation)]
    return " or ".join(_one_type(part) for part in parts)


def _one_type(part: str) -> str:
    name, _, inner = part.partition("[")
    inner = inner.removesuffix("]")
    if name == "Literal":
        return ", ".join(f"`{value}`" for value in ast.literal_eval(f"({inner},)"))
    if name == "tuple":
        return f"list of {_one_type(inner.split(',')[0])}".replace("number", "numbers").replace("text", "texts")
    if name == "dict":
        return "mapping"
    return _WORDS.get(name, f"`{part}`")


# Command lines


def command_page(groups: Mapping[str, click.Group]) -> str:
    """Every console script, its commands and their options."""
    lines = [
        "# Command lines",
        "",
        "Exit codes of all: 0 done, 1 a failure, 2 a mistake of the user's, which is told in a sentence, 130 interrupted.",
        "`--debug` anywhere shows the traceback of an error.",
    ]
    for name, group in groups.items():
        lines += ["", f"## {name}", "", _unwrapped(group.help or ""), ""]
        lines += ["| command | does |", "|---|---|"]
        commands = list(_commands(group, name))
        lines += [
            f"| [`{path}`](#{_anchor(path)}) | {_cell(command.get_short_help_str(200))} |" for path, command in commands
        ]
        for path, command in commands:
            lines += ["", *_command(path, command)]
    return "\n".join(lines) + "\n"


def _commands(group: click.Group, path: str) -> Iterator[tuple[str, click.Command]]:
    context = click.Context(group, info_name=path)
    for name in group.list_commands(context):
        command = group.get_command(context, name)
        assert command is not None
        if isinstance(command, click.Group):
            yield from _commands(command, f"{path} {name}")
        elif not command.hidden:
            yield f"{path} {name}", command


def _command(path: str, command: click.Command) -> Iterator[str]:
    context = click.Context(command, info_name=path)
    usage = " ".join([path, *command.collect_usage_pieces(context)])
    yield from (f"### {path}", "", "```text", usage, "```", "", inspect.cleandoc(command.help or ""))
    options = [item for item in command.get_params(context) if isinstance(item, click.Option) and not item.hidden]
    options = [item for item in options if "--help" not in item.opts]
    if bare := [item.opts[0] for item in options if not item.help]:
        raise PageError(f"{path}: no help for {', '.join(bare)}")
    if options:
        yield from ("", "| option | default | meaning |", "|---|---|---|")
    for item in options:
        value = "" if item.is_flag else f" {item.make_metavar(context).removesuffix(' RANGE')}"
        yield f"| `{', '.join(item.opts)}{value}` | {_option_default(item)} | {_cell(item.help or '')} |"


def _option_default(item: click.Option) -> str:
    if item.required:
        return "must be given"
    shown = not item.is_flag and not item.multiple and isinstance(item.default, str | int | float | Path)
    return f"`{item.default}`" if shown else ""


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w-]+", "-", heading.lower())


# Modules


def package_page(root: Path, package: str) -> str:
    """One package: its README, then every public module, for mkdocstrings to fill."""
    folder = root / "packages" / package
    source = folder / "src"
    modules = [_module(path.relative_to(source)) for path in sorted(source.rglob("*.py")) if _says_something(path)]
    readme = (folder / "README.md").read_text().rstrip()
    parts = [readme, "", "## Modules", ""]
    for module in modules:
        inside = module.removeprefix(package.replace("-", "_")).lstrip(".") or module
        parts += [f"::: {module}", "    options:", f"      toc_label: {inside}", ""]
    return "\n".join(parts)


def _module(path: Path) -> str:
    return ".".join(path.with_suffix("").parts).removesuffix(".__init__")


def _says_something(path: Path) -> bool:
    """Whether a module defines or exports anything."""
    if path.name.startswith("_") and path.name != "__init__.py":
        return False
    body = ast.parse(path.read_text()).body
    return any(not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)) for node in body)


# Examples, decisions


def examples_page(root: Path) -> str:
    """Every example recipe, whole."""
    lines = ["# Example recipes", ""]
    for path in sorted((root / "examples").rglob("*.yaml")):
        lines += [f"## {path.name}", "", f"`{path.relative_to(root)}`", "", "```yaml", path.read_text().rstrip()]
        lines += ["```", ""]
    return "\n".join(lines)


def decisions_page(root: Path) -> str:
    """The list of decisions."""
    lines = [
        "# Decisions",
        "",
        "What was chosen, why, and what was given up. None is changed; a later one may replace it.",
        "",
    ]
    for path in sorted((root / "docs" / "decisions").glob("*.md")):
        title = path.read_text().partition("\n")[0].removeprefix("# ")
        lines.append(f"- [{title}]({path.name})")
    return "\n".join(lines) + "\n"


# Pages and links


def generated_pages(root: Path, groups: Mapping[str, click.Group]) -> dict[str, tuple[str, str]]:
    """Path in the site: the path in the repository that its links are relative to, and the page's text."""
    found = {
        "contributing.md": ("CONTRIBUTING.md", (root / "CONTRIBUTING.md").read_text()),
        "decisions/index.md": ("docs/decisions/index.md", decisions_page(root)),
        "reference/recipe.md": ("docs/reference/recipe.md", recipe_page((root / RECIPE).read_text())),
        "reference/commands.md": ("docs/reference/commands.md", command_page(groups)),
        "reference/examples.md": ("docs/reference/examples.md", examples_page(root)),
    }
    for folder in sorted((root / "packages").iterdir()):
        if (folder / "pyproject.toml").is_file():
            readme = f"packages/{folder.name}/README.md"
            found[f"packages/{folder.name}.md"] = (readme, package_page(root, folder.name))
    return found


def homes(root: Path) -> dict[str, str]:
    """Where in the site a file or folder of the repository is shown, for those outside docs/."""
    found = {
        "README.md": "index.md",
        "CONTRIBUTING.md": "contributing.md",
        "docs/decisions": "decisions/index.md",
        "examples": "reference/examples.md",
        RECIPE: "reference/recipe.md",
    }
    for path in (root / "examples").rglob("*.yaml"):
        found[str(path.relative_to(root))] = "reference/examples.md"
    for path in (root / "packages").iterdir():
        for name in (path, path / "README.md"):
            found[str(name.relative_to(root))] = f"packages/{path.name}.md"
    return found


def relinked(text: str, source: str, page: str, known: Mapping[str, str]) -> str:
    """``text`` of ``source`` in the repository with its links as ``page`` of the site needs them.

    Links to what the site does not show stay as they are, for mkdocs to complain of.
    """

    def replaced(match: re.Match[str]) -> str:
        place = posixpath.normpath(posixpath.join(posixpath.dirname(source), match["target"]))
        shown = known.get(place) or (place.removeprefix("docs/") if place.startswith("docs/") else None)
        if shown is None:
            return match[0]
        target = posixpath.relpath(shown, posixpath.dirname(page) or ".")
        return f"[{match['text']}]({target}{match['anchor'] or ''})"

    parts = re.split(r"(^ *```.*?^ *```)", text, flags=re.MULTILINE | re.DOTALL)
    return "".join(part if number % 2 else _LINK.sub(replaced, part) for number, part in enumerate(parts))


def expanded(nav: Any, pages: Sequence[str]) -> Any:
    """The nav with each entry that ends in a slash replaced by the pages of that folder that it does not name."""
    named = set(_named(nav))

    def walk(node: Any) -> Any:
        if isinstance(node, dict):
            return {title: walk(inner) for title, inner in node.items()}
        if not isinstance(node, list):
            return node
        found: list[Any] = []
        for item in node:
            if isinstance(item, str) and item.endswith("/"):
                here = [page for page in pages if str(PurePosixPath(page).parent) == item[:-1] and page not in named]
                found += sorted(here, key=lambda page: (not page.endswith("/index.md"), page))
            else:
                found.append(walk(item))
        return found

    return walk(nav)


def _named(nav: Any) -> Iterator[str]:
    if isinstance(nav, str):
        yield nav
    for inner in nav.values() if isinstance(nav, dict) else nav if isinstance(nav, list) else ():
        yield from _named(inner)


def _unwrapped(text: str) -> str:
    return "\n\n".join(" ".join(part.split()) for part in inspect.cleandoc(text).split("\n\n"))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")
