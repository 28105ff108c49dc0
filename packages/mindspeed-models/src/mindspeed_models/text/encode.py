"""Rows to tokens, with an exact account of which are trained.

Chat rows. What the model reads before an answer is what inference will give it: the template's own rendering of the
messages so far with the generation prompt, tokenised by itself. The answer is what the template appends to that when
the answer is there, up to the first special token after its text, the one that generation stops at. Exactly the tokens
of answers are trained, whatever the template does:

- where each prompt's tokens begin with those of the turn before, all turns share one document;
- where they do not (a template that drops earlier thinking, a token that merges across a seam), each turn becomes a
  document of its own, its prompt untrained;
- where an answer cannot be told from what stands around it, the row is refused with the reason.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jinja2
import xxhash
from mindspeed_runtime.data.prepare import EmptyRowError, Encode, Encoder, RowError
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
    size = 1 + max(tokenizer.get_vocab().values())
    if size > vocabulary:
        raise ModelError(
            f"the tokenizer has tokens up to {size - 1} and the model {vocabulary}; name the model's own in model.tokenizer"
        )
    if data.format == "text":
        encode = _text_encoder(tokenizer, data.text_key)
    else:
        encode = _chat_encoder(tokenizer, {"messages": messages_of, "alpaca": alpaca_messages}[data.format])
    parts = (data.format, data.text_key, tokenizer.chat_template, _identity(tokenizer))
    return Encoder(encode=encode, key=xxhash.xxh3_128_hexdigest(repr(parts).encode()), vocabulary=size)


def encode_text(tokenizer: Any, text: str) -> Example:
    """A document as the tokenizer encodes it, ended by its end token; all of it is trained."""
    if tokenizer.eos_token_id is None:
        raise ModelError("the tokenizer has no end-of-sequence token to end documents with; name another tokenizer")
    ids = _ids(tokenizer, text, add_special_tokens=True)
    if not ids or ids[-1] != tokenizer.eos_token_id:
        ids.append(tokenizer.eos_token_id)
    return Example(tokens=ids, trained=[True] * len(ids))


def encode_chat(
    tokenizer: Any, messages: Sequence[Message], *, special: Collection[int] | None = None
) -> list[Example]:
    """Documents of a conversation, in which exactly the answers are trained. RowError when that cannot be.

    ``special``: ``special_ids(tokenizer)``, for a caller with many conversations.
    """
    known = special_ids(tokenizer) if special is None else special
    turns = [
        turn_of(tokenizer, messages[:at], message, special=known)
        for at, message in enumerate(messages)
        if message["role"] == "assistant"
    ]
    if not turns:
        raise RowError("no assistant message to learn from")
    joined = _joined(turns)
    if joined is not None:
        return [joined]
    return [
        Example(tokens=turn.prompt + turn.answer, trained=[False] * len(turn.prompt) + [True] * len(turn.answer))
        for turn in turns
    ]


def turn_of(tokenizer: Any, before: Sequence[Message], answer: Message, *, special: Collection[int]) -> Turn:
    """The prompt that inference gives before ``answer``, and the tokens that it should then produce."""
    text = _answer_text(answer)
    prompt = render(tokenizer, before, add_generation_prompt=True)
    whole = render(tokenizer, [*before, answer], add_generation_prompt=False)
    if not whole.startswith(prompt):
        raise RowError("the chat template renders the answer otherwise than after its generation prompt")
    start = whole.find(text, len(prompt))
    if start < 0:
        raise RowError("the chat template changes the text of the answer")
    header = whole[len(prompt) : start]
    if header.strip() and prompt == render(tokenizer, before, add_generation_prompt=False):
        raise RowError(
            f"the chat template has no generation prompt: it puts {header.strip()!r} before an answer, which inference "
            "would leave to the model"
        )
    prompt_ids = _ids(tokenizer, prompt)
    answer_ids, places = _continuation(tokenizer, prompt, prompt_ids, whole)
    stop = _end_of_turn(answer_ids, places, start + len(text), special)
    # Tokens that part turns, here or at inference, must not stand inside an answer.
    parting = {number for number in prompt_ids if number in special and number != tokenizer.unk_token_id}
    inside = parting.union((answer_ids[stop], tokenizer.eos_token_id)).intersection(answer_ids[:stop])
    if inside:
        names = ", ".join(tokenizer.convert_ids_to_tokens(sorted(inside)))
        raise RowError(f"an assistant message holds the text of {names}, which would be read as the end of a turn")
    return Turn(prompt=prompt_ids, answer=answer_ids[: stop + 1])


def render(tokenizer: Any, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
    """The template's text of ``messages``."""
    try:
        return tokenizer.apply_chat_template(
            [dict(message) for message in messages], tokenize=False, add_generation_prompt=add_generation_prompt
        )
    except jinja2.TemplateSyntaxError as error:
        raise ModelError(
            f"data.chat_template: the template is not Jinja: {error.message} (line {error.lineno})"
        ) from error
    except (jinja2.TemplateError, TypeError, LookupError, ValueError, AttributeError) as error:
        raise RowError(f"the chat template refuses the conversation: {error}") from error


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Tokens that text is not made of: named special ones and those that were added as special."""
    added = (number for number, token in tokenizer.added_tokens_decoder.items() if token.special)
    return frozenset((*tokenizer.all_special_ids, *added))


def messages_of(content: Any) -> list[Message]:
    """Messages of a row ``{"messages": [{"role": ..., "content": ...}]}``. RowError, by name, for what is not that."""
    if not isinstance(content, dict) or not isinstance(content.get("messages"), list):
        raise RowError("no list under the key 'messages'")
    if not content["messages"]:
        raise RowError("'messages' is empty")
    for number, message in enumerate(content["messages"]):
        if not isinstance(message, dict) or message.get("role") not in _ROLES:
            raise RowError(f"messages[{number}] has no role among {', '.join(_ROLES)}")
        if message.get("tool_calls"):
            raise RowError(f"messages[{number}] calls tools; answers of that kind are not trained yet")
        if not isinstance(message.get("content"), str):
            raise RowError(f"messages[{number}].content is not text")
        _check_text(f"messages[{number}].content", message["content"])
    return content["messages"]


def alpaca_messages(content: Any) -> list[Message]:
    """Messages of a row with instruction, input (may be null or absent), output, and perhaps system."""
    if not isinstance(content, dict):
        raise RowError("not an object with instruction and output")
    for key in ("instruction", "output"):
        if key not in content:
            raise RowError(f"no key '{key}'")
        if content[key] is None:
            raise RowError(f"'{key}' is null")
        if not isinstance(content[key], str):
            raise RowError(f"'{key}' is not text")
        if not content[key].strip():
            raise RowError(f"'{key}' is empty")
    for key in ("input", "system"):
        if not isinstance(content.get(key), str | None):
            raise RowError(f"'{key}' is not text")
    for key in ("instruction", "output", "input", "system"):
        _check_text(f"'{key}'", content.get(key) or "")
    asked = "\n\n".join(part for part in (content["instruction"], content.get("input")) if part and part.strip())
    system = [{"role": "system", "content": content["system"]}] if (content.get("system") or "").strip() else []
    return [*system, {"role": "user", "content": asked}, {"role": "assistant", "content": content["output"]}]


def _text_encoder(tokenizer: Any, key: str) -> Encode:
    def encode(row: Row) -> list[Example]:
        text = row.content
        if isinstance(text, dict):
            if key not in text:
                raise RowError(f"no key '{key}' (data.text_key)")
            text = text[key]
        if text is None:
            raise EmptyRowError("null text")
        if not isinstance(text, str):
            raise RowError("the text is not a string")
        if not text.strip():
            raise EmptyRowError("empty text")
        _check_text("the text", text)
        return [encode_text(tokenizer, text)]

    return encode


def _chat_encoder(tokenizer: Any, to_messages: Callable[[Any], list[Message]]) -> Encode:
    if not tokenizer.chat_template:
        raise ModelError("the tokenizer has no chat template; name a file with one in data.chat_template")
    special = special_ids(tokenizer)

    def encode(row: Row) -> list[Example]:
        return encode_chat(tokenizer, to_messages(row.content), special=special)

    return encode


def _identity(tokenizer: Any) -> tuple[Any, ...]:
    """All that token numbers depend on, besides a template."""
    ends = (tokenizer.bos_token_id, tokenizer.eos_token_id, sorted(special_ids(tokenizer)))
    return (tokenizer.backend_tokenizer.to_str(), *ends, tokenizer.split_special_tokens)


def _ids(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> list[int]:
    return list(tokenizer(text, add_special_tokens=add_special_tokens, verbose=False).input_ids)


def _check_text(what: str, text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RowError(f"{what} holds half of a surrogate pair at character {error.start}") from error


def _answer_text(answer: Message) -> str:
    text = answer["content"]
    if not isinstance(text, str) or not text.strip():
        raise RowError("an assistant message is empty")
    return text.strip()  # templates strip, or do not


def _continuation(tokenizer: Any, prompt: str, prompt_ids: list[int], whole: str) -> tuple[list[int], list[int]]:
    """Tokens after the prompt's, and the place in ``whole`` where each begins."""
    at, size = len(prompt), len(prompt_ids)
    together = tokenizer(whole, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ids, spans = list(together.input_ids), together.offset_mapping
    if ids[:size] == prompt_ids and size < len(ids) and spans[size][0] >= at and max(s[1] for s in spans[:size]) <= at:
        return ids[size:], [begin for begin, _ in spans[size:]]
    # A token reaches over the seam. Inference will not see that one: it is given the prompt's own tokens, and the
    # answer follows as tokens of its own. They must spell the same text.
    alone = tokenizer(whole[at:], add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    if _spelled(tokenizer, prompt_ids + list(alone.input_ids)) != _spelled(tokenizer, ids):
        raise RowError("prompt and answer share a token that cannot be parted")
    return list(alone.input_ids), [at + begin for begin, _ in alone.offset_mapping]


def _spelled(tokenizer: Any, ids: list[int]) -> str:
    return tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)


def _end_of_turn(ids: Sequence[int], places: Sequence[int], end: int, special: Collection[int]) -> int:
    for position, (number, place) in enumerate(zip(ids, places, strict=True)):
        if place >= end and number in special:
            return position
    raise RowError("the chat template puts no end token after an answer, so the model would not learn to stop")


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
