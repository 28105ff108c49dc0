"""How an operator and its implementations are written down."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..device import Device


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute an operator."""

    load: Callable[[], Callable[..., Any]]  # imports what it needs when it is chosen
    kinds: tuple[str, ...]  # devices it runs on
    auto: bool = True  # may be taken without being named

    def supports(self, device: Device) -> bool:
        """Whether it runs there."""
        return device.kind in self.kinds


@dataclass(frozen=True, kw_only=True)
class Operator:
    """A name, the implementation that defines it, and faster ones in order of preference."""

    name: str
    reference: Callable[..., Any]
    faster: Mapping[str, Implementation]
