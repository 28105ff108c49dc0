"""What the weight tests run in rank processes."""

import contextlib

import torch
from mindspeed_kernels.bundle import Kernels
from mindspeed_kernels.device import open_device
from mindspeed_models.megatron.build import BuildOptions, build, load_hf
from mindspeed_models.megatron.checkpoint import load_model, save_model
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
    return {f"{n}.{name}": p.detach().clone() for n, chunk in enumerate(chunks) for name, p in chunk.named_parameters()}


def loaded_by_megatron(rank, layout, checkpoint):
    """Parameters as megatron-core's own dist_checkpointing reads them, and as this project does."""
    from megatron.core import dist_checkpointing

    source = open_source(checkpoint)
    with built(rank, layout, source) as (chunks, pg):
        ours = {}
        for fill in (load_hf, load_model):
            for chunk in chunks:
                for parameter in chunk.parameters():
                    parameter.data.fill_(float("nan"))
            first = source if fill is load_hf else checkpoint / "model"
            fill(chunks, first, num_tokens=source.arch.vocab, pg=pg)
            ours[fill.__name__] = _weights(chunks)
        for chunk in chunks:
            for parameter in chunk.parameters():
                parameter.data.fill_(float("nan"))
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
            held = sum(parameter.numel() for chunk in chunks for parameter in chunk.parameters())
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
