"""What the weight tests run in rank processes."""

import contextlib
from unittest import mock

import torch
from mindspeed_kernels.bundle import Kernels
from mindspeed_kernels.device import open_device
from mindspeed_models.megatron.build import BuildOptions, build, load_hf, padded_vocabulary
from mindspeed_models.megatron.checkpoint import load_model, save_model
from mindspeed_models.megatron.geometry import local_pieces
from mindspeed_models.weights.safetensors_files import SafetensorsFolder
from mindspeed_models.weights.source import open_source
from mindspeed_parallel.layout import parse_layout
from mindspeed_parallel.megatron import groups as megatron_groups
from mindspeed_parallel.megatron.features import activate
from mindspeed_runtime.launch import world


@contextlib.contextmanager
def built(rank, layout, source):
    """Chunks of the model in a layout, their weights not filled."""
    device = open_device("cpu")
    with contextlib.ExitStack() as stack:
        stack.enter_context(world(rank, device, 60))
        stack.enter_context(activate({}, device))
        groups = stack.enter_context(megatron_groups.open(parse_layout(layout), rank.size, timeout_s=60))
        options = BuildOptions(dtype=torch.float32)
        chunks = build(source.arch, groups=groups, kernels=Kernels.for_device(device), device=device, options=options)
        yield chunks, groups.pg


def _weights(chunks):
    return {
        f"{n}.{name}": tensor.detach().clone()
        for n, chunk in enumerate(chunks)
        for name, tensor in (*chunk.named_parameters(), *chunk.named_buffers())
    }


def _spoil(chunk):
    for tensor in (*chunk.parameters(), *chunk.buffers()):
        tensor.data.fill_(float("nan"))


def loaded_by_megatron(rank, layout, checkpoint):
    """Parameters as megatron-core's own dist_checkpointing reads them, and as this project does."""
    from megatron.core import dist_checkpointing

    source = open_source(checkpoint)
    with built(rank, layout, source) as (chunks, pg):
        ours = {}
        for fill in (load_hf, load_model):
            for chunk in chunks:
                _spoil(chunk)
            first = source if fill is load_hf else checkpoint / "model"
            fill(chunks, first, num_tokens=source.arch.vocab, pg=pg)
            ours[fill.__name__] = _weights(chunks)
        for chunk in chunks:
            _spoil(chunk)
        metadata = {"non_homogeneous_layers": True, "dp_cp_group": pg.dp_cp}
        wanted = {f"model{n}": chunk.sharded_state_dict(metadata=metadata) for n, chunk in enumerate(chunks)}
        strict = dist_checkpointing.validation.StrictHandling.RETURN_ALL
        found, missing, unexpected = dist_checkpointing.load(wanted, str(checkpoint / "model"), strict=strict)
        assert not missing  # in the checkpoint, asked for by no rank
        # What layers of Transformer Engine keep beside their weights; here it is empty.
        assert all("_extra_state" in key for key in unexpected), unexpected
        for n, chunk in enumerate(chunks):
            chunk.load_state_dict(found[f"model{n}"], strict=False)
        return _weights(chunks), ours


