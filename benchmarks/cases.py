"""What is measured, each case against the plainest program that does the same."""

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mindspeed_kernels.bundle import Kernels
from mindspeed_kernels.device import Device
from mindspeed_models.testing import tiny_model, tiny_tokenizer
from mindspeed_models.text.encode import make_encoder
from mindspeed_models.weights.convert import to_hf, to_megatron
from mindspeed_models.weights.source import CheckpointSource, open_source
from mindspeed_parallel.layout import parse_layout
from mindspeed_runtime.config import build_recipe
from mindspeed_runtime.data.loader import Cut, Loader
from mindspeed_runtime.data.open import open_data
from mindspeed_runtime.data.prepare import Wanted, find, make
from mindspeed_runtime.launch import Pool
from mindspeed_runtime.recipe import Recipe
from mindspeed_train.prove import with_layout
from mindspeed_train.run import PRELOAD
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from .harness import Result, measure

STEP = "benchmarks.ranks:step"
SAVE, LOAD = "benchmarks.ranks:save", "benchmarks.ranks:load"
MANY_STEPS = "benchmarks.ranks:many_steps"
_SIZES: dict[str, Any] = {  # about 11 million parameters: enough that arithmetic counts, little enough for a laptop
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": 8000,
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    name: str
    ours: str
    peer: str
    run: Callable[[Path, int], Result]
    pairs: int = 7


def model_folder(folder: Path) -> Path:
    """A Qwen3 of the size that is measured, with a tokenizer."""
    path = folder / "model"
    if not path.exists():
        tiny_model("qwen3", **_SIZES).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
    return path


def recipe_for(folder: Path, layout: str = "tp1") -> Recipe:
    """Pre-training on this project's own text, 4 rows of 256 tokens a step."""
    text = folder / "text.jsonl"
    if not text.exists():
        lines = [path.read_text() for path in sorted(Path(torch.__file__).parent.glob("nn/modules/*.py"))]
        text.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines))
    tree = {
        "stage": "pretrain",
        "model": {"path": str(model_folder(folder))},
        "data": {"train": [str(text)], "sequence": 256},
        "training": {"steps": 100, "global_batch": 4, "micro_batch": 2, "precision": "fp32"},
        "optimizer": {"clip": None},
        "launch": {"device": "cpu"},
        "checkpoint": {"folder": str(folder / "out")},
    }
    return with_layout(build_recipe(tree), parse_layout(layout))


def _in_a_rank(function: str, folder: Path, pairs: int) -> Result:
    with Pool(1, preload=PRELOAD) as pool:
        return pool.run(function, recipe_for(folder), folder, pairs, timeout_s=600)[0]


def _pipeline(folder: Path, pairs: int) -> Result:
    with Pool(2, preload=PRELOAD) as pool:

        def steps(layout: str) -> object:
            size = parse_layout(layout).ranks
            return pool.run(MANY_STEPS, recipe_for(folder, layout), folder, 4, nproc=size, timeout_s=600)

        found = [(max(steps("pp2")), max(steps("tp1"))) for _ in range(pairs)]  # type: ignore[call-overload]
    return Result(ours=tuple(a for a, _ in found), peer=tuple(b for _, b in found))


def _to_megatron(folder: Path, pairs: int) -> Result:
    model = model_folder(folder)
    source = model / "model.safetensors"
    ours = partial(_fresh, folder / "ck", lambda out: to_megatron(open_source(model), out))
    return measure(ours, lambda: _copied(source, folder / "copy.safetensors"), pairs)


def _to_hf(folder: Path, pairs: int) -> Result:
    model = model_folder(folder)
    _fresh(folder / "ck", lambda out: to_megatron(open_source(model), out))
    ours = partial(_fresh, folder / "back", lambda out: to_hf(CheckpointSource(folder / "ck"), out))
    return measure(ours, lambda: _copied(model / "model.safetensors", folder / "copy.safetensors"), pairs)


def _fresh(out: Path, write: Callable[[Path], None]) -> None:
    shutil.rmtree(out, ignore_errors=True)
    write(out)


def _copied(source: Path, target: Path) -> None:
    save_file({name: tensor.clone() for name, tensor in load_file(source).items()}, target)


def _tokenise(folder: Path, pairs: int) -> Result:
    recipe = recipe_for(folder)
    encoder = make_encoder(tiny_tokenizer(), recipe.data, _SIZES["vocab_size"])
    wanted = Wanted(name="bench", patterns=recipe.data.train, cache=folder / "cache", sequence=None)
    tokenizer = tiny_tokenizer()

    def plain() -> None:
        with open(recipe.data.train[0]) as file:
            ids = [tokenizer(json.loads(line)["text"], add_special_tokens=False)["input_ids"] for line in file]
        np.concatenate([np.asarray(row, np.int32) for row in ids]).tofile(folder / "plain.bin")

    return measure(lambda: _fresh(find(wanted, encoder), lambda out: make(wanted, encoder, out)), plain, pairs)


