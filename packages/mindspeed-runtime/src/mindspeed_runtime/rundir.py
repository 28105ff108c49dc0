"""Folders that are whole or not there: outputs, and the checkpoints of a run.

Everything is written under another name beside the final one and renamed when it is complete. A checkpoint says all
about itself, and its manifest, with the size and hash of every file, comes last: no manifest, no checkpoint.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import xxhash
from mindspeed_kernels.errors import RunError, UserError

MANIFEST = "manifest.json"
FORMAT = 1
_PARTIAL = re.compile(r"\.(?P<name>.+)\.partial-(?P<pid>\d+)$")
_PACKAGES = ("kernels", "runtime", "parallel", "models", "train", "fsdp", "tools")
_LIBRARIES = ("torch", "megatron-core", "transformers")


class CheckpointError(UserError):
    """A checkpoint that is absent, incomplete or changed."""


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """What a folder holds and how it came to be."""

    kind: str
    facts: dict[str, Any]
    files: dict[str, dict[str, Any]]
    versions: dict[str, str]


@contextlib.contextmanager
def new_folder(target: Path, *, force: bool = False) -> Iterator[Path]:
    """A new folder to fill, which stands at ``target`` when the block ends well, and nowhere when it does not.

    UserError when something is at ``target`` already, unless ``force``: then that is replaced as a whole.
    """
    target = Path(os.path.abspath(target))
    if target.exists() and not force and (not target.is_dir() or any(target.iterdir())):
        raise UserError(f"{target}: exists and is not empty; name another folder, or use --force to replace it")
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    partial = target.parent / f".{target.name}.partial-{os.getpid()}"
    partial.mkdir()
    try:
        yield partial
        put_in_place(partial, target)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise


def put_in_place(partial: Path, target: Path) -> None:
    """Rename a complete folder to its final name, replacing what was there, and make that durable."""
    _sync_tree(partial)
    old = target.parent / f".{target.name}.old-{os.getpid()}"
    if target.exists():
        target.rename(old)
    partial.rename(target)
    _sync(target.parent)
    if old.is_dir():
        shutil.rmtree(old)
    else:
        old.unlink(missing_ok=True)


def write_manifest(folder: Path, kind: str, **facts: Any) -> None:
    """Describe every file of ``folder`` in its manifest. To be called when all else is written."""
    files = {
        str(path.relative_to(folder)): {"bytes": path.stat().st_size, "xxh3": _hash(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    content = {"format": FORMAT, "kind": kind, "facts": facts, "versions": _versions(), "files": files}
    partial = folder / f".{MANIFEST}"
    partial.write_text(json.dumps(content, indent=1) + "\n")
    _sync(partial)
    partial.rename(folder / MANIFEST)


def read_manifest(folder: Path, *, hashes: bool = True) -> Manifest:
    """The manifest of ``folder``. CheckpointError when it is absent, or a file is missing, cut or changed."""
    path = folder / MANIFEST
    if not folder.is_dir():
        raise CheckpointError(f"{folder}: no such checkpoint folder")
    if not path.is_file():
        raise CheckpointError(f"{folder}: no {MANIFEST}, so this is not a complete checkpoint")
    try:
        content = json.loads(path.read_text())
        manifest = Manifest(
            kind=content["kind"], facts=content["facts"], files=content["files"], versions=content["versions"]
        )
    except (ValueError, KeyError) as error:
        raise CheckpointError(f"{path}: damaged ({error!r})") from error
    if content.get("format") != FORMAT:
        raise CheckpointError(f"{path}: format {content.get('format')}; this version reads format {FORMAT}")
    for name, fact in manifest.files.items():
        file = folder / name
        if not file.is_file():
            raise CheckpointError(f"{file}: missing; the checkpoint is incomplete")
        if file.stat().st_size != fact["bytes"]:
            raise CheckpointError(f"{file}: has {file.stat().st_size} bytes, the manifest says {fact['bytes']}")
        if hashes and _hash(file) != fact["xxh3"]:
            raise CheckpointError(f"{file}: its content is not what was written (hash differs)")
    return manifest


class Checkpoints:
    """The checkpoints of a run: ``folder/step-00000050`` and so on. For one process; the loop lets the main rank ask."""

    def __init__(self, folder: Path, keep_last: int | None = None) -> None:
        self.folder = folder
        self.keep_last = keep_last

    def at(self, step: int) -> Path:
        """Where the checkpoint of a step stands."""
        return self.folder / f"step-{step:08}"

    def all(self) -> list[Path]:
        """Complete checkpoints, the newest last. Sizes are checked, hashes not."""
        found = []
        for path in sorted(self.folder.glob("step-*")):
            with contextlib.suppress(CheckpointError):
                read_manifest(path, hashes=False)
                found.append(path)
        return found

    def latest(self) -> Path | None:
        """The newest complete checkpoint."""
        found = self.all()
        return found[-1] if found else None

    def start(self, step: int) -> Path:
        """An empty folder to write the checkpoint of ``step`` into; leftovers of runs that died are removed."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for leftover in self.folder.glob(".step-*"):
            shutil.rmtree(leftover)
        partial = self.folder / f".step-{step:08}.partial"
        partial.mkdir()
        return partial

    def finish(self, partial: Path, step: int, **facts: Any) -> Path:
        """Put the manifest on what was written and the folder in its place; then remove what is no longer kept."""
        write_manifest(partial, "checkpoint", step=step, **facts)
        put_in_place(partial, self.at(step))
        self.prune()
        return self.at(step)

    def discard(self, partial: Path) -> None:
        """Remove what a failed save left."""
        shutil.rmtree(partial, ignore_errors=True)

    def prune(self) -> None:
        """Keep the last ``keep_last`` and the one with the lowest validation loss."""
        if self.keep_last is None:
            return
        found = self.all()
        losses = {path: read_manifest(path, hashes=False).facts.get("validation_loss") for path in found}
        known = {path: loss for path, loss in losses.items() if loss is not None}
        best = min(known, key=lambda path: known[path]) if known else None
        for path in found[: -self.keep_last]:
            if path != best:
                # Renamed first: a removal that is cut short must not leave half a checkpoint under its name.
                doomed = path.with_name(f".{path.name}.removed")
                path.rename(doomed)
                shutil.rmtree(doomed)


def save_failed(folder: Path, error: BaseException, last: Path | None) -> RunError:
    """What is raised when a checkpoint could not be written."""
    rest = f"the last good checkpoint is {last}" if last else "there is no earlier checkpoint"
    return RunError(f"checkpoint: writing to {folder} failed ({error}); {rest}")


def _remove_leftovers(target: Path) -> None:
    for path in target.parent.glob(f".{target.name}.partial-*"):
        match = _PARTIAL.search(path.name)
        if match and not Path(f"/proc/{match['pid']}").exists():
            shutil.rmtree(path, ignore_errors=True)


def _hash(path: Path) -> str:
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def _sync_tree(folder: Path) -> None:
    for path in (*folder.rglob("*"), folder):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _versions() -> dict[str, str]:
    found = {}
    for name in (*(f"mindspeed-{package}" for package in _PACKAGES), *_LIBRARIES):
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found
