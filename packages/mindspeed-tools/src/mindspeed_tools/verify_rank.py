"""The part of verification that computes: transformers once, then our model in a layout, on the same tokens.

Activations are compared by the names that both sides have in common: the embedding, in each layer its two norms, its
attention and its MLP, the final norm, the logits, the loss.   Letters: B rows, S tokens, V vocabulary.
"""

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from mindspeed_kernels.reference import fp64, untouched
from mindspeed_models.families.settings import SAME_AS, transformers_config
from mindspeed_models.weights.gguf import GGUFSource
from mindspeed_models.weights.shards import Piece, save_pieces
from mindspeed_models.weights.source import open_source
from mindspeed_parallel.layout import Layout
from mindspeed_runtime.data.batch import Batch
from mindspeed_runtime.launch import Rank
from mindspeed_train.session import Session, open_session
from torch import Tensor, nn

from .verify_recipe import LENGTH, recipe_of

ROWS = 2
GRADIENTS = "gradients.pt"  # those of transformers, by its names
_DTYPES = {"fp64": torch.float64, "fp32": torch.float32, "bf16": torch.bfloat16}
_THEIRS = {  # our module of a layer: what transformers calls it
    "input_layernorm": ("input_layernorm", "norm"),
    "self_attention": ("self_attn", "linear_attn", "mamba", "mixer"),
    "pre_mlp_layernorm": ("pre_feedforward_layernorm", "pre_ff_layernorm", "post_attention_layernorm"),
    "mlp": ("mlp", "feed_forward"),
}
_FINAL_NORM = ("norm", "norm_f", "final_layernorm")


def reference(rank: Rank, model: Path, precision: str, folder: Path, gradients: bool) -> float:
    """Run the transformers model and write its activations; returns the tolerance that bf16 deserves.

    That is twice the error that transformers' own bf16 makes against fp64. ``gradients``: write those of the mean loss
    too, in fp64.
    """
    if gradients:
        torch.save(_transformers_gradients(model), folder / GRADIENTS)
    exact = _transformers(model, "fp64" if precision != "fp32" else "fp32")
    torch.save(exact, folder / "reference.pt")
    if precision != "bf16":
        return 0.0
    rough = _transformers(model, "bf16")
    return 2 * max(_difference(exact[name], rough[name]) for name in ("logits", "loss"))


def computed(
    rank: Rank, checkpoint: Path, layout: Layout, precision: str, folder: Path, tolerance: float
) -> dict[str, Any]:
    """Run our model in ``layout`` and compare it with the reference."""
    expected = torch.load(folder / "reference.pt")
    recipe = recipe_of(checkpoint, layout, precision)
    with open_session(rank, recipe, reference=precision == "fp64", trains=False) as session:
        batch = _batch(session.arch.vocab)
        with torch.no_grad(), _watched(session) as seen:
            logits = session.model.logits(batch.tokens)
        with torch.no_grad():
            loss = session.model.token_losses(batch)
        everything = _gathered(session, seen)
    found = {"logits": _difference(expected["logits"], logits), "loss": _difference(expected["loss"], loss)}
    if all(value <= tolerance for value in found.values()):
        return found
    everything |= {"logits": logits, "loss": loss}
    modules = {name: _difference(expected[name], everything[name]) for name in expected if name in everything}
    first = next((name for name, value in modules.items() if not value <= tolerance), None)
    return {**found, "modules": modules, "first": first}


def gradients(rank: Rank, checkpoint: Path, layout: Layout, folder: Path) -> None:
    """Write the gradients of the mean loss in ``layout`` below ``folder``, as pieces of the whole tensors."""
    with open_session(rank, recipe_of(checkpoint, layout, "fp64"), reference=True) as session:
        engine = session.engine
        engine.forward_backward(0, engine.repeated(_batch(session.arch.vocab)))
        if engine.is_main:
            folder.mkdir()
        engine.share(None)
        found: list[Piece] = []
        for parameter, pieces in engine.pieces().items():
            if not isinstance(parameter, nn.Parameter):
                continue  # a buffer
            flat = parameter.main_grad.view(-1)  # pyright: ignore[reportAttributeAccessIssue]  megatron-core's
            for piece in pieces:
                if piece.is_main:
                    view = flat[piece.start : piece.start + piece.tensor.numel()].view(piece.box.shape)
                    found.append(Piece(box=piece.box, dtype=view.dtype, fill=view))
        save_pieces(folder, found)


def _transformers_gradients(path: Path) -> dict[str, Tensor]:
    from transformers.core_model_loading import revert_weight_conversion

    with fp64():
        model = _load(path, torch.float64)
        model.get_input_embeddings().padding_idx = (
            None  # else the padding token's row learns nothing, wherever it stands
        )
        batch = _batch(model.config.vocab_size)
        logits = model(input_ids=batch.tokens, use_cache=False).logits
        nn.functional.cross_entropy(logits.flatten(0, 1), batch.labels.flatten()).backward()
        found = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
        return revert_weight_conversion(model, found)  # transformers stacks experts; files do not


