"""The models, texts and recipes that are measured on."""

import json
from pathlib import Path
from typing import Any

import torch
from mindspeed_models.testing import tiny_model, tiny_tokenizer
from mindspeed_parallel.layout import parse_layout
from mindspeed_runtime.config import build_recipe
from mindspeed_runtime.recipe import Recipe
from mindspeed_train.prove import with_layout

VOCABULARY = 8000
SEQUENCE = 256
_TRAINED: dict[str, Any] = {  # 11 million parameters: enough that arithmetic counts, little enough for a laptop
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "vocab_size": VOCABULARY,
}
_CONVERTED: dict[str, Any] = {  # 75 million, 150 MB in bfloat16
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 8,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 16000,
}
_ROW, _MESSAGE = 1500, 300  # characters


def trained_model(folder: Path) -> Path:
    """The Qwen3 that is trained, with a tokenizer."""
    return _saved(folder / "model", _TRAINED, torch.float32)


def converted_model(folder: Path) -> Path:
    """The larger Qwen3 that is converted."""
    return _saved(folder / "large", _CONVERTED, torch.bfloat16)


def text_rows(folder: Path) -> Path:
    """PyTorch's own sources as rows of text."""
    lines = [json.dumps({"text": piece}) for piece in _pieces(_ROW)]
    return _written(folder / "text.jsonl", lines)


def chat_rows(folder: Path) -> Path:
    """The same as conversations of two turns."""
    found = _pieces(_MESSAGE)
    rows = []
    for number in range(0, len(found) - 3, 4):
        roles = ("user", "assistant", "user", "assistant")
        messages = [
            {"role": role, "content": piece.strip()}
            for role, piece in zip(roles, found[number : number + 4], strict=True)
        ]
        rows.append(json.dumps({"messages": messages}))
    return _written(folder / "chat.jsonl", rows)


def recipe_for(
    folder: Path,
    layout: str = "tp1",
    *,
    data_format: str = "text",
    precision: str = "fp32",
    rows: tuple[int, int] = (4, 2),
) -> Recipe:
    """A recipe over the rows of ``data_format``. ``rows``: of an optimizer step, and of a micro-batch."""
    global_batch, micro_batch = rows
    tree = {
        "stage": "pretrain" if data_format == "text" else "sft",
        "model": {"path": str(trained_model(folder))},
        "data": {
            "train": [str(text_rows(folder) if data_format == "text" else chat_rows(folder))],
            "format": data_format,
            "sequence": SEQUENCE,
        },
        "training": {"steps": 100, "global_batch": global_batch, "micro_batch": micro_batch, "precision": precision},
        "optimizer": {"clip": 1.0, "decay_1d": True},
        "launch": {"device": "cpu"},
        "checkpoint": {"folder": str(folder / "out")},
    }
    return with_layout(build_recipe(tree), parse_layout(layout))


def _saved(path: Path, sizes: dict[str, Any], dtype: torch.dtype) -> Path:
    if not path.exists():
        tiny_model("qwen3", dtype=dtype, **sizes).save_pretrained(path)
        tiny_tokenizer().save_pretrained(path)
    return path


def _pieces(size: int) -> list[str]:
    text = "".join(path.read_text() for path in sorted(Path(torch.__file__).parent.glob("nn/modules/*.py")))
    return [text[start : start + size] for start in range(0, len(text), size)]


def _written(path: Path, lines: list[str]) -> Path:
    if not path.exists():
        path.write_text("".join(line + "\n" for line in lines))
    return path