def _batches(folder: Path, pairs: int) -> Result:
    recipe = recipe_for(folder)
    cut = Cut(global_batch=64, micro_batch=64, data_rank=0, data_size=1)
    loader: Loader = open_data(
        recipe,
        lambda: make_encoder(tiny_tokenizer(), recipe.data, _SIZES["vocab_size"]),
        cut,
        cache=folder / "data",
        share=lambda value: value,
        is_main=True,
    ).train
    tokens = np.random.default_rng(0).integers(0, 8000, 4_000_000, np.int32)
    tokens.tofile(folder / "plain.bin")
    mapped = np.memmap(folder / "plain.bin", np.int32, "r")
    order = np.random.default_rng(0).permutation(len(mapped) // 256 - 1)

    def plain() -> None:
        for step in range(50):
            rows = [mapped[256 * n : 256 * n + 257] for n in order[64 * step % 8000 :][:64]]
            batch = torch.from_numpy(np.stack(rows)).long()
            batch[:, :-1].contiguous(), batch[:, 1:].contiguous()

    return measure(lambda: [loader.step(step) for step in range(50)], plain, pairs)


def _start(program: str, folder: Path, pairs: int) -> Result:
    del folder
    path = Path(sys.executable).with_name(program)
    ours = partial(subprocess.run, [str(path), "--help"], check=True, capture_output=True)
    peer = partial(subprocess.run, [sys.executable, "-c", "import click"], check=True, capture_output=True)
    return measure(ours, peer, pairs)


def _operator(name: str, folder: Path, pairs: int) -> Result:
    del folder
    ours = getattr(Kernels.for_device(Device(kind="cpu")), name)
    with _threads(1):
        make_inputs, peer, options = _OPERATORS[name]
        inputs = make_inputs()
        return measure(partial(_both_ways, ours, inputs, options), partial(_both_ways, peer, inputs, {}), pairs)


def _both_ways(function: Callable[..., Tensor], inputs: list[Tensor], options: dict[str, Any]) -> None:
    for _ in range(5):
        function(*inputs, **options).sum().backward()


@contextlib.contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    yield
    torch.set_num_threads(before)


def _rand(*shape: int) -> Tensor:
    return torch.randn(*shape).requires_grad_()


def _plain_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)


def _plain_swiglu(x: Tensor) -> Tensor:
    gate, up = x.split(x.shape[-1] // 2, -1)
    return functional.silu(gate) * up


_OPERATORS: dict[str, tuple[Callable[[], list[Tensor]], Callable[..., Tensor], dict[str, Any]]] = {
    "rms_norm": (
        lambda: [_rand(4, 256, 512), _rand(512)],
        lambda x, w: functional.rms_norm(x, (512,), w, 1e-6),
        {"eps": 1e-6},
    ),
    "swiglu": (lambda: [_rand(4, 256, 2048)], _plain_swiglu, {}),
    "attention": (lambda: [_rand(2, 256, 8, 64), _rand(2, 256, 4, 64), _rand(2, 256, 4, 64)], _plain_sdpa, {}),
}

CASES = {
    case.name: case
    for case in (
        Case(name="step", ours="engine, one process", peer="transformers + torch.optim.AdamW",
             run=partial(_in_a_rank, STEP)),
        Case(name="pipeline", ours="pp2, two processes of one thread", peer="one process of one thread",
             run=_pipeline, pairs=3),
        Case(name="save", ours="checkpoint of weights and optimizer", peer="torch.save, fsync",
             run=partial(_in_a_rank, SAVE)),
        Case(name="load", ours="the same, read back", peer="torch.load and copy", run=partial(_in_a_rank, LOAD)),
        Case(name="to-megatron", ours="mindspeed-convert to-megatron", peer="safetensors read, written",
             run=_to_megatron),
        Case(name="to-hf", ours="mindspeed-convert to-hf", peer="safetensors read, written", run=_to_hf),
        Case(name="tokenise", ours="text into a token store", peer="the tokenizer in a loop", run=_tokenise, pairs=5),
        Case(name="batches", ours="50 batches of the loader", peer="slices of a memory map", run=_batches),
        Case(name="start-train", ours="mindspeed-train --help", peer="python -c 'import click'",
             run=partial(_start, "mindspeed-train")),
        Case(name="start-convert", ours="mindspeed-convert --help", peer="python -c 'import click'",
             run=partial(_start, "mindspeed-convert")),
        *(
            Case(name=name, ours=f"{name}, forward and backward", peer="torch's own", run=partial(_operator, name))
            for name in _OPERATORS
        ),
    )
}  # fmt: skip
