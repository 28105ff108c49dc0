"""From a YAML file and ``--set`` overrides to a recipe, strictly.

An unknown key, a value of another type, a key given twice: each is an error that names the key, where it stands, and
what would do. Nothing is derived in silence; every value knows where it came from.
"""

import dataclasses
import difflib
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pydantic
import yaml
from mindspeed_kernels.errors import UserError

from .recipe import Recipe

_PATHS = ("model.path", "model.tokenizer", "data.train", "data.validation", "data.chat_template", "data.cache")


class ConfigError(UserError):
    """A recipe that cannot be used as it is."""


@dataclass(frozen=True, kw_only=True)
class Loaded:
    """A recipe, and where each value that is not a default was given."""

    recipe: Recipe
    origins: Mapping[str, str]  # dotted key: "recipe.yaml:12" or "--set"


class _Loader(yaml.SafeLoader):
    """YAML in which a key stands once and 1e-5 is a number."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen: dict[Any, int] = {}
    for key, _ in node.value:
        name = loader.construct_object(key, deep=True)
        line = key.start_mark.line + 1
        if name in seen:
            raise ConfigError(f"{key.start_mark.name}:{line}: {name} stands in line {seen[name]} already; keep one")
        seen[name] = line
    return yaml.SafeLoader.construct_mapping(loader, node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)
_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"^[-+]?\d[\d_]*(\.\d*)?[eE][-+]?\d+$"), list("-+0123456789")
)


def load_recipe(path: Path, overrides: Sequence[str] = ()) -> Loaded:
    """Read ``path`` and apply ``overrides`` of the form ``a.b=value``."""
    try:
        text = path.read_text()
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such recipe file") from error
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as a recipe ({error})") from error
    tree = _parse(text, path.name)
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: a recipe is a mapping of sections, this is {_kind(tree)}")
    origins = dict(_origins(yaml.compose(text, Loader=_Loader), path.name))
    _anchor(tree, path.resolve().parent)
    for override in overrides:
        key, value = _override(override)
        _put(tree, key, value)
        origins = {old: where for old, where in origins.items() if not (old + ".").startswith(key + ".")}
        origins |= dict.fromkeys((key, *_keys(value, key)), "--set")
    return Loaded(recipe=build_recipe(tree, origins), origins=origins)


def build_recipe(tree: Mapping[str, Any], origins: Mapping[str, str] | None = None) -> Recipe:
    """A recipe from plain mappings, with the same strictness."""
    try:
        return _adapter().validate_json(json.dumps(tree), strict=True)
    except pydantic.ValidationError as error:
        raise ConfigError("\n".join(_explained(item, origins or {}) for item in error.errors())) from error
    except TypeError as error:  # a YAML date, say
        raise ConfigError(f"recipe: {error}; quote the value") from error


def dump_recipe(recipe: Recipe) -> str:
    """YAML that loads to an equal recipe."""
    return yaml.safe_dump(_plain(recipe), sort_keys=False, allow_unicode=True, width=120)


def describe(loaded: Loaded) -> str:
    """Every key of the recipe with its value and its origin, as YAML with comments."""
    unused = "fsdp2" if loaded.recipe.backend == "megatron" else "megatron"
    lines: list[tuple[str, str]] = []
    for section in dataclasses.fields(Recipe):
        value = getattr(loaded.recipe, section.name)
        note = f"not used: backend is {loaded.recipe.backend}" if section.name == unused else ""
        if not dataclasses.is_dataclass(value):
            lines.append((f"{section.name}: {_inline(value)}", _origin(section.name, loaded.origins)))
            continue
        lines.append((f"{section.name}:", note))
        for item in dataclasses.fields(value):
            key = f"{section.name}.{item.name}"
            lines.append((f"  {item.name}: {_inline(getattr(value, item.name))}", _origin(key, loaded.origins)))
    width = min(max(len(text) for text, _ in lines), 60)
    return "\n".join(f"{text:<{width}}  # {note}" if note else text for text, note in lines)


def check_recipe(recipe: Recipe, num_ranks: int) -> None:
    """ConfigError unless the parts fit one another and ``num_ranks`` processes. Needs no model."""
    parallel, data = recipe.parallel, recipe.data
    for name in ("tensor", "pipeline", "context", "expert"):
        if getattr(parallel, name) < 1:
            raise ConfigError(f"parallel.{name}={getattr(parallel, name)}: a degree is at least 1")
    fixed = parallel.tensor * parallel.pipeline * parallel.context
    if num_ranks % fixed:
        raise ConfigError(
            f"parallel: tensor x pipeline x context = {fixed} does not divide {num_ranks} processes; "
            f"start {max(1, round(num_ranks / fixed)) * fixed}, or change a degree"
        )
    _check_batch(recipe, num_ranks // fixed)
    _check_training(recipe)
    multiple = length_multiple(recipe)
    if data.sequence % multiple:
        good = max(1, round(data.sequence / multiple)) * multiple
        raise ConfigError(
            f"data.sequence={data.sequence}: this layout cuts rows into {multiple} parts; the nearest length that "
            f"divides is {good}"
        )
    if data.sequence < 2:
        raise ConfigError(f"data.sequence={data.sequence}: a row needs at least 2 tokens")
    if parallel.sequence and parallel.tensor == 1:
        raise ConfigError("parallel.sequence: it shares the work of the tensor axis; set parallel.tensor to 2 or more")
    if recipe.megatron.virtual > 1 and parallel.pipeline == 1:
        raise ConfigError("megatron.virtual: chunks a stage need a pipeline; set parallel.pipeline to 2 or more")


def _check_training(recipe: Recipe) -> None:
    training, data = recipe.training, recipe.data
    if (recipe.stage == "pretrain") != (data.format == "text"):
        fits = "data.format: text" if recipe.stage == "pretrain" else "data.format: messages, or alpaca"
        raise ConfigError(
            f"stage={recipe.stage} with data.format={data.format}: pretrain trains every token of text, sft the answers of "
            f"chat rows; say {fits}, or the other stage"
        )
    if (training.steps is None) == (training.epochs is None):
        given = "both are given" if training.steps is not None else "neither is given"
        raise ConfigError(f"training: {given} of steps and epochs; give one")
    for key, number in (("training.steps", training.steps), ("training.epochs", training.epochs)):
        if number is not None and number <= 0:
            raise ConfigError(f"{key}={number}: must be positive")
    if training.generate_every is not None and not training.generate_prompts:
        raise ConfigError("training.generate_every: there is nothing to generate; give training.generate_prompts")
    if training.validate_every is not None and not data.validation:
        raise ConfigError("training.validate_every: there are no validation rows; give data.validation")


def length_multiple(recipe: Recipe) -> int:
    """What the length of a row must be a multiple of in the recipe's layout."""
    parts = recipe.parallel.tensor if recipe.parallel.sequence else 1
    return parts * (2 * recipe.parallel.context if recipe.parallel.context > 1 else 1)


