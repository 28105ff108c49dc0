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
    """Rows ``start`` to ``stop`` of the ``source``-th Hugging Face tensor, or every ``step``-th of them."""

    source: int
    start: int
    stop: int
    step: int = 1

    @property
    def rows(self) -> range:
        """Their numbers."""
        return range(self.start, self.stop, self.step)

    @property
    def slice(self) -> slice:
        """What picks them."""
        return slice(self.start, self.stop, None if self.step == 1 else self.step)


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
        blocks = self._blocks_with_sources_of_their_own()
        if len(self.hf) != len(self.rows) * blocks:
            raise WeightError(f"{self.ours}: {len(self.hf)} sources for {blocks} x {len(self.rows)}")
        for source, rows in enumerate(self.rows):
            segments = [item for item in self.order if item.source == source]
            if not _covers(segments, rows):
                raise WeightError(f"{self.ours}: the order does not use every row of {self.hf[source]} exactly once")

    def _blocks_with_sources_of_their_own(self) -> int:
        return self.stack or 1

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
        first = read(self.hf[segments[0].source], (segments[0].slice, *columns))
        if len(segments) == 1:
            return first
        whole, at = first.new_empty(tuple(shape)), 0
        for number, item in enumerate(segments):
            part = first if number == 0 else read(self.hf[item.source], (item.slice, *columns))
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
            length = len(item.rows)
            found[item.source][item.slice] = whole[start : start + length]
            start += length
        return found

    def parts(self) -> list[tuple["Rule", tuple[int, ...], tuple[int, ...]]]:
        """The least parts of our tensor that are whole Hugging Face tensors: rule, offset and shape of each."""
        if self.stack is None:
            return [(self, (0,) * len(self.shape), self.shape)]
        origin, shape = (0,) * (len(self.shape) - 1), (1, *self.shape[1:])
        return [(block, (number, *origin), shape) for number, block in enumerate(self.blocks())]

    def _within(self, first: int, last: int) -> Iterator[Segment]:
        start = 0
        for item in self.order:
            length = len(item.rows)
            low, high = max(first - start, 0), min(last - start, length)
            if low < high:
                at, step = item.start, item.step
                yield Segment(source=item.source, start=at + low * step, stop=at + (high - 1) * step + 1, step=step)
            start += length


@dataclass(frozen=True, kw_only=True)
class FusedRule(Rule):
    """A stack whose blocks are all in one Hugging Face tensor, one after the other."""

    transposed: bool = False  # with columns before rows

    def _blocks_with_sources_of_their_own(self) -> int:
        return 1

    def hf_shape(self, source: int) -> tuple[int, ...]:
        assert self.stack is not None
        block = super().hf_shape(source)
        return (self.stack, *(reversed(block) if self.transposed else block))

    def blocks(self) -> list[Rule]:
        """The rule of each block, as if it had a source of its own."""
        fields = {name: getattr(self, name) for name in ("ours", "hf", "rows", "width", "order", "cut")}
        return [Rule(**fields)] * (self.stack or 1)

    def pack(self, read: Reader, offset: Sequence[int], shape: Sequence[int]) -> Tensor:
        found = []
        for number in range(offset[0], offset[0] + shape[0]):
            sources = {name: read(name, (slice(number, number + 1), *self._all(name)))[0] for name in self.hf}
            if self.transposed:
                sources = {name: source.mT for name, source in sources.items()}
            block = self.blocks()[number]
            found.append(block.pack(lambda name, part, held=sources: held[name][part], offset[1:], shape[1:]))
        return torch.stack(found)

    def unpack(self, whole: Tensor) -> list[Tensor]:
        parts = zip(*(block.unpack(own) for block, own in zip(self.blocks(), whole, strict=True)), strict=True)
        return [torch.stack([part.mT if self.transposed else part for part in source]) for source in parts]

    def parts(self) -> list[tuple[Rule, tuple[int, ...], tuple[int, ...]]]:
        return [(self, (0,) * len(self.shape), self.shape)]

    def _all(self, name: str) -> tuple[slice, ...]:
        return tuple(slice(0, size) for size in self.hf_shape(self.hf.index(name))[1:])


def _covers(segments: Sequence[Segment], rows: int) -> bool:
    """Whether the segments are all rows, each once."""
    if all(item.step == 1 for item in segments):
        spans = sorted((item.start, item.stop) for item in segments)
        ends = [0, *(stop for _, stop in spans)]
        return [start for start, _ in spans] == ends[:-1] and ends[-1] == rows
    return sorted(row for item in segments for row in item.rows) == list(range(rows))


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
