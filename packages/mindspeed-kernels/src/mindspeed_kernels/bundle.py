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
from .ops.activation import CLAMPED_SWIGLU, GEGLU, SWIGLU
from .ops.attention import ATTENTION, CAPPED_ATTENTION, SINK_ATTENTION
from .ops.grouped import GROUPED_LINEAR
from .ops.norm import RMS_NORM
from .ops.recurrent import CAUSAL_CONV, GATED_DELTA_RULE, SELECTIVE_SCAN
from .ops.rotary import ROTARY
from .ops.routing import ROUTING
from .ops.table import Implementation, Operator

OPERATORS = {
    operator.name: operator
    for operator in (
        *(RMS_NORM, ATTENTION, CAPPED_ATTENTION, SINK_ATTENTION, SWIGLU, GEGLU, CLAMPED_SWIGLU),
        *(ROTARY, ROUTING, GROUPED_LINEAR),
        *(CAUSAL_CONV, GATED_DELTA_RULE, SELECTIVE_SCAN),
    )
}
_log = logging.getLogger(__name__)


class OpError(UserError):
    """An operator or implementation that does not exist or cannot run here."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """One function an operator; ``chosen`` says which implementation each is."""

    rms_norm: Callable[..., Any]
    attention: Callable[..., Any]
    capped_attention: Callable[..., Any]
    sink_attention: Callable[..., Any]
    swiglu: Callable[..., Any]
    geglu: Callable[..., Any]
    clamped_swiglu: Callable[..., Any]
    rotary: Callable[..., Any]
    routing: Callable[..., Any]
    grouped_linear: Callable[..., Any]
    causal_conv: Callable[..., Any]
    gated_delta_rule: Callable[..., Any]
    selective_scan: Callable[..., Any]
    chosen: Mapping[str, str]

    @classmethod
    def for_device(cls, device: Device, choices: Mapping[str, str] | None = None) -> "Kernels":
        """Resolve every operator: ``choices`` names an implementation, "reference" or "auto"; the default is auto."""
        choices = dict(choices or {})
        if unknown := sorted(set(choices) - set(OPERATORS)):
            raise OpError(f"kernels.{unknown[0]}: no such operator; there are {', '.join(sorted(OPERATORS))}")
        plugged = _plugged_in()
        found = {
            name: _resolve(operator, {**operator.faster, **plugged[name]}, device, choices.get(name, "auto"))
            for name, operator in OPERATORS.items()
        }
        chosen = {name: choice for name, (choice, _) in found.items()}
        _log.info("kernels on %s: %s", device.kind, ", ".join(f"{name}={choice}" for name, choice in chosen.items()))
        return cls(**{name: function for name, (_, function) in found.items()}, chosen=chosen)

    @classmethod
    def reference(cls) -> "Kernels":
        """The definitions themselves."""
        names = {item.name for item in fields(cls)} - {"chosen"}
        return cls(
            **{name: OPERATORS[name].reference for name in names},
            chosen=dict.fromkeys(names, "reference"),
        )


def _resolve(
    operator: Operator, table: Mapping[str, Implementation], device: Device, choice: str
) -> tuple[str, Callable[..., Any]]:
    here = [name for name, implementation in table.items() if implementation.supports(device)]
    if choice == "auto":
        choice = next((name for name in here if table[name].auto), "reference")
    if choice == "reference":
        return choice, operator.reference
    if choice not in here:
        names = ", ".join(["reference", *here])
        raise OpError(f"kernels.{operator.name}: no {choice!r} implementation for {device.kind}; here: {names}")
    try:
        return choice, table[choice].load()
    except ImportError as error:
        raise OpError(
            f"kernels.{operator.name}: the {choice!r} implementation cannot be loaded: {error}; install what it needs, "
            "or name another"
        ) from error


def _plugged_in() -> dict[str, dict[str, Implementation]]:
    """Implementations that other distributions bring, by operator: entry points ``operator.implementation``."""
    found: dict[str, dict[str, Implementation]] = {name: {} for name in OPERATORS}
    for point in entry_points(group="mindspeed.kernels"):
        operator, _, name = point.name.partition(".")
        if operator not in OPERATORS:
            raise OpError(
                f"entry point {point.name} = {point.value}: no operator {operator}; name it operator.implementation, "
                f"with one of {', '.join(sorted(OPERATORS))}"
            )
        if name in ("", "auto", "reference", *OPERATORS[operator].faster, *found[operator]):
            raise OpError(f"entry point {point.name} = {point.value}: {operator} has {name!r} already; rename it")
        found[operator][name] = point.load()
    return found
