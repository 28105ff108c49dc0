"""What tests share: rank processes that are started once.

A package's ``conftest.py`` imports the fixture by name.
"""

import importlib.util
from collections.abc import Iterator

import pytest

from .launch import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    """Four rank processes for the whole session, with the heavy imports behind them."""
    heavy = [name for name in ("mindspeed_train.preload", "megatron.core", "torch") if _installed(name)][:1]
    with Pool(4, preload=heavy) as found:
        yield found


def _installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False
