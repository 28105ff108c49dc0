"""Training on the simulated Ascend: the losses of the host, nothing left on the host, and resumed as if never stopped."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import ascend_ranks as ranks
import pytest
from mindspeed_models.testing import save_tiny_chat
from mindspeed_parallel.layout import parse_layout
from mindspeed_runtime.config import build_recipe, dump_recipe
from mindspeed_runtime.launch import Pool
from mindspeed_train.prove import with_layout

pytestmark = [pytest.mark.npu, pytest.mark.dist]

HERE = Path(__file__).resolve().parent
TRAINER = HERE.parents[1] / "packages/mindspeed-train/src/mindspeed_train"
BOUND = 1e-6
FUSED = {"npu::npu_rms_norm", "npu::npu_swiglu", "npu::npu_rotary_mul", "npu::npu_fusion_attention"}
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight"]


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ascend")
    save_tiny_chat("qwen3", folder / "qwen3")
    with (folder / "rows.jsonl").open("w") as file:
        for n, word in enumerate(WORDS):
            roles = [
                {"role": "user", "content": f"What is after {word}?"},
                {"role": "assistant", "content": " ".join(WORDS[n : n + 3])},
            ]
            file.write(json.dumps({"messages": roles}) + "\n")
    return folder


def _recipe(made, layout="tp1", device="npu", **sections):
    base = {
        "model": {"path": str(made / "qwen3")},
        "data": {"train": [str(made / "rows.jsonl")], "format": "messages", "sequence": 96, "packing": True},
        "optimizer": {"lr": 1e-3},
        "schedule": {"kind": "constant"},
        "training": {"steps": 5, "global_batch": 4, "precision": "fp32"},
        "checkpoint": {"folder": str(made / "out")},
        "launch": {"device": device},
    }
    for section, values in sections.items():
        base[section] = {**base.get(section, {}), **values}
    return with_layout(build_recipe(base), parse_layout(layout))


@pytest.fixture(scope="module")
def on_the_host(made, tmp_path_factory):
    """Losses of the same five steps by one process on the CPU."""
    folder = tmp_path_factory.mktemp("host")
    with Pool(1, preload=["mindspeed_train.preload"]) as alone:  # a process that has computed on the host cannot change
        return alone.run(ranks.watched_steps, _recipe(made, device="cpu"), folder, 0, 5)[0]["losses"]


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2"])
def test_five_steps_are_those_of_the_host_and_all_is_on_the_device(made, pool, on_the_host, tmp_path, layout):
    size = parse_layout(layout).ranks
    results = pool.run(ranks.watched_steps, _recipe(made, layout), tmp_path, 0, 5, nproc=size)
    for rank, result in enumerate(results):
        assert result["elsewhere"] == []
        assert result["devices"] == [f"npu:{rank}"] and result["held"] > 20
        for loss, expected in zip(result["losses"], on_the_host, strict=True):
            assert abs(loss - expected) <= BOUND, (result["losses"], on_the_host)
    seen = set().union(*(result["seen"] for result in results))
    assert seen >= FUSED
    assert any("backward" in name for name in seen)  # the watch follows the engine's threads
    assert size == 1 or any(name.startswith("c10d::") for name in seen)
    assert on_the_host[0] > on_the_host[-1] + 0.1


@pytest.mark.parametrize("layout", ["tp1", "tp2", "pp2"])
def test_resumed_training_goes_on_as_if_it_had_not_stopped(made, pool, tmp_path, layout):
    size = parse_layout(layout).ranks
    recipe = _recipe(made, layout, model={"dropout": 0.0}, training={"precision": "bf16"})
    run = lambda *args: pool.run(ranks.watched_steps, recipe, tmp_path, *args, nproc=size)[0]["losses"]  # noqa: E731
    straight = run(0, 5)
    first = run(0, 3, None, tmp_path / "saved")
    assert first + run(3, 5, tmp_path / "saved") == straight


def test_the_command_trains_saves_resumes_and_exports(made, tmp_path):
    recipe = _recipe(made, "tp2", checkpoint={"folder": str(tmp_path / "run")}, training={"steps": 2})
    path = tmp_path / "recipe.yaml"
    path.write_text(dump_recipe(recipe))
    command = ["mindspeed-train", "run", str(path), "--nproc", "2"]
    first = _call(command)
    assert first.returncode == 0, first.stderr
    assert "on 2 x npu, layout tp2" in first.stdout
    assert "UserWarning" not in first.stderr
    more = _call([*command, "--resume", "--set", "training.steps=4"])
    assert more.returncode == 0, more.stderr
    assert "step 3/4" in more.stdout and "step 1/4" not in more.stdout
    assert (tmp_path / "run/hf/model.safetensors").is_file()


PLANTS = [
    ("model.py", "next(batches).to(device.torch_device)\n    losses", 'next(batches).to("cuda")\n    losses', "cuda"),
    ("model.py", "next(batches).to(device.torch_device)\n    losses", 'next(batches).to("cpu")\n    losses', "cpu"),
    ("model.py", "device=self.device.torch_device)\n        dist.all_reduce(shared)",
     'device="cpu")\n        dist.all_reduce(shared)', "c10d::allreduce_ on cpu"),
    ("model.py", "torch.zeros_like(losses)).sum()", 'torch.zeros_like(losses, device="cuda")).sum()', "cuda"),
]  # fmt: skip


@pytest.mark.parametrize(("file", "old", "new", "text"), PLANTS)
def test_a_literal_in_the_trainer_makes_it_fail(made, tmp_path, file, old, new, text):
    shutil.copytree(TRAINER, tmp_path / "planted/mindspeed_train", ignore=shutil.ignore_patterns("__pycache__"))
    path = tmp_path / "planted/mindspeed_train" / file
    source = path.read_text()
    assert source.count(old) == 1
    path.write_text(source.replace(old, new))
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(_recipe(made)))
    done = _call([sys.executable, str(HERE / "ascend_ranks.py"), str(recipe), str(tmp_path), "1"], tmp_path / "planted")
    assert done.returncode == 1, done.stdout
    assert text in done.stdout + done.stderr


def test_without_a_plant_it_does_not(made, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_recipe(_recipe(made)))
    done = _call([sys.executable, str(HERE / "ascend_ranks.py"), str(recipe), str(tmp_path), "1"])
    assert done.returncode == 0, done.stderr


def _call(command, first_on_path=None):
    environment = dict(os.environ)
    if first_on_path is not None:
        environment["PYTHONPATH"] = f"{first_on_path}:{environment['PYTHONPATH']}"
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    return subprocess.run(command, check=False, env=environment, capture_output=True, text=True, timeout=240)