def _check_batch(recipe: Recipe, data_ranks: int) -> None:
    training = recipe.training
    for key in ("global_batch", "micro_batch"):
        if getattr(training, key) < 1:
            raise ConfigError(f"training.{key}={getattr(training, key)}: must be at least 1")
    share = training.micro_batch * data_ranks
    if training.global_batch % share:
        good = max(1, math.ceil(training.global_batch / share)) * share
        raise ConfigError(
            f"training.global_batch={training.global_batch}: not a multiple of micro_batch x data ranks = "
            f"{training.micro_batch} x {data_ranks}; use {good}"
        )
    microbatches = training.global_batch // share
    if recipe.megatron.virtual > 1 and microbatches % recipe.parallel.pipeline:
        good = math.ceil(microbatches / recipe.parallel.pipeline) * recipe.parallel.pipeline * share
        raise ConfigError(
            f"training.global_batch={training.global_batch}: {microbatches} micro-batches a data rank, and with "
            f"megatron.virtual they must be a multiple of parallel.pipeline={recipe.parallel.pipeline}; use {good}"
        )


@cache
def _adapter() -> pydantic.TypeAdapter[Recipe]:
    return pydantic.TypeAdapter(Recipe)


def _parse(text: str, name: str) -> Any:
    loader = _Loader(text)
    loader.name = name
    try:
        return loader.get_single_data()
    except yaml.MarkedYAMLError as error:
        line = error.problem_mark.line + 1 if error.problem_mark else "?"
        raise ConfigError(f"{name}:{line}: not YAML: {error.problem}") from error
    finally:
        loader.dispose()


