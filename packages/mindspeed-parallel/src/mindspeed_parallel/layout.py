"""A parallel layout: how many ways each axis of the work is cut. Free of any framework."""

import math
import re
from dataclasses import dataclass, fields

from mindspeed_kernels.errors import UserError

_SHORT = {"tp": "tensor", "pp": "pipeline", "vpp": "virtual", "cp": "context", "ep": "expert", "dp": "data"}
_TOKEN = re.compile(r"(vpp|tp|pp|cp|ep|dp)(\d+)|(sp)")


class LayoutError(UserError):
    """A layout that cannot be read or does not fit."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Degrees of every axis. Expert parallelism lives inside a pipeline stage and adds no ranks."""

    tensor: int = 1
    pipeline: int = 1
    virtual: int = 1  # model chunks a pipeline stage
    context: int = 1
    expert: int = 1
    data: int = 1
    sequence: bool = False  # sequence parallelism over the tensor axis

    def __post_init__(self) -> None:
        for item in fields(self):
            value = getattr(self, item.name)
            if item.name != "sequence" and value < 1:
                raise LayoutError(f"layout: {item.name}={value}; a degree is at least 1")
        if self.virtual > 1 and self.pipeline == 1:
            raise LayoutError(f"layout: vpp{self.virtual} needs a pipeline; use pp2 or more with it")
        if self.sequence and self.tensor == 1:
            raise LayoutError("layout: sp shares the work of the tensor axis; use tp2 or more with it")

    @property
    def ranks(self) -> int:
        """Processes that the layout takes."""
        return math.prod((self.tensor, self.pipeline, self.context, self.data))

    def __str__(self) -> str:
        parts = [f"{short}{value}" for short, name in _SHORT.items() if (value := getattr(self, name)) > 1]
        return "".join(parts + ["sp"] * self.sequence) or "tp1"


def parse_layout(text: str) -> Layout:
    """Read ``tp2pp2sp``, ``pp2vpp2``, ``dp2``, ``tp1``: any of tp pp vpp cp ep dp with a number, and sp."""
    degrees: dict[str, int | bool] = {}
    end = 0
    for match in _TOKEN.finditer(text):
        if match.start() != end:
            break
        end = match.end()
        name = "sequence" if match[3] else _SHORT[match[1]]
        if name in degrees:
            raise LayoutError(f"layout {text!r}: {match[0]} is the second word on one axis")
        degrees[name] = True if match[3] else int(match[2])
    if not text or end != len(text):
        raise LayoutError(
            f"layout {text!r}: cannot read {text[end:]!r}; use words like tp2 pp2 vpp2 cp2 ep2 dp2 sp, joined"
        )
    return Layout(**degrees)  # type: ignore[arg-type]
