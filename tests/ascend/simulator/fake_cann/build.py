"""Compiles the libraries: ``python -m fake_cann.build FOLDER``. Nothing is done when they are there for these sources."""

import hashlib
import importlib.util
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path

SOURCES = Path(__file__).resolve().parent
FLAGS = ("-std=c++20", "-shared", "-fPIC", "-O1", "-Wall")
EMPTY = ("libge_runner.so", "libgraph.so", "libacl_tdt_channel.so")  # linked by torch_npu, and not called here
OURS = (
    "acl",
    "aclop",
    "aclmdl",
    "aclrt",
    "aclGet",
    "aclSet",
    "Hccl",
    "Msprof",
    "rtDev",
    "rtFunction",
    "rtGet",
    "rtKernel",
)


def build(folder: Path) -> None:
    """Write every library below ``folder``."""
    stamp = folder / "stamp"
    if stamp.is_file() and stamp.read_text() == _digest():
        return
    folder.mkdir(parents=True, exist_ok=True)
    stamp.unlink(missing_ok=True)
    npu, torch = _root("torch_npu"), _root("torch")
    headers = ("-isystem", f"{npu}/include")
    aten = (
        *("-isystem", f"{torch}/include", "-isystem", f"{torch}/include/torch/csrc/api/include"),
        *(f"-L{torch}/lib", "-ltorch_cpu", "-lc10"),
    )
    with ThreadPoolExecutor(os.cpu_count()) as threads:
        slow = [
            threads.submit(_compile, folder / "libopapi.so", SOURCES / "opapi.cpp", *headers, *aten),
            threads.submit(_compile, folder / "kernels.so", SOURCES / "kernels.cpp", *headers, *aten),
        ]
        _compile(folder / "libhccl.so", SOURCES / "hccl.cpp", *headers)
        _compile(folder / "libascendcl.so", SOURCES / "acl.cpp", *headers)
        _refuse_the_rest(folder, npu)
        nothing = folder / "nothing.cpp"
        nothing.write_text("")
        for name in EMPTY:
            _compile(folder / name, nothing)
        # torch_npu looks in this library for functions that are in the other.
        _compile(folder / "libacl_op_compiler.so", nothing, "-Wl,--no-as-needed", f"-L{folder}", "-lascendcl")
        for job in slow:
            job.result()
    stamp.write_text(_digest())


def _refuse_the_rest(folder: Path, npu: Path) -> None:
    """Add to libascendcl.so, for each symbol that the wheel links and nobody defines, a function that refuses."""
    wanted = set().union(*(_symbols(path, "U") for path in [*npu.glob("lib/*.so"), *npu.glob("*.so")]))
    have = _symbols(folder / "libascendcl.so", "T") | _symbols(folder / "libhccl.so", "T")
    missing = sorted(name for name in wanted - have if name.startswith(OURS))
    lines = ['extern "C" int fake_cann_refuse(const char*);']
    lines += [f'extern "C" int {name}() {{ return fake_cann_refuse("{name}"); }}' for name in missing]
    source = folder / "refusals.cpp"
    source.write_text("\n".join(lines) + "\n")
    _compile(folder / "libascendcl.so", SOURCES / "acl.cpp", str(source), "-isystem", f"{npu}/include")


def _symbols(path: Path, kind: str) -> set[str]:
    listed = subprocess.run(["nm", "-D", str(path)], check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in listed.splitlines()]
    return {row[-1] for row in rows if len(row) >= 2 and row[-2] == kind}


def _compile(target: Path, source: Path, *options: str) -> None:
    compiler = os.environ.get("CXX", "g++")
    fresh = target.with_suffix(".new")
    command = [compiler, *FLAGS, f"-Wl,-soname,{target.name}", str(source), *options, "-o", str(fresh)]
    try:
        subprocess.run(command, check=True)
    except FileNotFoundError:
        raise SystemExit(
            f"{compiler}: not found; the simulated Ascend needs a C++20 compiler (g++, or name one in CXX)"
        ) from None
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{source.name}: does not compile (code {error.returncode}); the errors are above") from None
    fresh.rename(target)


def _root(package: str) -> Path:
    """Where a package is installed. It is not imported: torch_npu cannot be, before the libraries are there."""
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise SystemExit(f"{package}: not installed in this environment; `nox -s npu` makes one that has it")
    return Path(spec.origin).parent


def _digest() -> str:
    content = hashlib.sha256()
    for path in (*sorted(SOURCES.glob("*.cpp")), Path(__file__)):
        content.update(path.read_bytes())
    for package in ("torch", "torch_npu"):
        content.update(f"{package} {version(package)} {_root(package)}".encode())
    return content.hexdigest()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: python -m fake_cann.build FOLDER")
    build(Path(sys.argv[1]).resolve())
