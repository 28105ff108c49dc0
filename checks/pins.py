"""Exact versions of everything the workspace resolves to, kept in one place.

The list `constraint-dependencies` of the root pyproject.toml is the source: uv obeys it in the workspace, and
constraints.txt is the same list for pip and for wheels outside it. uv.lock is not in git, since it records the
address of the index that was asked.

`python checks/pins.py` says what is stale and exits 1; `--refresh` resolves anew and rewrites both.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BLOCK = re.compile(r"(?<=\nconstraint-dependencies = \[\n)(?:  .*\n)*(?=\])")
HEADER = "# Written by `nox -s pins` from constraint-dependencies in pyproject.toml; change neither by hand.\n"


def pinned(root: Path) -> list[str]:
    """The pins that the root pyproject.toml holds, in its order."""
    return tomllib.loads((root / "pyproject.toml").read_text())["tool"]["uv"]["constraint-dependencies"]


def resolved(root: Path, uv: str, *, upgrade: bool = False) -> list[str]:
    """Every distribution that uv resolves the workspace to, all extras and groups included."""
    if upgrade:
        subprocess.run([uv, "lock", "--quiet", "--upgrade"], cwd=root, check=True)
    command = [uv, "export", "--quiet", "--no-hashes", "--no-header", "--no-annotate", "--no-emit-workspace"]
    command += ["--all-packages", "--all-groups", "--all-extras"]
    lines = subprocess.run(command, cwd=root, check=True, capture_output=True, text=True).stdout.splitlines()
    return merged([line for line in lines if line and "'never'" not in line])


def merged(lines: list[str]) -> list[str]:
    """Pins without their markers, which matter only where one distribution has two versions."""
    names = [line.split(" ;")[0] for line in lines]
    versions = {name.split("==")[0]: {n for n in names if n.split("==")[0] == name.split("==")[0]} for name in names}
    return [n if len(versions[n.split("==")[0]]) == 1 else line for n, line in zip(names, lines, strict=True)]


def constraints(pins: list[str]) -> str:
    """The text of constraints.txt for these pins."""
    return HEADER + "".join(f"{pin}\n" for pin in pins)


def write(root: Path, pins: list[str]) -> None:
    """Put the pins in pyproject.toml and, unless there are none, in constraints.txt."""
    project = root / "pyproject.toml"
    text, count = BLOCK.subn(lambda _: "".join(f'  "{pin}",\n' for pin in pins), project.read_text())
    if count != 1:
        raise SystemExit(f"{project}: no constraint-dependencies list of one pin a line")
    project.write_text(text)
    if pins:
        (root / "constraints.txt").write_text(constraints(pins))


def refresh(root: Path, uv: str) -> None:
    """Resolve without the old pins and write what comes out; a failed resolution leaves all as it was."""
    before = pinned(root)
    write(root, [])
    try:
        after = resolved(root, uv, upgrade=True)
    except subprocess.CalledProcessError:
        write(root, before)
        raise
    write(root, after)
    print("\n".join(f"- {pin}" for pin in before if pin not in after))
    print("\n".join(f"+ {pin}" for pin in after if pin not in before))


def stale(root: Path, uv: str) -> list[str]:
    """What is wrong with the pins, a sentence each."""
    pins = pinned(root)
    found = []
    written = root / "constraints.txt"
    if not written.exists() or written.read_text() != constraints(pins):
        found.append("constraints.txt differs from constraint-dependencies in pyproject.toml")
    found += [f"{line}: resolved but not pinned" for line in resolved(root, uv) if line not in pins]
    return found


def main() -> None:
    """Check, or with --refresh rewrite, the pins of this workspace. The last argument is the uv to call."""
    uv = next((word for word in sys.argv[1:] if not word.startswith("--")), "uv")
    if "--refresh" in sys.argv:
        refresh(ROOT, uv)
        return
    found = stale(ROOT, uv)
    if found:
        raise SystemExit("\n".join([*found, "`nox -s pins` resolves anew and writes both"]))


if __name__ == "__main__":
    main()
