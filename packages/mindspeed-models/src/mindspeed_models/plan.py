"""What a recipe takes on every rank, in integers, before a device or a weight is touched.

Divisibility first: each axis against the model. Then bytes of weights, gradients and optimizer state, as megatron-core
allocates them, buffers' padding included, to the byte.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mindspeed_parallel.mixers import Delta, Latent, Ssm
from mindspeed_runtime.config import ConfigError
from mindspeed_runtime.recipe import Recipe

from .families import Arch

_ALIGN_PARAMETER = 64  # elements: where a parameter starts in megatron-core's buffers
_ALIGN_BUCKET = 128  # elements: where a bucket ends
_FP32 = 4
_DTYPE_BYTES = {"bf16": 2, "fp32": 4}


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """One rank: where it stands and what it holds."""

    rank: int
    tensor_rank: int
    pipeline_rank: int
    data_rank: int
    layers: tuple[tuple[int, ...], ...]  # layer numbers of each chunk
    parameters: int  # weights held, tied copies and the vocabulary's padding included
    parameter_bytes: int
    gradient_bytes: int
    optimizer_bytes: int

    @property
    def total_bytes(self) -> int:
        """All that is held from step to step."""
        return self.parameter_bytes + self.gradient_bytes + self.optimizer_bytes


@dataclass(frozen=True, kw_only=True)
class Plan:
    """A whole run."""

    ranks: tuple[RankPlan, ...]
    model_parameters: int  # of the model itself, without copies and padding
    data_size: int
    microbatches: int  # of each data rank, an optimizer step


def make_plan(recipe: Recipe, arch: Arch, num_ranks: int) -> Plan:
    """The plan of ``recipe`` on ``num_ranks`` processes. ConfigError for what does not fit, with what would."""
    check_plan(recipe, arch, num_ranks)
    parallel = recipe.parallel
    data_size = num_ranks // (parallel.tensor * parallel.pipeline)
    ranks = tuple(_rank_plan(recipe, arch, rank, data_size) for rank in range(num_ranks))
    microbatches = recipe.training.global_batch // (recipe.training.micro_batch * data_size)
    return Plan(ranks=ranks, model_parameters=num_parameters(arch), data_size=data_size, microbatches=microbatches)


def heaviest_rank(recipe: Recipe, arch: Arch, num_ranks: int) -> RankPlan:
    """The rank that holds most. ConfigError for what does not fit.

    Tensor and data ranks of a stage hold the same but for padding, so one of each stage is looked at.
    """
    check_plan(recipe, arch, num_ranks)
    data_size = num_ranks // (recipe.parallel.tensor * recipe.parallel.pipeline)
    firsts = range(0, num_ranks, num_ranks // recipe.parallel.pipeline)
    plans = (_rank_plan(recipe, arch, rank, data_size) for rank in firsts)
    return max(plans, key=lambda plan: plan.total_bytes)


def num_parameters(arch: Arch) -> int:
    """How many weights the model has; tied ones count once."""
    layers = tuple(range(arch.num_layers))
    shapes = [*_shapes(arch, 1, layers, first=True, last=True), *_expert_shapes(arch, 1, layers)]
    return sum(math.prod(shape) for shape in shapes)


def check_plan(recipe: Recipe, arch: Arch, num_ranks: int) -> None:
    """ConfigError for the first axis that does not divide the model, naming the key and what would do."""
    parallel = recipe.parallel
    if parallel.context > 1:
        raise ConfigError(f"parallel.context={parallel.context}: not supported for family {arch.family}; use 1")
    tensor, cut = parallel.tensor, cut_sizes(arch)
    for name, size in cut.items():
        if size % tensor:
            good = ", ".join(map(str, divisors(math.gcd(*cut.values()))))
            raise ConfigError(f"parallel.tensor={tensor}: {size} {name} do not divide by it; use one of {good}")
    _check_experts(recipe, arch, num_ranks // parallel.pipeline)
    chunks = parallel.pipeline * recipe.megatron.virtual
    layers = recipe.megatron.layers
    if layers is None:
        if arch.num_layers % chunks:
            good = [n for n in divisors(arch.num_layers) if n % recipe.megatron.virtual == 0]
            stages = ", ".join(str(n // recipe.megatron.virtual) for n in good)
            raise ConfigError(
                f"parallel.pipeline={parallel.pipeline}: {arch.num_layers} layers do not divide into {chunks} chunks "
                f"(pipeline x virtual); use a pipeline of {stages}, or list the layers of each chunk in megatron.layers"
            )
        return
    if len(layers) != chunks:
        raise ConfigError(f"megatron.layers: {len(layers)} numbers for {chunks} chunks (pipeline x virtual)")
    if min(layers) < 1:
        raise ConfigError("megatron.layers: every chunk needs at least one layer")
    if sum(layers) != arch.num_layers:
        raise ConfigError(f"megatron.layers: add up to {sum(layers)}, the model has {arch.num_layers} layers")


def cut_sizes(arch: Arch) -> dict[str, int]:
    """What tensor ranks share out."""
    sizes: dict[str, int] = {}
    if arch.attention_layers:
        sizes |= {"heads": arch.num_heads, "kv heads": arch.num_kv_heads}
    if arch.delta is not None:
        sizes["key heads of delta networks"] = arch.delta.key_heads
    if arch.ssm is not None:
        sizes["groups of Mamba heads"] = arch.ssm.groups
    if arch.mlp_layers:
        sizes["MLP columns"] = arch.ffn
    if arch.moe is not None and arch.moe.shared_ffn:
        sizes["columns of the shared expert"] = arch.moe.shared_ffn
    return sizes


def _check_experts(recipe: Recipe, arch: Arch, stage: int) -> None:
    """``stage``: ranks of a pipeline stage."""
    parallel, expert = recipe.parallel, recipe.parallel.expert
    if arch.moe is None or not arch.expert_layers:
        if expert > 1:
            raise ConfigError(f"parallel.expert={expert}: family {arch.family} has no experts; use 1")
        return
    if parallel.tensor > 1 and not parallel.sequence:
        raise ConfigError(
            f"parallel.tensor={parallel.tensor}: tensor ranks that hold experts share out the tokens; set "
            "parallel.sequence to true"
        )
    for what, size in (("experts", arch.moe.num_experts), ("ranks of a pipeline stage", stage)):
        if size % expert:
            good = ", ".join(map(str, divisors(math.gcd(arch.moe.num_experts, stage))))
            raise ConfigError(f"parallel.expert={expert}: {size} {what} do not divide by it; use one of {good}")


def chunk_layers(recipe: Recipe, arch: Arch, pipeline_rank: int) -> tuple[tuple[int, ...], ...]:
    """Layer numbers of each chunk of a stage. Chunks are dealt in turn: chunk c of stage p is number c x stages + p."""
    stages, virtual = recipe.parallel.pipeline, recipe.megatron.virtual
    counts = recipe.megatron.layers or (arch.num_layers // (stages * virtual),) * (stages * virtual)
    starts = [sum(counts[:number]) for number in range(len(counts))]
    numbers = [chunk * stages + pipeline_rank for chunk in range(virtual)]
    return tuple(tuple(range(starts[n], starts[n] + counts[n])) for n in numbers)


def _rank_plan(recipe: Recipe, arch: Arch, rank: int, data_size: int) -> RankPlan:
    parallel = recipe.parallel
    tensor_rank = rank % parallel.tensor
    data_rank = rank // parallel.tensor % data_size
    pipeline_rank = rank // (parallel.tensor * data_size)
    layers = chunk_layers(recipe, arch, pipeline_rank)
    itemsize = _DTYPE_BYTES[recipe.training.precision]
    sharded = recipe.megatron.distributed_optimizer
    parameters = parameter_bytes = gradient_bytes = owned = 0
    for chunk, numbers in enumerate(layers):
        first = pipeline_rank == 0 and chunk == 0
        last = pipeline_rank == parallel.pipeline - 1 and chunk == len(layers) - 1
        shapes = _shapes(arch, parallel.tensor, numbers, first=first, last=last)
        shared = arch.tied and parallel.pipeline > 1 and (first or last)
        tied_at = _shared_at(first) if shared else None
        # Experts lie in buffers of their own: other ranks hold copies of them.
        held = [([math.prod(shape) for shape in shapes], data_rank, data_size, tied_at)]
        if experts := [math.prod(shape) for shape in _expert_shapes(arch, parallel.expert, numbers)]:
            copies = parallel.tensor * data_size // parallel.expert
            held.append((experts, rank % (parallel.tensor * data_size) // parallel.expert, copies, None))
        for sizes, copy, copies, alone in held:
            buffer = _buffer(sizes, sharded=sharded, data_size=copies, shared=alone)
            parameters += sum(sizes)
            parameter_bytes += (buffer.numel if sharded else sum(sizes)) * itemsize
            gradient_bytes += buffer.numel * _FP32
            owned += buffer.owned(copy, copies) if sharded else sum(sizes)
    states = 3 if itemsize < _FP32 else 2  # two moments, and fp32 weights where the model's are narrower
    return RankPlan(
        rank=rank,
        tensor_rank=tensor_rank,
        pipeline_rank=pipeline_rank,
        data_rank=data_rank,
        layers=layers,
        parameters=parameters,
        parameter_bytes=parameter_bytes,
        gradient_bytes=gradient_bytes,
        optimizer_bytes=owned * states * _FP32,
    )


def _shapes(arch: Arch, tensor: int, layers: Sequence[int], *, first: bool, last: bool) -> list[tuple[int, ...]]:
    """Local shapes of all but experts, in the order in which the modules hold them."""
    vocabulary = -(-arch.vocab // tensor)
    shapes: list[tuple[int, ...]] = [(vocabulary, arch.hidden)] if first else []
    for layer in layers:
        shapes += _layer_shapes(arch, tensor, layer)
    if last:
        shapes.append((arch.hidden,))
        if not arch.tied or not first:
            shapes.append((vocabulary, arch.hidden))
    return shapes


def _expert_shapes(arch: Arch, expert: int, layers: Sequence[int]) -> Iterator[tuple[int, ...]]:
    for layer in layers:
        if arch.moe is not None and layer in arch.expert_layers:
            number = arch.moe.num_experts // expert
            yield (number, 2 * arch.moe.ffn, arch.hidden)
            yield from [(number, 2 * arch.moe.ffn)] * arch.moe.biased
            yield (number, arch.hidden, arch.moe.ffn)
            yield from [(number, arch.hidden)] * arch.moe.biased


def _layer_shapes(arch: Arch, tensor: int, layer: int) -> Iterator[tuple[int, ...]]:
    ffn = arch.ffn // tensor
    yield from [(arch.hidden,)] * arch.pre_norms
    yield from _mixer_shapes(arch, tensor, layer)
    if layer not in arch.mlp_layers and layer not in arch.expert_layers:
        return
    yield from [(arch.hidden,)] * (arch.post_norms + arch.pre_norms)
    if arch.moe is not None and layer in arch.expert_layers:
        yield (arch.moe.num_experts, arch.hidden)
        yield from [(arch.moe.num_experts,)] * arch.moe.biased
        yield from [(1, arch.hidden)] * arch.moe.shared_gate
        if shared := arch.moe.shared_ffn // tensor:
            yield (2 * shared, arch.hidden)
            yield (arch.hidden, shared)
    else:
        yield (2 * ffn, arch.hidden)
        yield from [(2 * ffn,)] * arch.mlp_bias
        yield (arch.hidden, ffn)
        yield from [(arch.hidden,)] * arch.mlp_bias
    yield from [(arch.hidden,)] * arch.post_norms


def _mixer_shapes(arch: Arch, tensor: int, layer: int) -> Iterator[tuple[int, ...]]:
    if layer in arch.recurrent and arch.delta is not None:
        return _delta_shapes(arch, arch.delta, tensor)
    if layer in arch.recurrent and arch.ssm is not None:
        return _ssm_shapes(arch, arch.ssm, tensor)
    return _attention_shapes(arch, tensor) if arch.latent is None else _latent_shapes(arch, arch.latent, tensor)


def _delta_shapes(arch: Arch, delta: Delta, tensor: int) -> Iterator[tuple[int, ...]]:
    keys, values, heads = delta.key_heads * delta.key_dim, delta.value_heads * delta.value_dim, delta.value_heads
    yield from [(heads // tensor,)] * 2
    yield ((2 * keys + 2 * values + 2 * heads) // tensor, arch.hidden)
    yield ((2 * keys + values) // tensor, 1, delta.conv)
    yield (arch.hidden, values // tensor)
    yield (delta.value_dim,)


def _ssm_shapes(arch: Arch, ssm: Ssm, tensor: int) -> Iterator[tuple[int, ...]]:
    width, shared = ssm.heads * ssm.head_dim // tensor, 2 * ssm.groups * ssm.state // tensor
    rows, channels = 2 * width + shared + ssm.heads // tensor, width + shared
    yield from [(ssm.heads // tensor,)] * 3
    yield (rows, arch.hidden)
    yield from [(rows,)] * ssm.bias
    yield (channels, 1, ssm.conv)
    yield from [(channels,)] * ssm.conv_bias
    yield (arch.hidden, width)
    yield from [(arch.hidden,)] * ssm.bias
    yield (width,)


def _attention_shapes(arch: Arch, tensor: int) -> Iterator[tuple[int, ...]]:
    yield from [(arch.num_heads // tensor,)] * arch.has_sinks
    qkv = (arch.query_rows * (1 + arch.output_gate) + 2 * arch.kv_rows) // tensor
    yield (arch.hidden, arch.query_rows // tensor)
    yield from [(arch.hidden,)] * arch.o_bias
    yield (qkv, arch.hidden)
    yield from [(qkv,)] * arch.qkv_bias
    if arch.qk_norm == "head":
        yield from [(arch.head_dim,)] * 2
    if arch.qk_norm == "wide":
        yield from [(arch.query_rows // tensor,), (arch.kv_rows // tensor,)]


def _latent_shapes(arch: Arch, latent: Latent, tensor: int) -> Iterator[tuple[int, ...]]:
    ways = [(latent.kv_rank, latent.kv_rank + latent.turned, arch.num_heads * (latent.plain + latent.value))]
    if latent.q_rank:
        ways.insert(0, (latent.q_rank, latent.q_rank, arch.query_rows))
    else:
        yield (arch.query_rows // tensor, arch.hidden)
    for rank, narrow, wide in ways:
        yield (narrow, arch.hidden)
        yield from [(narrow,)] * latent.bias
        yield (rank,)
        yield (wide // tensor, rank)
    yield (arch.hidden, arch.value_rows // tensor)
    yield from [(arch.hidden,)] * arch.o_bias


@dataclass(frozen=True, kw_only=True)
class _Buffer:
    """One of megatron-core's contiguous buffers: what lies where, and how it is dealt to data ranks."""

    numel: int
    spans: tuple[tuple[int, int], ...]  # of parameters
    buckets: tuple[tuple[int, int], ...]

    def owned(self, data_rank: int, data_size: int) -> int:
        """Elements of parameters in the shares of one data rank."""
        total = 0
        for begin, end in self.buckets:
            share = (end - begin) // data_size
            low = begin + data_rank * share
            total += sum(max(0, min(stop, low + share) - max(start, low)) for start, stop in self.spans)
        return total


