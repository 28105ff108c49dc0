"""From rows to tokens and from tokens to batches."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mindspeed_models.testing import tiny_tokenizer
from mindspeed_models.text.encode import make_encoder
from mindspeed_runtime.data.loader import Cut
from mindspeed_runtime.data.open import open_data
from mindspeed_runtime.data.prepare import Encoder, Wanted, find, make

from .harness import Result, measure
from .subjects import SEQUENCE, VOCABULARY, recipe_for

_ROWS, _STEPS = 64, 50


def text(folder: Path, pairs: int) -> Result:
    """Rows of text into a token store."""
    tokenizer = tiny_tokenizer()
    return _tokenised(folder, "text", lambda row: tokenizer(row["text"]).input_ids, pairs)


def chat(folder: Path, pairs: int) -> Result:
    """Conversations into a token store that says which tokens are trained."""
    tokenizer = tiny_tokenizer()

    def plain(row: Any) -> list[int]:
        rendered = tokenizer.apply_chat_template(row["messages"], tokenize=False)
        return tokenizer(rendered, add_special_tokens=False).input_ids

    return _tokenised(folder, "messages", plain, pairs)


def _tokenised(folder: Path, data_format: str, plain: Callable[[Any], list[int]], pairs: int) -> Result:
    recipe = recipe_for(folder, data_format=data_format)
    encoder = _encoder(recipe)
    (source,) = recipe.data.train
    wanted = Wanted(name="bench", patterns=(source,), cache=folder / "cache", sequence=None)

    def peer() -> None:
        with Path(source).open() as file, (folder / "cache" / "plain.bin").open("wb") as out:
            for line in file:
                out.write(np.asarray(plain(json.loads(line)), np.uint16).tobytes())

    def emptied() -> None:
        shutil.rmtree(folder / "cache", ignore_errors=True)
        (folder / "cache").mkdir()

    return measure(lambda: make(wanted, encoder, find(wanted, encoder)), peer, pairs, before=emptied)


def batches(folder: Path, pairs: int) -> Result:
    """Batches of text, from the store and from a memory map of its own file of tokens."""
    recipe = recipe_for(folder)
    loader = open_data(
        recipe,
        partial(_encoder, recipe),
        Cut(global_batch=_ROWS, micro_batch=_ROWS, data_rank=0, data_size=1),
        cache=folder / "data",
        share=lambda value: value,
        is_main=True,
    ).train
    (path,) = (folder / "data").glob("*/tokens.bin")
    mapped = np.memmap(path, np.uint16, "r")
    order = np.random.default_rng(0).permutation((len(mapped) - 1) // SEQUENCE)

    def peer() -> None:
        for step in range(_STEPS):
            numbers = np.take(order, range(step * _ROWS, (step + 1) * _ROWS), mode="wrap")
            rows = np.stack([mapped[n * SEQUENCE : (n + 1) * SEQUENCE + 1] for n in numbers.tolist()])
            found = torch.from_numpy(rows.astype(np.int64))
            found[:, :-1].contiguous(), found[:, 1:].contiguous()

    return measure(lambda: [loader.step(step) for step in range(_STEPS)], peer, pairs)


def _encoder(recipe: Any) -> Encoder:
    return make_encoder(tiny_tokenizer(), recipe.data, VOCABULARY)
