"""Weight rules: one tensor of ours, the Hugging Face tensors that it is made of, and the order of their rows.

A rule is data and runs both ways. Its order lists row ranges of its sources, each row exactly once; so packing and
unpacking are inverse by construction, any slice can be made from the bytes that it needs, and "every source element
used, every target element written once" is a statement about ranges of integers.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..errors import WeightError

Reader = Callable[[str, tuple[slice, ...]], Tensor]  # Hugging Face name, slices -> that part of the tensor


@dataclass(frozen=True, kw_only=True)
class Segment:
    """Rows ``start`` to ``stop`` of the ``source``-th Hugging Face tensor."""

    source: int
    start: int
    stop: int


@dataclass(frozen=True, kw_only=True)
class Rule:
    """How one tensor of ours and its sources in Hugging Face format make each other.

    A stack is a tensor of blocks, one an expert, that are all made alike: ``hf`` names the sources of all blocks, and
    ``rows`` and ``order`` speak of one.
    """

    ours: str  # canonical name; {L} is the layer
    hf: tuple[str, ...]
    rows: tuple[int, ...]  # of each source
    width: int | tuple[int, ...] | None  # columns, or all axes after the rows; None: vectors
    order: tuple[Segment, ...]  # our rows, in order
    cut: int | None  # axis that tensor parallelism cuts; None: replicated
    stack: int | None = None  # blocks; None: the tensor is no stack
    layers: tuple[int, ...] | None = None  # the layers that have it; None: all
    is_trained: bool = True  # False: part of the model, and never given a gradient

    def __post_init__(self) -> None:
        if len(self.hf) != len(self.rows) * (self.stack or 1):
            raise WeightError(f"{self.ours}: {len(self.hf)} sources for {self.stack or 1} x {len(self.rows)}")
        for source, rows in enumerate(self.rows):
            spans = sorted((item.start, item.stop) for item in self.order if item.source == source)
            ends = [0, *(stop for _, stop in spans)]
            if [start for start, _ in spans] != ends[:-1] or ends[-1] != rows:
                raise WeightError(f"{self.ours}: the order does not use every row of {self.hf[source]} exactly once")

    @property
    def shape(self) -> tuple[int, ...]:
        """Of our whole tensor."""
        block = (sum(self.rows), *self._others)
        return block if self.stack is None else (self.stack, *block)

    def hf_shape(self, source: int) -> tuple[int, ...]:
        """Of one Hugging Face tensor."""
        return (self.rows[source % len(self.rows)], *self._others)

    @property
    def _others(self) -> tuple[int, ...]:
        """Of the axes after the rows."""
        if self.width is None:
            return ()
        return self.width if isinstance(self.width, tuple) else (self.width,)

    def at(self, layer: int) -> "Rule":
        """The rule of one layer."""
        number = str(layer)
        names = tuple(name.replace("{L}", number) for name in self.hf)
        return replace(self, ours=self.ours.replace("{L}", number), hf=names)

    def blocks(self) -> list["Rule"]:
        """The rule of each block of a stack; itself, alone, where there is no stack."""
        if self.stack is None:
            return [self]
        count = len(self.rows)
        return [
            replace(self, hf=self.hf[number * count : (number + 1) * count], stack=None) for number in range(self.stack)
        ]

    def pack(self, read: Reader, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        """The box of our tensor at ``offset`` of ``shape``, from the parts of the sources that it needs."""
        if self.stack is not None:
            blocks = self.blocks()[offset[0] : offset[0] + shape[0]]
            return torch.stack([block.pack(read, offset[1:], shape[1:]) for block in blocks])
        columns = tuple(slice(o, o + n) for o, n in zip(offset[1:], shape[1:], strict=True))
        segments = list(self._within(offset[0], offset[0] + shape[0]))
        first = read(self.hf[segments[0].source], (slice(segments[0].start, segments[0].stop), *columns))
        if len(segments) == 1:
            return first
        whole, at = first.new_empty(tuple(shape)), 0
        for number, item in enumerate(segments):
            part = first if number == 0 else read(self.hf[item.source], (slice(item.start, item.stop), *columns))
            if part.dtype != first.dtype:
                raise WeightError(
                    f"{self.ours}: its sources have different dtypes ({self.hf[segments[0].source]} {first.dtype}, "
                    f"{self.hf[item.source]} {part.dtype}); cast them to one first"
                )
            whole[at : at + len(part)] = part
            at += len(part)
        return whole

    def unpack(self, whole: Tensor) -> list[Tensor]:
        """The Hugging Face tensors that our whole tensor is made of."""
        if self.stack is not None:
            return [part for block, own in zip(self.blocks(), whole, strict=True) for part in block.unpack(own)]
        if len(self.order) == 1:
            return [whole]
        found = [whole.new_empty(self.hf_shape(source)) for source in range(len(self.hf))]
        start = 0
        for item in self.order:
            length = item.stop - item.start
            found[item.source][item.start : item.stop] = whole[start : start + length]
            start += length
        return found

    def _within(self, first: int, last: int) -> Iterator[Segment]:
        start = 0
        for item in self.order:
            length = item.stop - item.start
            low, high = max(first - start, 0), min(last - start, length)
            if low < high:
                yield Segment(source=item.source, start=item.start + low, stop=item.start + high)
            start += length


def stacked(*rows: int) -> tuple[Segment, ...]:
    """The order of sources that stand whole, one after the other."""
    return tuple(Segment(source=source, start=0, stop=count) for source, count in enumerate(rows))


def expanded(rules: Iterable[Rule], num_layers: int) -> dict[str, Rule]:
    """The rules of every layer, by our name, in the order of a forward pass."""
    rules = tuple(rules)
    found: list[Rule] = []
    layered = [rule for rule in rules if "{L}" in rule.ours]
    first = [rule for rule in rules if rule.ours.startswith("embedding.")]
    found += first
    for layer in range(num_layers):
        found += [rule.at(layer) for rule in layered if rule.layers is None or layer in rule.layers]
    found += [rule for rule in rules if rule not in first and "{L}" not in rule.ours]
    return {rule.ours: rule for rule in found}


def cover(rules: Mapping[str, Rule], shapes: Mapping[str, Sequence[int]]) -> None:
    """WeightError unless the Hugging Face tensors are exactly those that the rules name, in their shapes."""
    claimed: dict[str, tuple[int, ...]] = {}
    for rule in rules.values():
        for source, name in enumerate(rule.hf):
            if name in claimed:
                raise WeightError(f"{name}: two rules use it")
            claimed[name] = rule.hf_shape(source)
    if missing := [name for name in claimed if name not in shapes]:
        raise WeightError(
            f"{missing[0]}: not in the weight files{_others(missing)}; the download is incomplete, "
            "or config.json is of another model"
        )
    if strays := [name for name in shapes if name not in claimed]:
        raise WeightError(
            f"{strays[0]}: in the weight files, and no part of the model that config.json describes{_others(strays)}"
        )
    for name, shape in claimed.items():
        if tuple(shapes[name]) != shape:
            raise WeightError(f"{name}: has shape {tuple(shapes[name])}, config.json means {shape}")


def _others(names: Sequence[str]) -> str:
    return f" (and {len(names) - 1} more)" if len(names) > 1 else ""
