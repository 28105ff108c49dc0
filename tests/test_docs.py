"""What the documentation tells a reader to type is a command, and what it generates says what the sources say."""

import re
import shlex

import click
import pytest

from checks.site import ROOT, pages, recipe_page, scripts, walk

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "packages").glob("*/README.md"))]
BLOCK = re.compile(r"```bash\n(.*?)```", re.DOTALL)


def typed(text):
    """Our own commands in the bash blocks of a page, as lists of words."""
    for block in BLOCK.findall(text):
        for line in block.replace("\\\n", " ").splitlines():
            words = shlex.split(line, comments=True)
            for start, word in enumerate(words):
                if word in ("mindspeed-train", "mindspeed-convert"):
                    yield words[start:]
                    break


def check(words):
    """Parse a command line without running it; click.UsageError when it is none."""
    known = scripts()
    if words[0] not in known:
        raise click.UsageError(f"no such program: {words[0]}")
    command, name, parent, words = known[words[0]], words[0], None, words[1:]
    while isinstance(command, click.Group):
        start = next((n for n, word in enumerate(words) if not word.startswith("-")), len(words))
        parent = click.Context(command, info_name=name, parent=parent)
        if start == len(words):
            raise click.UsageError(f"{name}: no command")
        name, command, words = command.resolve_command(parent, words[start:])
    command.make_context(name, list(words), parent=parent)


FOUND = [(path.relative_to(ROOT), words) for path in PAGES for words in typed(path.read_text())]


def test_there_are_commands_to_check():
    assert len(FOUND) >= 12


@pytest.mark.parametrize(("path", "words"), FOUND, ids=lambda value: str(value)[-60:])
def test_every_command_in_the_documentation_is_one(path, words):
    check(words)


@pytest.mark.parametrize(
    "line",
    [
        "mindspeed-train run",
        "mindspeed-train run recipe.yaml --nprocs 2",
        "mindspeed-train prove layouts recipe.yaml",
        "mindspeed-convert to-hf checkpoint",
        "mindspeed-convert inspect a b",
        "mindspeed-traini run recipe.yaml",
    ],
)
def test_a_wrong_command_is_seen(line):
    with pytest.raises(click.UsageError):
        check(shlex.split(line))


def test_every_key_of_the_recipe_is_on_its_page():
    page = recipe_page()
    assert "| `global_batch` | `int` | `8` | rows an optimizer step |" in page
    assert (
        "| `path` | `str` | *required* | Hugging Face folder, GGUF file, or checkpoint folder of this project |" in page
    )
    assert page.count("\n## ") == 13


def test_every_package_and_command_has_a_place():
    found = pages()
    assert {path.name for path in ROOT.glob("packages/*/src/*")} <= set(found)
    names = [name for script, group in scripts().items() for name, _ in walk(script, group)]
    assert {"mindspeed-train prove resume", "mindspeed-convert verify"} <= set(names)
    assert all(f"{name}\n" in found["commands"] for name in names)
