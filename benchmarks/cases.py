"""What is measured, each case against the plainest program that does the same."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from . import conversion, operators, programs, tokens, training
from .harness import Result


@dataclass(frozen=True, kw_only=True)
class Case:
    """One comparison."""

    name: str
    ours: str
    peer: str
    run: Callable[[Path, int], Result]  # in an empty folder, so many pairs
    pairs: int = 9


_TRAINING = (
    *(
        Case(name=f"step-{precision}", ours="engine, one process", peer="transformers, torch.optim.AdamW",
             run=partial(training.step, precision), pairs=7)
        for precision in ("fp32", "bf16")
    ),
    Case(name="pipeline", ours="two processes of one thread",
         peer=f"one process of one thread (ideal {training.IDEAL:.2f})", run=training.pipeline, pairs=5),
    Case(name="save", ours="checkpoint of weights and optimizer", peer="torch.save, fsync", run=training.save),
    Case(name="load", ours="the same, read back", peer="torch.load and copy", run=training.load),
)  # fmt: skip
_FILES = (
    Case(name="to-megatron", ours="mindspeed-convert to-megatron", peer="safetensors read, written, fsync",
         run=conversion.to_megatron),
    Case(name="to-hf", ours="mindspeed-convert to-hf", peer="safetensors read, written, fsync", run=conversion.to_hf),
    Case(name="tokenise-text", ours="text into a token store", peer="the tokenizer in a loop", run=tokens.text,
         pairs=7),
    Case(name="tokenise-chat", ours="conversations, answers marked", peer="template and tokenizer in a loop",
         run=tokens.chat, pairs=5),
    Case(name="batches", ours="batches of the loader", peer="slices of a memory map", run=tokens.batches),
)  # fmt: skip
_PROGRAMS = tuple(
    Case(name=f"{short}-{word}", ours=f"{program} --help", peer=f'python -c "{peer}"',
         run=partial(programs.start, program, peer))
    for short, program in (("train", "mindspeed-train"), ("convert", "mindspeed-convert"))
    for word, peer in (("click", "import click"), ("bare", "pass"))
)  # fmt: skip
_OPERATORS = (
    Case(name="rms_norm", ours="reference", peer="functional.rms_norm", run=partial(operators.operator, "rms_norm")),
    Case(name="swiglu", ours="reference", peer="functional.silu(a) * b", run=partial(operators.operator, "swiglu")),
    Case(name="rotary", ours="reference", peer="the formula of transformers",
         run=partial(operators.operator, "rotary")),
    Case(name="attention", ours="reference", peer="scaled_dot_product_attention",
         run=partial(operators.operator, "attention")),
    Case(name="attention-auto", ours="the one taken on a CPU", peer="scaled_dot_product_attention",
         run=partial(operators.operator, "attention-auto")),
)  # fmt: skip
CASES = {case.name: case for case in (*_TRAINING, *_FILES, *_PROGRAMS, *_OPERATORS)}
