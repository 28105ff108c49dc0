"""A tiny decoder that trains in any layout: what the tests run in rank processes.

The weights of the whole model are a function of their names, so that every layout starts from the same ones; what a
rank holds is described by megatron-core's sharded_state_dict.
"""

import contextlib
import zlib
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from mindspeed_kernels.bundle import Kernels
from mindspeed_kernels.device import open_device
from mindspeed_kernels.reference import fp64
from mindspeed_parallel.layout import parse_layout
from mindspeed_parallel.megatron import groups as megatron_groups
from mindspeed_parallel.megatron.config import DecoderConfig, PackedDocuments
from mindspeed_parallel.megatron.decoder import Decoder
from mindspeed_parallel.megatron.features import activate
from mindspeed_parallel.megatron.layers import LayerKind, Norm, decoder_layer
from mindspeed_parallel.megatron.rotary import Rotary
from mindspeed_runtime.launch import Rank, world
from torch.nn import functional

ROWS, LENGTH, NUM_TOKENS, HEAD_DIM = 2, 14, 61, 12
NUM_BATCHES = 4  # micro-batches of a global batch
WINDOWS = (None, 5, None, 3)


@dataclass(frozen=True)
class Outcome:
    """What one rank saw and holds after training. ``weights``: (name, offset) -> piece of the whole tensor."""

    losses: list
    norms: list
    weights: dict


@contextlib.contextmanager
def opened(rank: Rank, layout_text: str, features=None, reference=True):
    """Device, features and groups of a layout."""
    device, layout = open_device("cpu"), parse_layout(layout_text)
    with contextlib.ExitStack() as stack:
        stack.enter_context(world(rank, device, 60))
        if reference:
            stack.enter_context(fp64())
        stack.enter_context(activate(features or {}, device))
        yield stack.enter_context(megatron_groups.open(layout, rank.size, timeout_s=60))


def config_for(groups, **changes):
    layout = groups.layout
    options = {
        "num_layers": 4,
        "hidden_size": 40,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "kv_channels": HEAD_DIM,
        "ffn_hidden_size": 52,
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": functional.silu,
        "use_te_activation_func": True,
        "add_bias_linear": False,
        "qk_layernorm": True,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual if layout.virtual > 1 else None,
        "sequence_parallel": layout.sequence,
        "params_dtype": torch.float64,
        "pipeline_dtype": torch.float64,
        "use_cpu_initialization": True,
        "calculate_per_token_loss": True,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "gradient_accumulation_fusion": False,
        "finalize_model_grads_func": finalize_model_grads,
        "kernels": Kernels.for_device(open_device("cpu")),
        "windows": WINDOWS,
        "num_tokens": NUM_TOKENS,
        **megatron_groups.communication_options(layout, open_device("cpu")),
        **changes,
    }
    return DecoderConfig(**options)


def chunks_for(groups, config, norm=Norm):
    layout = groups.layout
    frequencies = 1e4 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    layer = decoder_layer(LayerKind(qk_norm="head", qkv_bias=True, o_bias=True), config, groups.pg)
    chunks = []
    for stage in range(layout.virtual):
        vp_stage = stage if layout.virtual > 1 else None
        number = get_num_layers_to_build(config, vp_stage=vp_stage, pp_rank=groups.pipeline_rank)
        chunk = Decoder(
            config,
            TransformerBlockSubmodules(layer_specs=[layer] * number, layer_norm=norm),
            vocab_size=64,
            max_sequence_length=LENGTH,
            pre_process=groups.is_first_stage and stage == 0,
            post_process=groups.is_last_stage and stage == layout.virtual - 1,
            position_embedding_type="rope",
            pg_collection=groups.pg,
            vp_stage=vp_stage,
            share_embeddings_and_output_weights=True,
        )
        chunk.use_rotary(Rotary(frequencies))
        chunks.append(chunk)
    fill(chunks, groups)
    return chunks


def shards(chunks, groups):
    """Every piece of every weight: (key, offset, whole shape, tensor)."""
    for chunk in chunks:
        metadata = {"non_homogeneous_layers": True, "dp_cp_group": groups.pg.dp_cp}
        for entry in chunk.sharded_state_dict(metadata=metadata).values():
            built = entry.build() if isinstance(entry, ShardedTensorFactory) else [entry]
            for item in built.values() if isinstance(built, dict) else built:
                if isinstance(getattr(item, "data", None), torch.Tensor):
                    yield item.key, tuple(item.global_offset), tuple(item.global_shape), item.data


def fill(chunks, groups):
    with torch.no_grad():
        for key, offset, whole, data in shards(chunks, groups):
            generator = torch.Generator().manual_seed(zlib.crc32(key.encode()))
            value = torch.randn(whole, generator=generator, dtype=torch.float64)
            value = value * 0.2 if len(whole) == 2 else 0.3 * value + key.endswith("norm.weight")
            data.copy_(value[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))])


