"""Every check of this repository, one session each. `nox` alone runs what a change must pass; `nox -l` lists all.

The sessions share the workspace's own environment, which uv brings up to date first (a second when nothing changed);
only `isolated`, `docs` and `npu` build others.
"""

import os
import shutil
import tomllib
from itertools import chain
from pathlib import Path
from typing import Any

import nox
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parent
# Bytecode must be cached: without it each of the many processes that the tests start compiles torch's imports anew.
ENVIRONMENT: dict[str, str] = {
    "PYTHONDONTWRITEBYTECODE": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",
}
PROJECTS: dict[str, dict[str, Any]] = {
    path.parent.name: tomllib.loads(path.read_text()) for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
}

# Two files at a time, since much of a test is waiting for processes to start; the longest files first.
TESTS = ["-n", "2", "--dist", "loadfile", "--no-loadscope-reorder", "packages/mindspeed-train", "tests"]
TESTS += [f"packages/{name}" for name in reversed(PROJECTS) if name != "mindspeed-train"]

nox.options.default_venv_backend = "none"
nox.options.sessions = ["lint", "types", "ranges", "patches", "tests"]
nox.options.error_on_missing_interpreters = True


def find_uv() -> str:
    """The uv beside this nox, else the one on PATH."""
    try:
        from uv import find_uv_bin
    except ImportError:
        found = shutil.which("uv")
        if found is None:
            raise SystemExit("uv is not installed: `pip install uv`") from None
        return found
    return os.fsdecode(find_uv_bin())


UV = find_uv()


def run(session: nox.Session, *command: str) -> None:
    """Run a command in the workspace's environment."""
    session.run(UV, "run", "--no-sync", *command, external=True, env={**ENVIRONMENT, "VIRTUAL_ENV": None})


def sync(session: nox.Session) -> None:
    """Bring the workspace's environment up to date."""
    session.run(UV, "sync", "--quiet", "--all-packages", external=True, env={"VIRTUAL_ENV": None}, silent=True)


@nox.session
def lint(session: nox.Session) -> None:
    """Style, spelling, import contracts, rules of the sources, current pins."""
    sync(session)
    run(session, "ruff", "check", ".")
    run(session, "ruff", "format", "--check", ".")
    run(session, "codespell")
    run(session, "lint-imports")
    run(session, "python", "checks/sources.py")
    run(session, "python", "checks/pins.py", UV)


@nox.session
def types(session: nox.Session) -> None:
    """basedpyright over the sources; the strict list in pyproject.toml only grows."""
    sync(session)
    run(session, "basedpyright", "--level", "error", *session.posargs)


@nox.session
def ranges(session: nox.Session) -> None:
    """Each range that a package declares for a sibling admits the sibling in this tree, which uv does not check."""
    bad = [
        f"{name} wants {requirement}, the tree has {PROJECTS[sibling]['project']['version']}"
        for name, project in PROJECTS.items()
        for sibling, requirement in siblings(project)
        if not requirement.specifier.contains(PROJECTS[sibling]["project"]["version"], prereleases=True)
        or not {">=", "<"} <= {part.operator for part in requirement.specifier}
    ]
    if bad:
        session.error("\n".join(bad))


def siblings(project: dict[str, Any]) -> list[tuple[str, Requirement]]:
    """The workspace packages that a project declares, its extras' included."""
    meta = project["project"]
    lists = [meta.get("dependencies", []), *meta.get("optional-dependencies", {}).values()]
    found = [Requirement(line) for line in chain(*lists)]
    return [(canonicalize_name(r.name), r) for r in found if canonicalize_name(r.name) in PROJECTS]


@nox.session
def tests(session: nox.Session) -> None:
    """All tests of all packages and across them, but for the simulated Ascend and the commands of the guides."""
    sync(session)
    run(session, "pytest", "-m", "not npu and not guides", *(session.posargs or TESTS))


@nox.session
def quick(session: nox.Session) -> None:
    """The tests that need neither a real model nor long: under four minutes."""
    sync(session)
    run(session, "pytest", "-m", "not npu and not guides and not slow", *(session.posargs or TESTS))


@nox.session
def patches(session: nox.Session) -> None:
    """Every patch fits the installed megatron-core, and docs/patches.md shows them as they are."""
    sync(session)
    run(
        session,
        "python",
        "-W",
        "ignore",
        "-m",
        "mindspeed_parallel.megatron.features.ledger",
        "docs/patches.md",
        "--check",
    )


