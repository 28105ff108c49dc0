"""The documents say what the programs accept, link to what is there, and leave no key of a recipe out."""

import dataclasses
import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import click
import pytest
from mindspeed_models.testing import save_tiny_chat
from mindspeed_models.weights.convert import to_megatron
from mindspeed_models.weights.source import open_source
from mindspeed_runtime.recipe import Recipe

from checks import command_lines, docs_reference

ROOT = command_lines.ROOT
SOURCE = (ROOT / docs_reference.RECIPE).read_text()


def bash(*lines):
    return "\n".join(["# A page", "", "```bash", *lines, "```", ""])


def test_every_command_and_recipe_in_the_documents_would_be_accepted():
    assert command_lines.tree_findings(ROOT) == []


def test_the_commands_of_readme_and_guides_are_among_those_checked():
    found = {
        line.origin.partition(":")[0]
        for path in command_lines.documents(ROOT)
        for block in command_lines.blocks(str(path.relative_to(ROOT)), path.read_text())
        if block.kind == "bash"
        for line in command_lines.command_lines(block)
    }
    assert {"README.md", "docs/index.md"} <= found
    guides = ("train", "data", "convert", "prove", "two-nodes")
    assert {f"docs/guides/{name}.md" for name in guides} <= found


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("mindspeed-train", "a command is missing"),
        ("mindspeed-train rum recipe.yaml", "No such command 'rum'"),
        ("mindspeed-train prove", "a command is missing"),
        ("mindspeed-train run", "Missing argument 'RECIPE'"),
        ("mindspeed-train run recipe.yaml --nprocs 2", "No such option '--nprocs'"),
        ("mindspeed-train run recipe.yaml --nproc two", "'two' is not a valid integer"),
        ("mindspeed-train run recipe.yaml --set optimizer.lrr=1", "no such key; did you mean lr?"),
        ("mindspeed-train run recipe.yaml --set optimizer.lr=fast", "should be a valid number"),
        ("mindspeed-train prove resume recipe.yaml", "Missing option '--steps'"),
        ("mindspeed-convert verify model --precision fp8", "'fp8' is not one of"),
        (".tools/bin/uv run mindspeed-train quickstat", "No such command 'quickstat'"),
        ("torchrun --nnodes 2 --no-python mindspeed-train run", "Missing argument 'RECIPE'"),
        ("OMP_NUM_THREADS=1 mindspeed-train run", "Missing argument 'RECIPE'"),
        ("cd clone && mindspeed-train run > log.txt", "Missing argument 'RECIPE'"),
    ],
)  # fmt: skip
def test_a_planted_wrong_command_is_found_with_its_line(line, said):
    (finding,) = command_lines.findings("docs/page.md", bash("ls", line), recipes=False)
    assert finding.startswith("docs/page.md:5: mindspeed-") and said in finding


def test_a_wrong_command_over_several_lines_is_found_where_it_begins():
    text = bash("mindspeed-train run recipe.yaml \\", "  --nproc 2 \\", "  --nonsense")
    (finding,) = command_lines.findings("page.md", text, recipes=False)
    assert finding.startswith("page.md:4: mindspeed-train run recipe.yaml --nproc 2 --nonsense: ")


@pytest.mark.parametrize(
    "line",
    [
        "mindspeed-train --version",
        "mindspeed-train run --help",
        "mindspeed-train --debug run recipe.yaml --nproc 2 --set training.steps=4 --set data.train=[a.jsonl,b.jsonl]",
        "pip install mindspeed-train",
        "echo don't",
        'nox -s "isolated(mindspeed-train)"',
    ],
)
def test_what_is_right_or_no_command_of_ours_is_left_alone(line):
    assert command_lines.findings("page.md", bash(line), recipes=False) == []


def test_a_command_that_is_checked_does_not_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert command_lines.fault(["mindspeed-train", "quickstart"]) is None
    assert list(tmp_path.iterdir()) == []


def test_a_wrong_key_in_a_recipe_of_a_guide_is_found_with_its_line():
    text = "# A page\n\n```yaml\nmodel: {path: m}\ndata: {train: [t], sequences: 4}\n```\n"
    (finding,) = command_lines.findings("docs/guides/page.md", text, recipes=True)
    assert finding == "docs/guides/page.md:4: data.sequences: no such key; did you mean sequence?"


def leaves(kind=Recipe, prefix=""):
    for item in dataclasses.fields(kind):
        inner = item.type if isinstance(item.type, type) and dataclasses.is_dataclass(item.type) else None
        yield from leaves(inner, f"{prefix}{item.name}.") if inner else [f"{prefix}{item.name}"]


def test_the_page_of_recipe_keys_has_each_key_once_with_a_meaning():
    page = docs_reference.recipe_page(SOURCE)
    rows = re.findall(r"^\| `([\w.]+)` \| .+ \| .+ \| (.+) \|$", page, re.MULTILINE)
    assert sorted(name for name, _ in rows) == sorted(leaves())
    assert "| `optimizer.clip` | number or null | `1.0` | largest global gradient norm; `null`: off |" in page
    assert "| `data.train` | list of texts | must be given |" in page


