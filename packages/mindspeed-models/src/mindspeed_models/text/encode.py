"""Rows to tokens, with an exact account of which are trained.

Chat rows. What the model reads before an answer is what inference will give it: the template's own rendering of the
messages so far with the generation prompt, tokenised by itself. The answer is what the template appends to that when
the answer is there, up to the first special token after its text, the one that generation stops at. Exactly the tokens
of answers are trained, whatever the template does:

- where each prompt's tokens begin with those of the turn before, all turns share one document;
- where they do not (a template that drops earlier thinking, a token that merges across a seam), each turn becomes a
  document of its own, its prompt untrained;
- where the rendering of an answer does not begin with its prompt, the row is refused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
from mindspeed_runtime.data.open import Encoder
from mindspeed_runtime.data.prepare import RowError
from mindspeed_runtime.data.sources import Row
from mindspeed_runtime.data.store import Example
from mindspeed_runtime.recipe import DataConfig

from ..errors import ModelError

Message = Mapping[str, Any]
_ROLES = ("system", "user", "assistant", "tool")


@dataclass(frozen=True, kw_only=True)
class Turn:
    """One answer: the tokens before it and its own."""

    prompt: list[int]
    answer: list[int]  # the last one ends the turn


def make_encoder(tokenizer: Any, data: DataConfig, vocabulary: int) -> Encoder:
    """How rows of ``data.format`` become documents for a model of ``vocabulary`` tokens.

    ModelError when the format needs a template that is not there, or the tokenizer is of a larger model.
    """
    if len(tokenizer) > vocabulary:
        raise ModelError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {vocabulary}; name the model's own in model.tokenizer"
        )
    if data.format == "text":
        encode = _text_encoder(tokenizer, data.text_key)
    else:
        if not tokenizer.chat_template:
            raise ModelError("the tokenizer has no chat template; name a file with one in data.chat_template")
        to_messages = {"messages": messages_of, "alpaca": alpaca_messages}[data.format]

        def encode(row: Row) -> list[Example]:
            return encode_chat(tokenizer, to_messages(row.content))

    key = f"{data.format} {data.text_key} {tokenizer.chat_template} {tokenizer.backend_tokenizer.to_str()}"
    return Encoder(encode=encode, key=key, vocabulary=len(tokenizer))


def encode_text(tokenizer: Any, text: str) -> Example:
    """A document as the tokenizer encodes it, ended by its end token; all of it is trained."""
    ids = list(tokenizer(text).input_ids)
    if tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has no end-of-sequence token to end documents with")
    if not ids or ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    return Example(tokens=ids, trained=[True] * len(ids))


def encode_chat(tokenizer: Any, messages: Sequence[Message]) -> list[Example]:
    """Documents of a conversation, in which exactly the answers are trained. RowError when that cannot be."""
    turns = [turn_of(tokenizer, messages[:at], message) for at, message in enumerate(messages) if _is_answer(message)]
    if not turns:
        raise RowError("no assistant message to learn from")
    joined = _joined(turns)
    if joined is not None:
        return [joined]
    return [
        Example(tokens=turn.prompt + turn.answer, trained=[False] * len(turn.prompt) + [True] * len(turn.answer))
        for turn in turns
    ]


def turn_of(tokenizer: Any, before: Sequence[Message], answer: Message) -> Turn:
    """The prompt that inference gives before ``answer``, and the tokens that it should then produce."""
    text = answer["content"]
    if not isinstance(text, str) or not text.strip():
        raise RowError("an assistant message is empty")
    prompt = render(tokenizer, before, add_generation_prompt=True)
    whole = render(tokenizer, [*before, answer], add_generation_prompt=False)
    if not whole.startswith(prompt):
        raise RowError("the chat template renders the answer otherwise than after its generation prompt")
    completion = whole[len(prompt) :]
    start = completion.find(text.strip())
    if start < 0:
        raise RowError("the chat template changes the text of the answer")
    encoded = tokenizer(completion, add_special_tokens=False, return_offsets_mapping=True)
    special = set(tokenizer.all_special_ids) | {
        number for number, token in tokenizer.added_tokens_decoder.items() if token.special
    }
    end = start + len(text.strip())
    for position, (number, (first, _)) in enumerate(zip(encoded.input_ids, encoded.offset_mapping, strict=True)):
        if first >= end and number in special:
            prompt_ids = list(tokenizer(prompt, add_special_tokens=False).input_ids)
            return Turn(prompt=prompt_ids, answer=list(encoded.input_ids[: position + 1]))
    raise RowError("the chat template puts no end token after an answer, so the model would not learn to stop")


def render(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    """The template's text of ``messages``."""
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except (jinja2.TemplateError, TypeError, KeyError, ValueError) as error:
        raise RowError(f"the chat template refuses the conversation: {error}") from error


def messages_of(content: Any) -> list[Message]:
    """Messages of a row ``{"messages": [{"role": ..., "content": ...}]}``. RowError, by name, for what is not that."""
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
        raise RowError("no list under the key 'messages'")
    if not content["messages"]:
        raise RowError("'messages' is empty")
    for number, message in enumerate(content["messages"]):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise RowError(f"messages[{number}] has no role among {', '.join(_ROLES)}")
        if not isinstance(message.get("content"), str):
            raise RowError(f"messages[{number}].content is not text")
    return content["messages"]


def alpaca_messages(content: Any) -> list[Message]:
    """Messages of a row with instruction, input (may be null or absent), output, and perhaps system."""
    if not isinstance(content, dict):
        raise RowError("not an object with instruction and output")
    for key in ("instruction", "output"):
        if key not in content:
            raise RowError(f"no key '{key}'")
        if not isinstance(content[key], str) or not content[key].strip():
            raise RowError(f"'{key}' is {'empty' if content[key] in (None, '') else 'not text'}")
    for key in ("input", "system"):
        if not isinstance(content.get(key), str | None):
            raise RowError(f"'{key}' is not text")
    asked = "\n\n".join(part for part in (content["instruction"], content.get("input")) if part)
    system = [{"role": "system", "content": content["system"]}] if content.get("system") else []
    return [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": content["output"]}]


def _text_encoder(tokenizer: Any, key: str) -> Any:
    def encode(row: Row) -> list[Example]:
        content = row.content
        if isinstance(content, dict):
            if key not in content:
                raise RowError(f"no key '{key}' (data.text_key)")
            content = content[key]
        if content is None:
            return []
        if not isinstance(content, str):
            raise RowError("the text is not a string")
        return [encode_text(tokenizer, content)] if content.strip() else []

    return encode


def _is_answer(message: Message) -> bool:
    return message["role"] == "assistant"


def _joined(turns: Sequence[Turn]) -> Example | None:
    """One document of all turns, or None where a later prompt does not begin with what came before."""
    tokens: list[int] = []
    trained: list[bool] = []
    for turn in turns:
        if turn.prompt[: len(tokens)] != tokens:
            return None
        between = turn.prompt[len(tokens) :]
        tokens += between + turn.answer
        trained += [False] * len(between) + [True] * len(turn.answer)
    return Example(tokens=tokens, trained=trained)
