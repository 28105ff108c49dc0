"""Tokenizers, with the chat template that is to be used."""

from pathlib import Path
from typing import Any

from ..errors import ModelError


def load_tokenizer(path: Path, chat_template: Path | None = None) -> Any:
    """The tokenizer of a Hugging Face folder, a GGUF file or a checkpoint, with ``chat_template`` in place of its own."""
    from transformers import AutoTokenizer

    folder, options = path, {}
    if path.is_file() or (path.is_dir() and not (path / "config.json").exists() and any(path.glob("*.gguf"))):
        file = path if path.is_file() else min(path.glob("*.gguf"))
        folder, options = file.parent, {"gguf_file": file.name}
    elif (path / "hf").is_dir():
        folder = path / "hf"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **options)
    except (OSError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise ModelError(f"{folder}: no tokenizer can be loaded ({reason}); name one with model.tokenizer") from error
    if not tokenizer.is_fast:
        raise ModelError(f"{folder}: its tokenizer has no fast form (tokenizer.json), which exact masks need")
    if chat_template is not None:
        try:
            tokenizer.chat_template = chat_template.read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"data.chat_template: {chat_template} cannot be read ({error})") from error
    return tokenizer
