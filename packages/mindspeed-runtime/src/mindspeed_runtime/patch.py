"""Changes to code that is not ours: written down, checked, composed in order, and taken back without a trace."""

import ast
import contextlib
import difflib
import functools
import hashlib
import importlib
import inspect
import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Literal

from mindspeed_kernels.errors import UserError

MISSING: Any = object()


class PatchError(UserError):
    """A patch that does not fit what it patches, or another patch."""


@dataclass(frozen=True, kw_only=True)
class Patch:
    """One change to code that we do not own."""

    target: str  # "megatron.core.x:Class.method"
    make: Callable[[Any], Any]  # the original -> what stands in its place
    kind: Literal["wrap", "replace", "define"]  # wrap: calls the original; define: the name was absent
    why: str  # a sentence, for docs/patches.md
    written_against: str | None = None  # fingerprint of the original; None: it has no source (define, C functions)
    also: tuple[str, ...] = ()  # modules that bound the same object under the same name

    def __post_init__(self) -> None:
        if self.also and self.kind == "define":
            raise PatchError(f"{self.target}: a name that was absent is bound nowhere else")


@dataclass(frozen=True, kw_only=True)
class NoOptions:
    """A feature that leaves nothing to choose."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """Something that needs patches, or only options, to be switched on.

    Its callables are given a context: the device, the kernels, and ``options``, an instance of the class that is named
    here. ``enter`` is a scoped change that is not a patch.
    """

    name: str
    why: str  # what it gives
    resort: str  # why no config field, spec or subclass does it
    patches: Callable[[Any], Sequence[Patch]]  # context -> records
    needed: Callable[[Any], bool] = lambda _: False  # context -> on without being asked for
    check: Callable[[Any], None] | None = None  # context -> UserError when it cannot be on
    enter: Callable[[Any], contextlib.AbstractContextManager[Any]] | None = None
    requires: tuple[str, ...] = ()
    excludes: tuple[str, ...] = ()
    options: type = NoOptions  # a frozen dataclass with defaults


def fingerprint(original: Any) -> str:
    """Twelve hex digits of the source of a function or class, comments and layout taken out."""
    return hashlib.sha256(ast.unparse(ast.parse(source_of(original))).encode()).hexdigest()[:12]


def source_of(original: Any) -> str:
    """Dedented source of a function or class. PatchError when there is none to read."""
    inner = getattr(original, "__func__", original)
    if isinstance(inner, property):
        inner = inner.fget
    try:
        return textwrap.dedent(inspect.getsource(inspect.unwrap(inner)))  # pyright: ignore[reportArgumentType]
    except (TypeError, OSError) as error:
        raise PatchError(f"{original!r} has no source to compare with: {error}") from error


@contextlib.contextmanager
def applied(patches: Sequence[Patch]) -> Iterator[None]:
    """Install ``patches`` in order; put every original back on the way out.

    PatchError, with nothing changed, when two of them cannot stand together, a target is gone, or its source is not
    what a patch was written against.
    """
    check(patches)
    undo: list[tuple[Any, str, Any]] = []
    try:
        for patch in patches:
            owner, name, original = locate(patch.target)
            new = patch.make(original)
            for where in (owner, *(_module(patch, module) for module in patch.also)):
                undo.append((where, name, vars(where).get(name, MISSING)))
                setattr(where, name, new)
        yield
    finally:
        for where, name, original in reversed(undo):
            if original is MISSING:
                delattr(where, name)
            else:
                setattr(where, name, original)


def check(patches: Sequence[Patch]) -> None:
    """PatchError unless ``patches`` fit the code as it is and one another: wraps stack, replacements do not."""
    first: dict[str, Patch] = {}
    for patch in patches:
        earlier = first.get(patch.target)
        if earlier is not None and patch.kind != "wrap":
            raise PatchError(f"{patch.target}: {earlier.kind} and then {patch.kind}; only a wrap may come second")
        if earlier is None or earlier.kind != "define":  # else what it wraps is ours, and not there yet
            check_target(patch)
        first.setdefault(patch.target, patch)


def check_target(patch: Patch) -> None:
    """PatchError when the target, its bindings or its source are not as the patch expects."""
    _, name, original = locate(patch.target)
    if (original is MISSING) != (patch.kind == "define"):
        state = "upstream lacks it" if original is MISSING else "upstream now has it"
        raise PatchError(f"{patch.target}: {state}; this patch was written for another version")
    if patch.written_against is not None and (now := fingerprint(original)) != patch.written_against:
        raise PatchError(
            f"{patch.target}: its source changed ({now}, the patch was written against {patch.written_against}); "
            "install the version that this package pins, or review the patch"
        )
    for module in patch.also:
        if vars(_module(patch, module)).get(name, MISSING) is not original:
            raise PatchError(f"{patch.target}: {module} no longer binds the same {name}; review the patch")


def _module(patch: Patch, name: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PatchError(f"{patch.target}: {error}; this patch was written for another version") from error


def locate(target: str) -> tuple[Any, str, Any]:
    """Owner, name and present value (as its owner's dictionary holds it) of ``module:a.b``; MISSING when absent."""
    module, _, path = target.partition(":")
    *parents, name = path.split(".")
    try:
        owner = functools.reduce(getattr, parents, importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise PatchError(f"{target}: {error}; this patch was written for another version") from error
    return owner, name, vars(owner).get(name, MISSING)


def diff(patch: Patch) -> str:
    """Unified diff of the original's code and the code of what stands in its place, docstrings and comments left out.

    A wrap is shown as what it adds, since the original stays. What is not Python code is shown by its value.
    """
    _, name, original = locate(patch.target)
    before = [] if original is MISSING or patch.kind == "wrap" else _code(original)
    after = _code(patch.make(original), outermost=patch.kind == "wrap")
    lines = difflib.unified_diff(before, after, f"upstream/{name}", f"ours/{name}", lineterm="", n=2)
    return "\n".join(lines)


def _code(value: Any, *, outermost: bool = False) -> list[str]:
    """Normalised lines of code. ``outermost``: of a function itself, whatever it says that it wraps."""
    try:
        tree = ast.parse(source_of(getattr(value, "__code__", value) if outermost else value))
    except PatchError:
        return [f"{value!r}"]
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Expr(ast.Constant(...))]
    return ast.unparse(tree).splitlines()