def _batch(vocabulary: int) -> Batch:
    generator = torch.Generator().manual_seed(20)
    with untouched():
        ids = torch.randint(0, vocabulary, (ROWS, LENGTH + 1), generator=generator)
        positions = torch.arange(LENGTH).expand(ROWS, -1).contiguous()
        return Batch(ids[:, :-1].contiguous(), ids[:, 1:].contiguous(), positions, None)


def _transformers(path: Path, precision: str) -> dict[str, Tensor]:
    mode = fp64() if precision == "fp64" else contextlib.nullcontext()
    with mode, torch.no_grad():
        model = _load(path, _DTYPES[precision])
        batch = _batch(model.config.vocab_size)
        seen: dict[str, Tensor] = {}
        for name, module in _named(model):
            module.register_forward_hook(_keeping(seen, name, _first))
        logits = model(input_ids=batch.tokens, use_cache=False).logits
        wide = logits.double().flatten(0, 1)
        seen["logits"] = logits
        seen["loss"] = nn.functional.cross_entropy(wide, batch.labels.flatten(), reduction="none").view(ROWS, LENGTH)
    return seen


def _load(path: Path, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    source = open_source(path)
    options: dict[str, Any] = {"attn_implementation": "eager", "experts_implementation": "eager", "dtype": dtype}
    folder = path
    if source.config["model_type"] in SAME_AS:
        options["config"] = transformers_config(source.config)
    if isinstance(source, GGUFSource):
        folder, options["gguf_file"] = source.path.parent, source.path.name
    return AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def _named(model: Any) -> Iterator[tuple[str, nn.Module]]:
    yield "embedding", model.get_input_embeddings()
    for number, layer in enumerate(model.base_model.layers):
        for ours, theirs in _THEIRS.items():
            if (module := _first_of(layer, theirs)) is not None:
                yield f"layers.{number}.{ours}", module
    if (norm := _first_of(model.base_model, _FINAL_NORM)) is not None:
        yield "final_layernorm", norm


def _first_of(module: nn.Module, names: tuple[str, ...]) -> nn.Module | None:
    """The first of ``names`` that the module has; where one is of a norm behind attention, another comes before it."""
    return next((getattr(module, name) for name in names if hasattr(module, name)), None)


@contextlib.contextmanager
def _watched(session: Session) -> Iterator[dict[str, Tensor]]:
    """Outputs of this rank's modules during the block, as (B, S, ...)."""
    seen: dict[str, Tensor] = {}
    handles = []
    chunks: list[Any] = session.model.chunks
    for chunk in chunks:
        watched = [("embedding", getattr(chunk, "embedding", None)), ("final_layernorm", chunk.decoder.final_layernorm)]
        for layer in chunk.decoder.layers:
            watched += [(f"layers.{layer.layer_number - 1}.{name}", getattr(layer, name)) for name in _THEIRS]
        for name, module in watched:
            if module is not None:
                handles.append(module.register_forward_hook(_keeping(seen, name, partial(_whole, session))))
    try:
        yield seen
    finally:
        for handle in handles:
            handle.remove()


def _keeping(seen: dict[str, Tensor], name: str, read: Callable[[Any], Tensor]) -> Callable[..., None]:
    def hook(_module: nn.Module, _inputs: Any, out: Any) -> None:
        seen.setdefault(name, read(out))

    return hook


def _whole(session: Session, out: Any) -> Tensor:
    """The output of a module of ours with its bias added, its sequence gathered, as (B, S, ...)."""
    value = out
    if isinstance(out, tuple):
        value = out[0] if out[1] is None else out[0] + out[1]
    if session.groups.layout.sequence:
        parts = [torch.empty_like(value) for _ in range(session.groups.layout.tensor)]
        dist.all_gather(parts, value.contiguous(), group=session.groups.pg.tp)
        value = torch.cat(parts)
    # A copy: megatron-core adds the residual into this very tensor.
    return value.transpose(0, 1).detach().clone()


def _gathered(session: Session, seen: dict[str, Tensor]) -> dict[str, Tensor]:
    """What every pipeline stage saw, on every rank."""
    found: list[Any] = [None] * session.groups.layout.pipeline
    dist.all_gather_object(found, {name: value.cpu() for name, value in seen.items()}, group=session.groups.pg.pp)
    return {name: value for part in found for name, value in part.items()}


def _first(out: Any) -> Tensor:
    return (out[0] if isinstance(out, tuple) else out).detach().clone()


def _difference(expected: Tensor, found: Tensor) -> float:
    """The largest difference, relative to the largest expected value."""
    a, b = expected.double().cpu(), found.double().cpu()
    return ((a - b).abs().max() / a.abs().max()).item() if a.shape == b.shape else float("inf")