@nox.session(venv_backend="uv", python="3.11")
def docs(session: nox.Session) -> None:
    """Build the documentation into site/ and run the guides' commands; a broken link or command fails it."""
    here = {"UV_PROJECT_ENVIRONMENT": session.virtualenv.location, "VIRTUAL_ENV": None}
    session.run(
        UV, "sync", "--quiet", "--all-packages", "--no-default-groups", "--group", "docs", external=True, env=here
    )
    # mkdocs-material is mended until 2027-05-05 and says so at every build; Zensical, its successor, reads mkdocs.yml.
    quiet = {"NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT)}
    session.run("python", "checks/command_lines.py")
    session.run("python", "checks/docs_control.py", env=quiet)
    session.run("python", "-m", "mkdocs", "build", "--strict", *session.posargs, env=quiet)
    sync(session)
    run(session, "pytest", "-m", "guides", "tests/test_docs.py")


@nox.session(venv_backend="uv", python="3.11")
@nox.parametrize("package", sorted(PROJECTS))
def isolated(session: nox.Session, package: str) -> None:
    """One package's tests against the wheels of it and what it declares, alone in a fresh environment."""
    wheels = Path(session.create_tmp()) / package
    shutil.rmtree(wheels, ignore_errors=True)
    names = closure(package)
    for name in names:
        session.run(UV, "build", "-q", "--wheel", "--no-sources", "--package", name, "-o", str(wheels), external=True)
    extras = PROJECTS[package].get("tool", {}).get("mindspeed", {}).get("test-extras", [])
    found = {name: next(wheels.glob(f"{name.replace('-', '_')}-*.whl")) for name in names}
    wanted = [
        f"{path}[{','.join(extras)}]" if name == package and extras else str(path) for name, path in found.items()
    ]
    groups = PROJECTS[package].get("dependency-groups", {}).get("test", [])
    overrides = Path(session.create_tmp()) / "overrides.txt"
    overrides.write_text("llm ; sys_platform == 'never'\nllama-cpp-python ; sys_platform == 'never'\n")
    constraints = ("-c", str(ROOT / "constraints.txt"), "--overrides", str(overrides))
    session.install(*wanted, "pytest", "pytest-timeout", *groups, *constraints)
    tests = f"packages/{package}/tests"
    session.run("pytest", "-q", "-m", "not slow", "-c", "pyproject.toml", tests, *session.posargs, env=ENVIRONMENT)


def closure(package: str) -> list[str]:
    """The package and every workspace package that it needs, the extras of its tests included."""
    found: list[str] = []
    waiting = [package]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.append(name)
            waiting += [sibling for sibling, _ in siblings(PROJECTS[name])]
    return found


@nox.session
def npu(session: nox.Session) -> None:
    """The NPU path over a simulated Ascend: the genuine torch_npu and a CANN of our own. Needs g++, or CXX."""
    folder = ROOT / ".nox" / "ascend"
    environment = {"UV_PROJECT_ENVIRONMENT": str(folder), "VIRTUAL_ENV": None}
    session.run(UV, "sync", "--quiet", "--all-packages", "--extra", "npu", external=True, env=environment, silent=True)
    python = str(folder / "bin" / "python")
    ascend = {
        **ENVIRONMENT,
        "PYTHONPATH": str(ROOT / "tests" / "ascend" / "simulator"),
        "FAKE_CANN_BUILD": str(ROOT / ".nox" / "fake-cann"),
        # `import torch` would import torch_npu in every process; ours do it where a device is asked for.
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        # Kernels of the simulator run at once, so what HCCL is asked for must not wait in a queue.
        "TASK_QUEUE_ENABLE": "0",
    }
    session.run(python, "-m", "fake_cann.build", ascend["FAKE_CANN_BUILD"], external=True, env=ascend)
    session.run(python, "-m", "pytest", *(session.posargs or ["tests/ascend"]), external=True, env=ascend)


@nox.session
def bench(session: nox.Session) -> None:
    """Speed against a peer in the same run, as ratios; `nox -s bench -- CASE... [--pairs N]`. Leave the machine alone."""
    sync(session)
    run(session, "python", "-W", "ignore", "-m", "benchmarks", *session.posargs)


@nox.session
def proofs(session: nox.Session) -> None:
    """The long sweeps: layouts and resume of a real model, resume through ten kills, the quickstart."""
    sync(session)
    run(session, "pytest", "-m", "slow", *(session.posargs or ["tests", "packages"]))


@nox.session
def pins(session: nox.Session) -> None:
    """Resolve all dependencies anew and write the exact versions into pyproject.toml and constraints.txt."""
    run(session, "python", "checks/pins.py", "--refresh", UV)
    sync(session)
