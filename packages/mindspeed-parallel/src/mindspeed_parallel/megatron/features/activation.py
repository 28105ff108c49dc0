"""Which features are on, checked together, and switching them on for a scope."""

import contextlib
import dataclasses
import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

import pydantic
from mindspeed_kernels.bundle import Kernels
from mindspeed_kernels.device import Device
from mindspeed_runtime.config import ConfigError
from mindspeed_runtime.patch import Feature, Patch, applied

from .device import DEVICE
from .torch_adam import TORCH_ADAM

FEATURES: tuple[Feature, ...] = (DEVICE, TORCH_ADAM)  # in the order in which they are applied


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a feature may look at: the device, the kernels of the model, and its own options."""

    device: Device
    kernels: Kernels | None
    options: Any  # an instance of the feature's options class


def known() -> dict[str, Feature]:
    """Every feature by name: ours, and those of other distributions (entry points ``mindspeed.features``)."""
    table = {feature.name: feature for feature in FEATURES}
    for point in entry_points(group="mindspeed.features"):
        feature = point.load()
        if feature.name in table:
            raise ConfigError(f"feature {feature.name}: {point.value} brings a second one; uninstall it or rename it")
        table[feature.name] = feature
    return table


def resolve(
    asked: Mapping[str, Mapping[str, Any]], device: Device, kernels: Kernels | None = None
) -> list[tuple[Feature, Context]]:
    """The features that are on: those asked for and those that are needed here, in order. ConfigError on a conflict."""
    table = known()
    for name in asked:
        if name not in table:
            raise ConfigError(f"features.{name}: no such feature; {_instead(name, list(table))}")
    active: list[tuple[Feature, Context]] = []
    for name, feature in table.items():
        context = Context(device=device, kernels=kernels, options=_options(feature, asked.get(name, {})))
        if name in asked or feature.needed(context):
            active.append((feature, context))
    names = {feature.name for feature, _ in active}
    for feature, context in active:
        if missing := [name for name in feature.requires if name not in names]:
            raise ConfigError(f"features.{feature.name}: needs {missing[0]}; switch it on too")
        if clash := [name for name in feature.excludes if name in names]:
            raise ConfigError(f"features.{feature.name}: cannot stand with {clash[0]}; switch one of them off")
        if feature.check is not None:
            feature.check(context)
    return active


@contextlib.contextmanager
def activate(
    asked: Mapping[str, Mapping[str, Any]], device: Device, kernels: Kernels | None = None
) -> Iterator[list[Patch]]:
    """Apply the features that ``asked`` names and that are needed here; yields the patches that are in force."""
    active = resolve(asked, device, kernels)
    patches = [patch for feature, context in active for patch in feature.patches(context)]
    with applied(patches), contextlib.ExitStack() as stack:
        for feature, context in active:
            if feature.enter is not None:
                stack.enter_context(feature.enter(context))
        yield patches


def _options(feature: Feature, given: Mapping[str, Any]) -> Any:
    fields = [item.name for item in dataclasses.fields(feature.options)]
    for name in given:
        if name not in fields:
            raise ConfigError(f"features.{feature.name}.{name}: no such option; {_instead(name, fields)}")
    try:
        return pydantic.TypeAdapter(feature.options).validate_json(json.dumps(dict(given)), strict=True)
    except pydantic.ValidationError as error:
        item = error.errors()[0]
        path = ".".join(map(str, item["loc"]))
        raise ConfigError(f"features.{feature.name}.{path}: {item['msg']}, got {item['input']!r}") from error


def _instead(name: str, allowed: list[str]) -> str:
    close = difflib.get_close_matches(name, allowed, n=1)
    return f"did you mean {close[0]}?" if close else f"there are: {', '.join(allowed) or 'none'}"