def batches(seed):
    """Micro-batches of a global batch: tokens, labels (-1: untrained), positions, documents."""
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(NUM_BATCHES):
        tokens = torch.randint(0, NUM_TOKENS, (ROWS, LENGTH + 1), generator=generator)
        ends = torch.randint(3, LENGTH - 3, (ROWS, 1), generator=generator)
        at = torch.arange(LENGTH).expand(ROWS, -1)
        documents = (at >= ends).long() + 1
        # Gaps between positions: rotary angles are relative, so an even shift of a document would change nothing.
        gaps = torch.randint(1, 4, (ROWS, LENGTH), generator=generator).cumsum(1)
        positions = torch.where(at >= ends, gaps - gaps.gather(1, ends), gaps)
        labels = tokens[:, 1:].clone()
        labels[torch.randint(0, 10, labels.shape, generator=generator) < 3] = -1
        found.append((tokens[:, :-1].contiguous(), labels, positions, documents))
    return found


def forward_step(iterator, model):
    tokens, labels, positions, documents = next(iterator)
    losses = model(tokens, positions, None, labels=labels, packed_seq_params=PackedDocuments.of(documents, LENGTH))

    def summed(values):
        trained = labels >= 0
        total = (values * trained).sum()
        return total, trained.sum().int(), (total.detach(), trained.sum())

    return losses, summed


def gradients_of(chunks, groups, global_batch):
    """Forward and backward of a global batch; the mean loss of all trained tokens, on every rank."""
    mine = global_batch[groups.data_rank :: groups.layout.data]
    for chunk in chunks:
        chunk.zero_grad_buffer()
    iterators = [iter(mine) for _ in chunks]
    stored = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks,
        num_microbatches=len(mine),
        seq_length=LENGTH,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    sums = torch.zeros(2)
    for loss, count in stored if groups.is_last_stage and groups.tensor_rank == 0 else ():
        sums += torch.stack((loss, count.to(loss.dtype)))
    dist.all_reduce(sums)
    return float(sums[0] / sums[1])


def wrapped_for(chunks, groups, config):
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=True, overlap_grad_reduce=False)
    return [DistributedDataParallel(config, ddp, chunk, pg_collection=groups.pg) for chunk in chunks]


def optimizer_for(wrapped):
    options = OptimizerConfig(
        optimizer="adam", lr=3e-3, weight_decay=0.1, clip_grad=1.0, use_distributed_optimizer=True, bf16=False
    )
    return get_megatron_optimizer(options, wrapped, use_gloo_process_groups=False)


def train(rank: Rank, layout_text: str, changes=None, seed=None, steps=2) -> Outcome:
    """Train ``steps`` optimizer steps in the fp64 reference mode."""
    with opened(rank, layout_text) as groups:
        config = config_for(groups, **(changes or {}))
        chunks = chunks_for(groups, config)
        wrapped = wrapped_for(chunks, groups, config)
        optimizer = optimizer_for(wrapped)
        losses, norms = [], []
        for step in range(steps):
            groups.seed(seed or step)
            losses.append(gradients_of(wrapped, groups, batches(step)))
            _, norm, _ = optimizer.step()
            norms.append(float(norm))
        pieces = {(key, offset): data.clone() for key, offset, _, data in shards(chunks, groups)}
        return Outcome(losses=losses, norms=norms, weights=pieces)


def whole_weights(outcomes):
    """The tensors of the whole model from the pieces of all ranks; copies must agree."""
    boxes = {}
    for outcome in outcomes:
        for (key, offset), data in outcome.weights.items():
            known = boxes.setdefault(key, {}).setdefault(offset, data)
            assert torch.equal(known, data), f"the copies of {key} at {offset} differ"
    found = {}
    for key, pieces in boxes.items():
        shape = [max(o[d] + p.shape[d] for o, p in pieces.items()) for d in range(next(iter(pieces.values())).dim())]
        whole = torch.full(shape, torch.nan, dtype=torch.float64)
        for offset, data in pieces.items():
            whole[tuple(slice(o, o + n) for o, n in zip(offset, data.shape, strict=True))] = data
        assert not whole.isnan().any(), f"{key} has holes"
        found[key] = whole
    return found


def difference(outcomes, reference):
    """Largest relative difference of losses, gradient norms and weights, by kind."""
    weights, expected = whole_weights(outcomes), whole_weights(reference)
    assert weights.keys() == expected.keys()
    return {
        "loss": _relative(torch.tensor(outcomes[0].losses), torch.tensor(reference[0].losses)),
        "norm": _relative(torch.tensor(outcomes[0].norms), torch.tensor(reference[0].norms)),
        "weights": max(_relative(weights[key], expected[key]) for key in expected),
    }


def _relative(value, reference):
    return float((value.double() - reference.double()).abs().max() / reference.double().abs().max())


step_in_order = partial(train, steps=1)
