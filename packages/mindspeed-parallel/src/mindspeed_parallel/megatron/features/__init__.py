"""The only place where code of megatron-core, or code that it calls, is patched.

Order of resort: a configuration field, a spec or provider, a subclass, and only then a patch. Each feature says why
nothing before a patch does. ``activate`` switches features on for the code inside and leaves everything as it was.
"""

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from typing import Any

from mindspeed_kernels.device import Device
from mindspeed_runtime.config import ConfigError
from mindspeed_runtime.patch import Feature, Patch, applied

from .device import DEVICE

FEATURES: tuple[Feature, ...] = (DEVICE,)  # in the order in which they are applied


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a feature may look at: the device, and its own options."""

    device: Device
    options: Mapping[str, Any]


def known() -> dict[str, Feature]:
    """Every feature by name: ours, and those of other distributions (entry points ``mindspeed.features``)."""
    plugged = [point.load() for point in entry_points(group="mindspeed.features")]
    return {feature.name: feature for feature in (*FEATURES, *plugged)}


def resolve(asked: Mapping[str, Mapping[str, Any]], device: Device) -> list[tuple[Feature, Context]]:
    """The features that are on: those asked for and those that the device needs, in order. ConfigError on a conflict."""
    table = known()
    for name, options in asked.items():
        if name not in table:
            raise ConfigError(f"features.{name}: no such feature; there are {', '.join(table)}")
        if unknown := sorted(set(options) - set(table[name].options)):
            known_options = ", ".join(table[name].options) or "none"
            raise ConfigError(f"features.{name}.{unknown[0]}: no such option; there are: {known_options}")
    active = []
    for name, feature in table.items():
        context = Context(device=device, options={**feature.options, **asked.get(name, {})})
        if name in asked or feature.needed(context):
            active.append((feature, context))
    names = {feature.name for feature, _ in active}
    for feature, _ in active:
        if missing := [name for name in feature.requires if name not in names]:
            raise ConfigError(f"features.{feature.name}: needs {missing[0]}; switch it on too")
        if clash := [name for name in feature.excludes if name in names]:
            raise ConfigError(f"features.{feature.name}: cannot stand with {clash[0]}; switch one of them off")
    return active


@contextlib.contextmanager
def activate(asked: Mapping[str, Mapping[str, Any]], device: Device) -> Iterator[list[Patch]]:
    """Apply the features that ``asked`` names and the device needs; yields the patches that are in force."""
    active = resolve(asked, device)
    patches = [patch for feature, context in active for patch in feature.patches(context)]
    with applied(patches), contextlib.ExitStack() as stack:
        for feature, context in active:
            if feature.enter is not None:
                stack.enter_context(feature.enter(context))
        yield patches
