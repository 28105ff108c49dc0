"""What tests share: rank processes that are started once, and a tokenizer made on the spot.

A package's ``conftest.py`` imports the fixtures by name.
"""

import importlib.util
from collections.abc import Iterator

import pytest

from .launch import Pool

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four rank processes for the whole session, with the heavy imports behind them."""
    heavy = [name for name in ("torch", "megatron.core", "transformers") if _installed(name)]
    with Pool(4, preload=heavy) as found:
        yield found


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
