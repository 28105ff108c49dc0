"""The simulated Ascend: these tests run in `nox -s npu` alone, which builds it and makes every process find it."""

import os

import pytest
from mindspeed_runtime.launch import Pool

HERE = "FAKE_CANN_BUILD" in os.environ

collect_ignore_glob = [] if HERE else ["test_*.py"]


@pytest.fixture(scope="session")
def pool():
    """Three rank processes, with the heavy imports behind them."""
    with Pool(3, preload=["mindspeed_train.preload"]) as found:
        yield found