def stock_logits(rank, layout, checkpoint, tokens, *, qk_norm, tied):
    """Logits of megatron-core's own GPTModel, of its own layers, that has read a checkpoint by its own means."""
    from megatron.core import dist_checkpointing
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.moe import moe_utils

    arch = open_source(checkpoint).arch
    device = open_device("cpu")
    with contextlib.ExitStack() as stack:
        stack.enter_context(world(rank, device, 60))
        stack.enter_context(activate({}, device))
        # Its router asks for this name of Transformer Engine, which without that library is not bound. Ours does not.
        stack.enter_context(mock.patch.object(moe_utils, "te_general_gemm", None, create=True))
        groups = stack.enter_context(megatron_groups.open(parse_layout(layout), rank.size, timeout_s=60))
        experts = None if arch.moe is None else arch.moe.num_experts
        config = TransformerConfig(
            num_layers=arch.num_layers,
            hidden_size=arch.hidden,
            num_attention_heads=arch.num_heads,
            num_query_groups=arch.num_kv_heads,
            kv_channels=arch.head_dim,
            ffn_hidden_size=arch.ffn,
            normalization="RMSNorm",
            layernorm_epsilon=arch.norm_eps,
            activation_func=torch.nn.functional.silu,
            gated_linear_unit=True,
            add_bias_linear=False,
            qk_layernorm=qk_norm,
            hidden_dropout=0.0,
            attention_dropout=0.0,
            bias_activation_fusion=False,
            masked_softmax_fusion=False,
            gradient_accumulation_fusion=False,
            tensor_model_parallel_size=groups.layout.tensor,
            expert_model_parallel_size=groups.layout.expert,
            expert_tensor_parallel_size=1,
            num_moe_experts=experts,
            moe_ffn_hidden_size=None if arch.moe is None else arch.moe.ffn,
            moe_router_topk=2,
            moe_router_load_balancing_type="none",
            moe_token_dispatcher_type="alltoall",
            use_cpu_initialization=True,
        )
        spec = get_gpt_layer_local_spec(num_experts=experts, normalization="RMSNorm", qk_layernorm=qk_norm)
        if experts:
            # Layers of Transformer Engine, which trainings have, store this norm under its own name.
            del spec.submodules.sharded_state_dict_keys_map["pre_mlp_layernorm."]
        model = GPTModel(
            config,
            spec,
            vocab_size=padded_vocabulary(arch.vocab, groups.layout.tensor),
            max_sequence_length=64,
            position_embedding_type="rope",
            rotary_base=arch.rope.theta,
            share_embeddings_and_output_weights=tied,
            parallel_output=False,
        )
        wanted = model.sharded_state_dict(metadata={"non_homogeneous_layers": True})
        # Not there: what layers of Transformer Engine keep beside their weights, which is empty here.
        strict = dist_checkpointing.validation.StrictHandling.RETURN_ALL
        found, missing, unexpected = dist_checkpointing.load(wanted, str(checkpoint / "model"), strict=strict)
        assert not missing and all("_extra_state" in key for key in unexpected), (missing, unexpected)
        model.load_state_dict(found, strict=False)
        length = tokens.shape[1]
        positions = torch.arange(length)[None].expand(tokens.shape)
        hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
        with torch.no_grad():
            return model(tokens, positions, hidden)[..., : arch.vocab]


def saved_again(rank, layout, checkpoint, folder):
    """Load a checkpoint in a layout and save it anew."""
    source = open_source(checkpoint)
    with built(rank, layout, source) as (chunks, pg):
        load_model(chunks, checkpoint / "model", num_tokens=source.arch.vocab, pg=pg)
        save_model(chunks, folder, num_tokens=source.arch.vocab, pg=pg)


def bytes_read(rank, layout, model):
    """How many elements of the weight files each rank reads to fill its own weights, and how many it holds."""
    source = open_source(model)
    read = 0
    true_read = SafetensorsFolder.read

    def counting(self, name, part=()):
        nonlocal read
        tensor = true_read(self, name, part)
        read += tensor.numel()
        return tensor

    SafetensorsFolder.read = counting
    try:
        with built(rank, layout, source) as (chunks, pg):
            load_hf(chunks, source, num_tokens=source.arch.vocab, pg=pg)
            held = sum(tensor.numel() for tensor in local_pieces(chunks, source.arch.vocab, pg))
            padding = _padding(chunks, source.arch.vocab, pg)
    finally:
        SafetensorsFolder.read = true_read
    return read, held - padding


def _padding(chunks, vocab, pg):
    """Elements of this rank's vocabulary rows that no token has."""
    found = 0
    for chunk in chunks:
        for name, parameter in chunk.named_parameters():
            if "word_embeddings" in name or "output_layer" in name:
                first = pg.tp.rank() * parameter.shape[0]
                found += max(0, first + parameter.shape[0] - max(vocab, first)) * parameter.shape[1]
    return found
