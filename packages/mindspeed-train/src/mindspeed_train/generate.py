"""A few words from the model in training. Greedy, without a cache: for looking, not for serving."""

from typing import Any

import torch

from .engine import MegatronEngine

_NEW_TOKENS = 48


def greedy(engine: MegatronEngine, tokenizer: Any, prompt: str, limit: int) -> str:
    """The model's continuation of ``prompt``, in at most ``limit`` tokens together; every rank takes part.

    With a chat template the prompt is a user's message.
    """
    text = prompt
    if tokenizer.chat_template:
        messages = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = list(tokenizer(text, add_special_tokens=not tokenizer.chat_template).input_ids)
    start = len(ids)
    multiple = engine.groups.layout.tensor if engine.groups.layout.sequence else 1
    while len(ids) < min(limit, start + _NEW_TOKENS):
        # Right padding: a causal model does not see it.
        padded = ids + [0] * (-len(ids) % multiple)
        chosen = int(engine.logits(torch.tensor([padded]))[0, len(ids) - 1].argmax())
        if chosen in tokenizer.all_special_ids:
            break
        ids.append(chosen)
    return tokenizer.decode(ids[start:])
