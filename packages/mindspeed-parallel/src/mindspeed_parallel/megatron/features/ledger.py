"""The page that shows every patch: what it changes, why, what it was written against, and the difference.

``python -m mindspeed_parallel.megatron.features.ledger docs/patches.md`` writes it; with ``--check`` nothing is written,
and the exit code is 1 when the page, or what a patch was written against, is no longer current.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path

from mindspeed_kernels.device import Device
from mindspeed_runtime.patch import Feature, Patch, PatchError, check, diff

from .activation import FEATURES, Context

_COMMAND = "python -m mindspeed_parallel.megatron.features.ledger docs/patches.md"
_HEAD = """# Patches

Every change that this project makes to code that is not its own. Each is made when a feature that needs it is switched
on, checked first against the code that is installed, and taken back when the feature is left. Nothing is patched at
import.

This page is generated, and a test fails when it is stale: `{command}`.

A fingerprint is the hash of the upstream code, its layout and comments left out; of PyTorch only names are relied on.
Code is shown without docstrings. It is what the device cpu puts in: on an npu, functions of `torch.npu` stand in for
those of `torch.cuda`.

megatron-core {megatron}, PyTorch {torch}: {count}.
"""


def page() -> str:
    """The whole page. PatchError when a patch does not fit what is installed."""
    patches = {feature.name: patches_of(feature) for feature in FEATURES}
    flat = [patch for found in patches.values() for patch in found]
    check(flat)
    ours = [patch for patch in flat if patch.target.startswith("megatron.")]
    count = f"{len(flat)} patches: {len(ours)} of megatron-core, {len(flat) - len(ours)} of PyTorch"
    head = _HEAD.format(
        command=_COMMAND, count=count, megatron=version("megatron-core"), torch=version("torch").split("+")[0]
    )
    parts = [head, _table(patches), *(_section(feature, patches[feature.name]) for feature in FEATURES)]
    return "\n".join(parts)


def patches_of(feature: Feature) -> list[Patch]:
    """The patches of a feature with its default options on the host."""
    return list(feature.patches(Context(device=Device(kind="cpu"), kernels=None, options=feature.options())))


def _table(patches: dict[str, list[Patch]]) -> str:
    rows = ["| target | feature | kind | fingerprint |", "|---|---|---|---|"]
    for name, found in patches.items():
        rows += [f"| `{_short(p.target)}` | {name} | {p.kind} | {p.written_against or ''} |" for p in found]
    return "\n".join(rows) + "\n"


def _section(feature: Feature, patches: Sequence[Patch]) -> str:
    head = f"## {feature.name}\n\nWhat it gives: {feature.why}.\nWhy patches: {feature.resort}.\n"
    return "\n".join([head, *(_entry(patch) for patch in patches)])


def _entry(patch: Patch) -> str:
    facts = [f"- Kind: {patch.kind}", f"- Why: {patch.why}"]
    if patch.written_against is not None:
        facts.append(f"- Fingerprint: {patch.written_against}")
    if patch.also:
        facts.append("- Bound by: " + ", ".join(f"`{module}`" for module in patch.also))
    return "\n".join([f"### `{_short(patch.target)}`\n", *facts, "", "```diff", diff(patch), "```", ""])


def _short(target: str) -> str:
    return target.replace(":", ".")


def _stale(file: Path, text: str) -> Iterator[str]:
    if not file.is_file():
        yield f"{file}: there is no such page; write it with `{_COMMAND}`"
    elif file.read_text() != text:
        yield f"{file}: stale; write it anew with `{_COMMAND}` and read what changed"


def main(arguments: Sequence[str] | None = None) -> int:
    """Write or check the page; the exit code."""
    parser = argparse.ArgumentParser(description="Write the page of all patches, or check that it is current.")
    parser.add_argument("file", type=Path, help="the page, docs/patches.md in the repository")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when the page is stale")
    given = parser.parse_args(arguments)
    try:
        text = page()
    except PatchError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    if not given.check:
        given.file.write_text(text)
        return 0
    findings = list(_stale(given.file, text))
    sys.stderr.writelines(f"{finding}\n" for finding in findings)
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
