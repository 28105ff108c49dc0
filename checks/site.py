"""Pages of the documentation that are made from the sources: mkdocs calls these hooks.

The recipe's keys come from its dataclasses and the comments beside their fields, options from the command lines
themselves, and the Python pages from docstrings. None of them is in git.
"""

import ast
import dataclasses
import importlib
import inspect
import io
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parent.parent
GENERATED = "Made from the sources when the documentation is built."


def on_files(files: Any, config: Any) -> Any:
    """Add the generated pages."""
    generated = importlib.import_module("mkdocs.structure.files").File.generated
    for name, text in pages().items():
        files.append(generated(config, f"reference/{name}.md", content=text))
    return files


def pages() -> dict[str, str]:
    """Markdown of every generated page, by name."""
    found = {"recipe": recipe_page(), "commands": commands_page()}
    for folder in sorted(ROOT.glob("packages/*/src/*")):
        if (folder / "__init__.py").is_file():
            found[folder.name] = package_page(folder)
    return found


def recipe_page() -> str:
    """Every key of a recipe: type, default, meaning."""
    from mindspeed_runtime import recipe

    lines = ["# Recipe", "", GENERATED, "", "Unknown keys are refused. *required* keys have no default.", ""]
    top = [item for item in dataclasses.fields(recipe.Recipe) if not _is_section(recipe, item)]
    lines += ["## The recipe itself", "", *_table(recipe.Recipe, top), ""]
    for item in dataclasses.fields(recipe.Recipe):
        if _is_section(recipe, item):
            section = getattr(recipe, _type_name(item))
            lines += [f"## {item.name}", "", inspect.cleandoc(section.__doc__ or ""), ""]
            lines += [*_table(section, dataclasses.fields(section)), ""]
    return "\n".join(lines)


def _is_section(module: Any, item: Any) -> bool:
    return dataclasses.is_dataclass(getattr(module, _type_name(item), None))


def _type_name(item: Any) -> str:
    return item.type if isinstance(item.type, str) else getattr(item.type, "__name__", "")


def _table(section: type, items: Any) -> list[str]:
    types, notes = _annotations(section), _comments(section)
    rows = ["| key | type | default | |", "|---|---|---|---|"]
    for item in items:
        kind = types[item.name].replace("|", "\\|")
        rows.append(f"| `{item.name}` | `{kind}` | {_default(item)} | {notes.get(item.name, '')} |")
    return rows


def _default(item: Any) -> str:
    if item.default is not dataclasses.MISSING:
        return f"`{item.default!r}`"
    if item.default_factory is not dataclasses.MISSING:
        return f"`{item.default_factory()!r}`"
    return "*required*"


def _annotations(section: type) -> dict[str, str]:
    body = ast.parse(inspect.cleandoc(inspect.getsource(section))).body[0]
    assert isinstance(body, ast.ClassDef)
    fields = [node for node in body.body if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)]
    return {node.target.id: ast.unparse(node.annotation) for node in fields if isinstance(node.target, ast.Name)}


def _comments(section: type) -> dict[str, str]:
    """The comment at the end of each field's line."""
    source = inspect.getsource(section)
    by_line = {
        token.start[0]: token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    names = {number: line.split(":")[0].strip() for number, line in enumerate(source.splitlines(), 1) if ":" in line}
    return {names[number]: comment for number, comment in by_line.items() if number in names}


def commands_page() -> str:
    """The help of every command, as it prints itself."""
    lines = ["# Commands", "", GENERATED, ""]
    for name, group in scripts().items():
        lines += [f"## {name}", ""]
        for path, command in walk(name, group):
            context = click.Context(command, info_name=path, terminal_width=100, max_content_width=100)
            lines += [*([f"### {path}", ""] if path != name else []), "```text", command.get_help(context), "```", ""]
    return "\n".join(lines)


def scripts() -> dict[str, click.Command]:
    """The console scripts of all packages."""
    found = {}
    for path in sorted(ROOT.glob("packages/*/pyproject.toml")):
        for name, target in tomllib.loads(path.read_text())["project"].get("scripts", {}).items():
            found[name] = importlib.import_module(target.split(":")[0]).GROUP
    return found


def walk(name: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """A command and everything below it, with what one types to reach it."""
    yield name, command
    if isinstance(command, click.Group):
        context = click.Context(command, info_name=name)
        for sub in command.list_commands(context):
            below = command.get_command(context, sub)
            if below is not None:
                yield from walk(f"{name} {sub}", below)


def package_page(folder: Path) -> str:
    """The public modules of a package."""
    lines = [f"# {folder.name}", "", GENERATED, ""]
    for path in sorted(folder.rglob("*.py")):
        parts = path.relative_to(folder.parent).with_suffix("").parts
        if any(part.startswith("_") and part != "__init__" for part in parts):
            continue
        name = ".".join(part for part in parts if part != "__init__")
        tree = ast.parse(path.read_text())
        if any(_is_public(node) for node in tree.body):
            lines += [f"## {name}", "", f"::: {name}", "    options:", "      show_root_heading: false", ""]
    return "\n".join(lines)


def _is_public(node: ast.stmt) -> bool:
    kinds = (ast.FunctionDef, ast.ClassDef, ast.AsyncFunctionDef)
    return isinstance(node, kinds) and not node.name.startswith("_") and ast.get_docstring(node) is not None
