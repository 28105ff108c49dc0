"""What a family is: the one place that knows an architecture."""

from collections.abc import Callable
from dataclasses import dataclass

from ..weights.rule import Rule
from .arch import Arch
from .settings import Settings


@dataclass(frozen=True, kw_only=True)
class Family:
    """Which configurations it reads, how, and the rules of its weights."""

    name: str
    model_types: tuple[str, ...]  # of config.json
    arch: Callable[[Settings], Arch]
    rules: Callable[[Arch], tuple[Rule, ...]]
