"""What ruff and import-linter cannot see in the sources, each rule with the place that it protects.

`python checks/sources.py` prints one line a finding, `path:line: what and what to do instead`, and exits 1.
"""

import ast
import re
import subprocess
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent
SOURCES = "packages/*/src/**"
# The homes of device names: whoever else needs one asks mindspeed_kernels.device.
DEVICE_HOMES = (
    "packages/mindspeed-kernels/src/mindspeed_kernels/device.py",
    "packages/mindspeed-kernels/src/mindspeed_kernels/bundle.py",
    "packages/mindspeed-kernels/src/mindspeed_kernels/ops/*",
    "packages/mindspeed-kernels/src/mindspeed_kernels/npu/*",
    "packages/mindspeed-runtime/src/mindspeed_runtime/recipe.py",  # the words that a recipe may hold
    "packages/mindspeed-parallel/src/mindspeed_parallel/megatron/features/*",
)
DEVICE = re.compile(r"(cuda|npu)(:\d+)?")
ENVIRONMENT_HOMES = ("*/cli.py", "*/device.py", "*/launch.py")
TODO = re.compile(r"\b(TODO|FIXME|XXX)\b(?!.*(#\d+|\d{4}-\d{2}-\d{2}))")
MACHINE_PATH = re.compile(r"(?<![\w.])/(home|Users|root|work)/\w")
TEXTS = (".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".cpp", ".json", ".sh", "run")
MAX_FUNCTION_LINES = 60
MAX_MODULE_LINES = 450


def device_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Device literals and `.cuda()`, `.npu()` calls, which no import rule can see."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and DEVICE.fullmatch(node.value):
            yield node.lineno, f"names the device {node.value!r}; take it from mindspeed_kernels.device"
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in ("cuda", "npu"):
            yield node.lineno, f"calls .{node.func.attr}(); say .to(device.torch_device)"


def environment(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Environment variables read where nobody looks for them."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            yield node.lineno, "reads the environment; leave that to cli.py, device.py and launch.py"


def long_functions(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Functions that no longer fit a screen."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            length = node.end_lineno - node.lineno + 1
            if length > MAX_FUNCTION_LINES:
                yield node.lineno, f"{node.name}: {length} lines, the most is {MAX_FUNCTION_LINES}; name its parts"


def text_findings(text: str) -> Iterator[tuple[int, str]]:
    """Rules for every file: a TODO has a date or an issue, no path belongs to one machine."""
    for number, line in enumerate(text.splitlines(), 1):
        if TODO.search(line):
            yield number, "a TODO needs an issue (#12) or a date (2026-01-31)"
        if MACHINE_PATH.search(line):
            yield number, "names a path of one machine"


def doubled_keys(text: str) -> Iterator[tuple[int, str]]:
    """Keys that a YAML mapping holds twice: readers take the last and say nothing."""
    waiting = [yaml.compose(text)]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.SequenceNode):
            waiting += node.value
        if isinstance(node, yaml.MappingNode):
            seen: set[str] = set()
            for key, value in node.value:
                if key.value in seen:
                    yield key.start_mark.line + 1, f"has the key {key.value!r} twice; the first is lost"
                seen.add(key.value)
                waiting.append(value)


def findings(path: str, text: str) -> list[str]:
    """All findings in one file; `path` is relative to the root, with slashes."""
    found = [] if path.startswith("checks/") or path == "tests/test_checks.py" else list(text_findings(text))
    if path.endswith((".yaml", ".yml")):
        found += list(doubled_keys(text))
    if path.endswith(".py") and fnmatch(path, SOURCES):
        tree = ast.parse(text)
        found += list(long_functions(tree))
        if not any(fnmatch(path, home) for home in DEVICE_HOMES):
            found += list(device_names(tree))
        if not any(fnmatch(path, home) for home in ENVIRONMENT_HOMES):
            found += list(environment(tree))
        if (length := text.count("\n")) > MAX_MODULE_LINES:
            found.append((1, f"{length} lines, the most is {MAX_MODULE_LINES}; usually two ideas in one room"))
    return [f"{path}:{line}: {message}" for line, message in sorted(found)]


def tracked(root: Path) -> list[str]:
    """The text files that git tracks or would track."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    names = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    return [name for name in names if name.endswith(TEXTS) and (root / name).is_file()]


def main() -> None:
    """Print all findings of this tree and exit 1 if there are any."""
    found = [line for name in tracked(ROOT) for line in findings(name, (ROOT / name).read_text())]
    if found:
        raise SystemExit("\n".join(found))


if __name__ == "__main__":
    main()
