"""Tokenizers, with the chat template that is to be used."""

import json
import struct
from pathlib import Path
from typing import Any

from ..errors import ModelError

_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "*.tiktoken")  # any of these makes one
_HINT = "name a folder with one in model.tokenizer"


def load_tokenizer(path: Path, chat_template: Path | None = None) -> Any:
    """The tokenizer of a Hugging Face folder, a GGUF file or a checkpoint, with ``chat_template`` in place of its own.

    Reads local files only. ModelError for what is absent or damaged.
    """
    from transformers import AutoTokenizer

    folder, options = _place(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, LookupError, TypeError, struct.error) as error:
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ModelError(f"{path}: its tokenizer cannot be loaded ({reason}); {_HINT}") from error
    if not tokenizer.is_fast:
        raise ModelError(f"{path}: its tokenizer has no fast form (tokenizer.json), which exact masks need; {_HINT}")
    if chat_template is not None:
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"data.chat_template: {chat_template} cannot be read ({error})") from error
    return tokenizer


def _place(path: Path) -> tuple[Path, dict[str, Any]]:
    """The folder to load from, and how."""
    if not path.exists():
        raise ModelError(f"{path}: no such file or folder; {_HINT}")
    if path.is_file() and path.suffix != ".gguf":
        raise ModelError(f"{path}: neither a folder nor a .gguf file; {_HINT}")
    if (path / "hf").is_dir():
        path /= "hf"
    if path.is_dir() and any(any(path.glob(name)) for name in _FILES):
        _check(path / "tokenizer.json")
        return path, {}
    file = path if path.is_file() else min(path.glob("*.gguf"), default=None)
    if file is None:
        raise ModelError(f"{path}: no tokenizer there (tokenizer.json, tokenizer.model or a .gguf file); {_HINT}")
    return file.parent, {"gguf_file": file.name}


def _check(path: Path) -> None:
    """What the tokenizers library would only call an exception."""
    if not path.is_file():
        return
    try:
        content = json.loads(path.read_bytes())
    except ValueError as error:
        raise ModelError(f"{path}: damaged ({error}); fetch the file again") from error
    if not isinstance(content, dict) or not {"model", "added_tokens"} <= content.keys():
        raise ModelError(f"{path}: not a tokenizer (no model or added_tokens in it); fetch the file again")