def test_a_key_that_nothing_says_the_meaning_of_is_an_error():
    with pytest.raises(docs_reference.PageError, match=r"TrainingConfig\.seed"):
        docs_reference.recipe_page(re.sub(r"(seed: int = 1234).*", r"\1", SOURCE))


def test_the_page_of_commands_has_every_option():
    page = docs_reference.command_page(command_lines.programs())
    for name in ("mindspeed-train prove resume", "mindspeed-convert to-hf"):
        assert f"### {name}\n" in page
    assert "| `--steps INTEGER` | must be given | Optimizer steps in all. |" in page
    assert "| `--precision [fp64|fp32|bf16]` | `fp64` |" in page


def test_an_option_without_help_is_an_error():
    bare = click.Command("run", params=[click.Option(["--fast"])])
    with pytest.raises(docs_reference.PageError, match="no help for --fast"):
        docs_reference.command_page({"tool": click.Group("tool", commands={"run": bare})})


@pytest.mark.parametrize("package", sorted(path.name for path in (ROOT / "packages").iterdir()))
def test_a_packages_page_names_modules_that_can_be_imported(package):
    modules = re.findall(r"^::: (\S+)$", docs_reference.package_page(ROOT, package), re.MULTILINE)
    assert all(name.startswith(package.replace("-", "_")) for name in modules)
    if package != "mindspeed-fsdp":
        importlib.import_module(modules[0])


def test_a_folder_in_the_nav_takes_in_what_is_not_named():
    nav = [{"Home": "index.md"}, {"Guides": ["guides/train.md", "guides/"]}]
    pages = ["guides/train.md", "guides/new.md", "guides/index.md", "guides/deep/other.md", "index.md"]
    expected = [{"Home": "index.md"}, {"Guides": ["guides/train.md", "guides/index.md", "guides/new.md"]}]
    assert docs_reference.expanded(nav, pages) == expected


def test_links_into_the_repository_lead_to_the_pages_that_show_it():
    known = docs_reference.homes(ROOT)
    text = "[a](../../CONTRIBUTING.md) [b](../../packages/mindspeed-train) [c](train.md#run-it) [d](https://x.org/y)"
    found = docs_reference.relinked(text, "docs/guides/prove.md", "guides/prove.md", known)
    assert (
        found == "[a](../contributing.md) [b](../packages/mindspeed-train.md) [c](train.md#run-it) [d](https://x.org/y)"
    )
    text = "[patch](../../docs/patches.md) [no](src/absent.py)\n```\n[code](../../CONTRIBUTING.md)\n```\n"
    found = docs_reference.relinked(text, "packages/a/README.md", "packages/a.md", known)
    assert found == "[patch](../patches.md) [no](src/absent.py)\n```\n[code](../../CONTRIBUTING.md)\n```\n"


def dead_links(path, text):
    pages = {ROOT / "docs" / page for page in docs_reference.generated_pages(ROOT, command_lines.programs())}
    prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
    for target in re.findall(r"(?<!!)\]\(([^)\s#:]+)(?:#[^)]*)?\)", prose):
        place = (path.parent / target).resolve()
        if not place.exists() and place not in pages:
            yield target


@pytest.mark.parametrize("path", command_lines.documents(ROOT), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_in_the_repository_leads_somewhere(path):
    assert list(dead_links(path, path.read_text())) == []


def test_a_dead_link_is_found():
    assert list(dead_links(ROOT / "docs" / "page.md", "[a](status.md) [b](absent.md) `[c](none.md)`")) == ["absent.md"]


GUIDES = ("train", "data", "convert", "prove", "two-nodes")  # each goes on from those before it


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory):
    """A folder as the quickstart leaves it, its model a tiny one."""
    folder = tmp_path_factory.mktemp("guides")
    save_tiny_chat("llama-6q3kv", folder / "quickstart" / "before")
    to_megatron(open_source(folder / "quickstart" / "before"), folder / "quickstart" / "smollm2")
    return folder


@pytest.mark.guides
@pytest.mark.dist
@pytest.mark.timeout(1800)
def test_the_guides_work_as_they_are_written(quickstart):
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": ""}
    shell = {
        "cwd": quickstart,
        "env": environment,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.STDOUT,
        "text": True,
    }
    for name in GUIDES:
        launchers = []
        for block in command_lines.blocks(name, (ROOT / "docs" / "guides" / f"{name}.md").read_text()):
            if block.title is not None:
                (quickstart / block.title).write_text(block.body)
            elif block.kind == "bash" and "10.0.0.1" not in block.body:  # not a machine of the reader's
                process = subprocess.Popen(["bash", "-ec", block.body], **shell)
                if "--node-rank" in block.body:
                    launchers.append((block, process))
                else:
                    finished(block, process)
        for block, process in launchers:
            finished(block, process)


def finished(block, process):
    output, _ = process.communicate(timeout=900)
    print(f"{block.path}:{block.line}\n{block.body}{output}")
    assert process.returncode == 0, f"{block.path}:{block.line}: {block.body}{output}"