def _origins(node: Any, name: str, prefix: str = "") -> Iterator[tuple[str, str]]:
    if not isinstance(node, yaml.MappingNode):
        return
    for key, value in node.value:
        path = f"{prefix}{key.value}"
        yield path, f"{name}:{key.start_mark.line + 1}"
        yield from _origins(value, name, path + ".")


def _override(text: str) -> tuple[str, Any]:
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"--set {text}: write it as section.key=value")
    return key.strip(), _parse(value, "--set") if value.strip() else ""


def _keys(value: Any, prefix: str) -> Iterator[str]:
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield f"{prefix}.{name}"
        yield from _keys(inner, f"{prefix}.{name}")


def _put(tree: dict[str, Any], key: str, value: Any) -> None:
    *parents, name = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"--set {key}: {parent} is {_kind(tree)}, not a section")
    tree[name] = value


def _anchor(tree: dict[str, Any], base: Path) -> None:
    """Make the paths of a recipe file relative to the file."""
    for key in _PATHS:
        section, name = key.split(".")
        holder = tree.get(section)
        value = holder.get(name) if isinstance(holder, dict) else None
        if isinstance(value, list):
            holder[name] = [str(base / item) if isinstance(item, str) else item for item in value]  # pyright: ignore[reportOptionalSubscript]
        elif isinstance(value, str) and (key != "model.path" or (base / value).exists()):
            holder[name] = str(base / value)  # pyright: ignore[reportOptionalSubscript]


def _explained(item: Any, origins: Mapping[str, str]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    where = next((f"{origins[key]}: " for key in _prefixes(path) if key in origins), "")
    if item["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        parent, _, name = path.rpartition(".")
        allowed = _fields(parent)
        close = difflib.get_close_matches(name, allowed, n=1)
        hint = f"did you mean {close[0]}?" if close else f"there are {', '.join(allowed)}"
        return f"{where}{path}: no such key; {hint}"
    if item["type"] in ("missing", "missing_argument"):
        return f"recipe: {path} is missing; it has no default"
    message = item["msg"][0].lower() + item["msg"][1:]
    return f"{where}{path}: {message}, got {json.dumps(item['input'], default=str)}"


def _prefixes(path: str) -> Iterator[str]:
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        yield ".".join(parts[:end])


def _fields(path: str) -> list[str]:
    kind: Any = Recipe
    for part in filter(None, path.split(".")):
        kind = next(item.type for item in dataclasses.fields(kind) if item.name == part)
    return [item.name for item in dataclasses.fields(kind)]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {item.name: _plain(getattr(value, item.name)) for item in dataclasses.fields(value)}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return {key: _plain(item) for key, item in value.items()} if isinstance(value, dict) else value


def _inline(value: Any) -> str:
    return yaml.safe_dump(_plain(value), default_flow_style=True, width=10**6).strip().removesuffix("\n...").strip()


def _origin(key: str, origins: Mapping[str, str]) -> str:
    return origins.get(key, "default")


def _kind(value: Any) -> str:
    return {dict: "a mapping", list: "a list", type(None): "empty"}.get(type(value), f"{value!r}")