def _buffer(sizes: Sequence[int], *, sharded: bool, data_size: int, shared: int | None) -> _Buffer:
    """Lay parameters out from the last to the first. ``shared``: index of the tied copy, which has a bucket of its own."""
    if not sharded:
        return _Buffer(numel=sum(sizes), spans=(), buckets=())
    multiple = math.lcm(data_size, _ALIGN_BUCKET)
    at, begin = 0, 0
    spans: list[tuple[int, int]] = []
    buckets: list[tuple[int, int]] = []
    alone = None if shared is None else shared % len(sizes)
    for index in reversed(range(len(sizes))):
        at = _up(at, _ALIGN_PARAMETER)
        if index == alone and at > begin and spans and spans[-1][1] > begin:
            at = _up(at, multiple)
            buckets.append((begin, at))
            begin = at
        spans.append((at, at + sizes[index]))
        at += sizes[index]
        if index == alone:
            at = _up(at, multiple)
            buckets.append((begin, at))
            begin = at
    if spans[-1][1] > begin:
        at = _up(at, multiple)
        buckets.append((begin, at))
    return _Buffer(numel=at, spans=tuple(spans), buckets=tuple(buckets))


def _shared_at(first: bool) -> int:
    """Index of the tied weight: the embedding stands first, its copy last."""
    return 0 if first else -1


def _up(number: int, multiple: int) -> int:
    return -(-number // multiple) * multiple


def divisors(number: int) -> list[int]:
    """All of them, in order."""
    return [n for n in range(1, number + 1) if number % n == 0]
