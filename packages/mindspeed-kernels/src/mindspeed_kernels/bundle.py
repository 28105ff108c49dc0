"""The frozen set of operators that a model is built with.

Choices are made once, here. ``auto`` takes the first faster implementation that the device supports and says so; a
named choice that cannot run is an error. Nothing falls back later.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from importlib.metadata import entry_points
from typing import Any

from .device import Device
from .errors import UserError
from .ops.activation import SWIGLU
from .ops.attention import ATTENTION
from .ops.norm import RMS_NORM
from .ops.rotary import ROTARY
from .ops.table import Implementation, Operator

OPERATORS = {operator.name: operator for operator in (RMS_NORM, ATTENTION, SWIGLU, ROTARY)}
_log = logging.getLogger(__name__)


class OpError(UserError):
    """An operator or implementation that does not exist or cannot run here."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One function an operator; ``chosen`` says which implementation each is."""

    rms_norm: Callable[..., Any]
    attention: Callable[..., Any]
    swiglu: Callable[..., Any]
    rotary: Callable[..., Any]
    chosen: Mapping[str, str]

    @classmethod
    def for_device(cls, device: Device, choices: Mapping[str, str] | None = None) -> "Kernels":
        """Resolve every operator: ``choices`` names an implementation, "reference" or "auto"; the default is auto."""
        choices = dict(choices or {})
        if unknown := sorted(set(choices) - set(OPERATORS)):
            raise OpError(f"kernels.{unknown[0]}: no such operator; there are {', '.join(sorted(OPERATORS))}")
        found = {name: _resolve(operator, device, choices.get(name, "auto")) for name, operator in OPERATORS.items()}
        chosen = {name: choice for name, (choice, _) in found.items()}
        _log.info("kernels on %s: %s", device.kind, ", ".join(f"{name}={choice}" for name, choice in chosen.items()))
        return cls(**{name: function for name, (_, function) in found.items()}, chosen=chosen)

    @classmethod
    def reference(cls) -> "Kernels":
        """The definitions themselves."""
        names = {item.name for item in fields(cls)} - {"chosen"}
        return cls(**{name: OPERATORS[name].reference for name in names}, chosen=dict.fromkeys(names, "reference"))


def _resolve(operator: Operator, device: Device, choice: str) -> tuple[str, Callable[..., Any]]:
    table = {**operator.faster, **_plugged_in(operator.name)}
    if choice == "reference":
        return choice, operator.reference
    if choice == "auto":
        for name, implementation in table.items():
            if implementation.auto and implementation.supports(device):
                return name, implementation.load()
        return "reference", operator.reference
    if choice in table and table[choice].supports(device):
        return choice, table[choice].load()
    here = ["reference", *(name for name, implementation in table.items() if implementation.supports(device))]
    raise OpError(f"kernels.{operator.name}: no {choice!r} implementation for {device.kind}; here: {', '.join(here)}")


def _plugged_in(name: str) -> dict[str, Implementation]:
    """Implementations that other distributions bring: entry points ``operator.implementation``."""
    found = {}
    for point in entry_points(group="mindspeed.kernels"):
        operator, _, implementation = point.name.partition(".")
        if operator == name:
            found[implementation] = point.load()
    return found
