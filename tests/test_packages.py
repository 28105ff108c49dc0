"""What holds across packages: imports do nothing, help is quick, errors are a sentence with the right exit code."""

import json
import os
import re
import signal
import statistics
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
from mindspeed_models.testing import save_tiny_chat, tiny_tokenizer
from mindspeed_models.text.tokenizer import load_tokenizer
from mindspeed_runtime.metrics import read_records
from mindspeed_runtime.rundir import Checkpoints, read_manifest

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = sorted(path.name for path in (ROOT / "packages").iterdir())
BIN = Path(sys.executable).parent
ENVIRONMENT = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}


def run(*command, cwd=None, timeout=120):
    return subprocess.run(
        [str(BIN / command[0]), *map(str, command[1:])],
        capture_output=True, text=True, cwd=cwd, timeout=timeout, env=ENVIRONMENT, check=False,
    )  # fmt: skip


@pytest.mark.parametrize("package", PACKAGES)
def test_importing_a_package_parses_nothing_patches_nothing_and_needs_no_accelerator(package):
    module = package.replace("-", "_")
    code = (
        "import sys, torch; before = dict(vars(torch.cuda)); argv = list(sys.argv);"
        f"import {module}; assert sys.argv == argv; assert dict(vars(torch.cuda)) == before;"
        "assert not any(n.split('.')[0] in ('megatron', 'torch_npu', 'transformers') for n in sys.modules);"
        "assert not torch.cuda.is_initialized()"
    )
    done = subprocess.run([sys.executable, "-c", code, "--not-an-option"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_has_what_a_package_needs(package):
    folder = ROOT / "packages" / package
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    assert project["license"] == "Apache-2.0" and project["requires-python"] == ">=3.11,<3.12"
    assert (folder / "src" / package.replace("-", "_") / "py.typed").exists()
    assert "## Unreleased" in (folder / "CHANGELOG.md").read_text()
    assert len((folder / "README.md").read_text()) > 40


@pytest.mark.parametrize("script", ["mindspeed-train", "mindspeed-convert"])
def test_help_is_there_in_under_a_second(script):
    times = []
    for _ in range(5):
        began = time.perf_counter()
        done = run(script, "--help")
        times.append(time.perf_counter() - began)
        assert done.returncode == 0 and "Commands:" in done.stdout
    assert statistics.median(times) < 1.0
    assert run(script, "--version").stdout.strip().startswith(script + " ")


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("cli")
    save_tiny_chat("qwen3", folder / "model")
    with (folder / "rows.jsonl").open("w") as file:
        for n in range(12):
            roles = [{"role": "user", "content": f"Say {n}."}, {"role": "assistant", "content": f"It is {n}."}]
            file.write(json.dumps({"messages": roles}) + "\n")
    (folder / "recipe.yaml").write_text(
        "stage: sft\nmodel: {path: model}\n"
        "data: {train: [rows.jsonl], validation: [rows.jsonl], format: messages, sequence: 64}\n"
        "parallel: {pipeline: 2}\noptimizer: {lr: 1.0e-3}\n"
        "training: {steps: 4, global_batch: 4, precision: fp32, validate_every: 2,\n"
        "  generate_every: 4, generate_prompts: ['Say 3.']}\n"
        "checkpoint: {folder: out, every: 2}\n"
    )
    return folder


@pytest.mark.slow
@pytest.mark.dist
def test_a_run_leaves_everything_that_it_promises_and_goes_on(made):
    done = run("mindspeed-train", "run", "recipe.yaml", "--nproc", "2", cwd=made)
    assert done.returncode == 0, done.stderr
    assert "step 4/4 | loss" in done.stdout and "validation loss" in done.stdout and "'Say 3.' ->" in done.stdout
    out = made / "out"
    records = list(read_records(out / "metrics.jsonl"))
    assert [record["step"] for record in records if "loss" in record] == [1, 2, 3, 4]
    assert (out / "loss.png").read_bytes()[:4] == b"\x89PNG"
    assert list((out / "tensorboard").glob("events.*")) and (out / "logs" / "rank-1.log").exists()
    latest = Checkpoints(out / "checkpoints").latest()
    assert latest is not None and read_manifest(latest).facts["step"] == 4
    assert (latest / "recipe.yaml").exists() and (latest / "hf" / "tokenizer.json").exists()
    code = "import sys; from transformers import AutoModelForCausalLM as M; M.from_pretrained(sys.argv[1])"
    assert (
        subprocess.run([sys.executable, "-c", code, str(out / "hf")], check=False, capture_output=True).returncode == 0
    )

    again = run("mindspeed-train", "run", "recipe.yaml", "--nproc", "2", cwd=made)
    assert again.returncode == 2 and "holds a run already (step-00000004); use --resume" in again.stderr
    more = run(
        "mindspeed-train", "run", "recipe.yaml", "--nproc", "2", "--resume", "--set", "training.steps=5", cwd=made
    )
    assert more.returncode == 0 and "step 5/5" in more.stdout and "step 4/5" not in more.stdout


@pytest.mark.slow
@pytest.mark.dist
def test_random_weights_need_a_configuration_alone_and_the_named_tokenizer_travels(made):
    (made / "config").mkdir()
    (made / "config" / "config.json").write_bytes((made / "model" / "config.json").read_bytes())
    tokenizer = tiny_tokenizer(texts=("another text, so another tokenizer " * 9,))
    tokenizer.save_pretrained(made / "tokenizer")
    changes = ["model.path=config", "model.init=random", "model.tokenizer=tokenizer", "checkpoint.folder=random"]
    changes += ["training.steps=2", "training.validate_every=null", "training.generate_every=null"]
    done = run(
        "mindspeed-train", "run", "recipe.yaml", "--nproc", "2", *(w for c in changes for w in ("--set", c)), cwd=made
    )
    assert done.returncode == 0, done.stderr
    for folder in (made / "random" / "hf", Checkpoints(made / "random" / "checkpoints").latest() / "hf"):
        found = load_tokenizer(folder)
        assert found.get_vocab() == tokenizer.get_vocab() != load_tokenizer(made / "model").get_vocab()


@pytest.mark.slow
@pytest.mark.dist
def test_sigterm_saves_and_leaves_and_no_process_stays(made):
    command = [str(BIN / "mindspeed-train"), "run", "recipe.yaml", "--nproc", "2", "--set", "training.steps=100000"]
    command += [
        "--set",
        "checkpoint.folder=stopped",
        "--set",
        "checkpoint.every=null",
        "--set",
        "training.validate_every=null",
    ]
    command += ["--set", "training.generate_every=null"]
    process = subprocess.Popen(
        command, cwd=made, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=ENVIRONMENT
    )
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step") and "3/" in line:
            process.send_signal(signal.SIGTERM)
            break
    rest, _ = process.communicate(timeout=60)
    assert process.returncode == 0, "".join(lines) + rest
    assert "continue with --resume" in rest
    assert Checkpoints(made / "stopped" / "checkpoints").latest() is not None
    left = subprocess.run(
        ["pgrep", "-f", "checkpoint.folder=stopped"], capture_output=True, text=True, check=False
    ).stdout
    assert not left.strip()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["run", "absent.yaml"], "absent.yaml: no such recipe file"),
        (["run", "recipe.yaml", "--set", "optimizer.lrr=1", "--nproc", "2"], "optimizer.lrr: no such key; did you mean lr?"),
        (["run", "recipe.yaml", "--set", "model.path=nowhere", "--nproc", "2"], "nowhere: no such file or folder"),
        (["run", "recipe.yaml", "--nproc", "3"], "does not divide 3 processes"),
        (["run", "recipe.yaml", "--nproc", "4", "--set", "parallel.tensor=4", "--set", "parallel.pipeline=1"], "2 kv heads do not divide"),
        (["run", "recipe.yaml", "--nproc", "3", "--set", "parallel.pipeline=3", "--set", "training.global_batch=6"], "4 layers do not divide into 3"),
        (["run", "recipe.yaml", "--nproc", "2", "--set", "data.train=[gone.jsonl]", "--set", "checkpoint.folder=bad"], "gone.jsonl: no such file"),
        (["run", "recipe.yaml", "--nproc", "2", "--resume", "--set", "checkpoint.folder=empty"], "there is no complete checkpoint"),
        (["run", "recipe.yaml", "--nproc", "2", "--set", "backend=fsdp2"], "backend=fsdp2: not installed here"),
        (["plan", "recipe.yaml", "--nproc", "3"], "does not divide 3 processes"),
        (["prove", "layout", "recipe.yaml", "--layouts", "xx2"], "layout 'xx2': cannot read"),
    ],
)  # fmt: skip
def test_a_users_mistake_is_one_sentence_and_exit_code_2(made, arguments, text):
    done = run("mindspeed-train", *arguments, cwd=made)
    assert done.returncode == 2, done.stdout + done.stderr
    assert text in done.stderr and "Traceback" not in done.stderr
    assert done.stderr.strip().startswith("error: ")


@pytest.mark.dist
def test_a_port_in_use_is_named_within_seconds(made):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        began = time.monotonic()
        done = run(
            "mindspeed-train",
            "run",
            "recipe.yaml",
            "--nproc",
            "2",
            "--set",
            f"launch.port={port}",
            "--set",
            "checkpoint.folder=p",
            cwd=made,
        )
    assert done.returncode == 2 and f"launch.port={port}: the port is in use" in done.stderr
    assert time.monotonic() - began < 30


@pytest.mark.slow
@pytest.mark.dist
def test_two_launchers_of_one_machine_train_together(made):
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(BIN / "mindspeed-train"),
        "run",
        "recipe.yaml",
        "--set",
        "checkpoint.folder=two",
        "--set",
        "training.steps=2",
    ]
    processes = []
    for rank in range(2):
        launcher = {
            "RANK": str(rank),
            "WORLD_SIZE": "2",
            "LOCAL_RANK": "0",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(port),
        }
        processes.append(
            subprocess.Popen(
                command,
                cwd=made,
                env={**ENVIRONMENT, **launcher, "GLOO_SOCKET_IFNAME": "lo"},
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    outputs = [process.communicate(timeout=120) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    assert "step 2/2" in outputs[0][0] and "step" not in outputs[1][0].split("checkpoint:")[0]


@pytest.mark.slow
def test_conversion_refuses_what_is_there_and_shows_what_it_made(made, tmp_path):
    assert run("mindspeed-convert", "to-megatron", made / "model", tmp_path / "ck").returncode == 0
    second = run("mindspeed-convert", "to-megatron", made / "model", tmp_path / "ck")
    assert second.returncode == 2 and "exists and is not empty" in second.stderr
    shown = json.loads(run("mindspeed-convert", "inspect", tmp_path / "ck", "--json").stdout)
    assert shown["family"] == "qwen3" and shown["kind"] == "checkpoint"
    missing = run("mindspeed-convert", "to-hf", tmp_path / "nothing", tmp_path / "hf")
    assert missing.returncode == 2 and "no such file or folder" in missing.stderr and not (tmp_path / "hf").exists()


def test_print_config_and_features_and_plan_are_shown(made):
    text = run("mindspeed-train", "run", "recipe.yaml", "--print-config", "--set", "training.seed=7", cwd=made).stdout
    assert "seed: 7" in text and "# --set" in text and "# recipe.yaml:" in text
    features = run("mindspeed-train", "features", "--recipe", "recipe.yaml", "--device", "cpu", cwd=made).stdout
    assert "device:" in features and "torch.cuda:current_device" in features
    plan = json.loads(run("mindspeed-train", "plan", "recipe.yaml", "--nproc", "2", "--json", cwd=made).stdout)
    assert len(plan["ranks"]) == 2


@pytest.mark.parametrize("path", sorted((ROOT / "examples").rglob("*.yaml")), ids=lambda path: path.name)
def test_every_example_is_a_recipe_that_fits_its_processes(path):
    """The devices that its heading names, else two."""
    from mindspeed_runtime.config import check_recipe, load_recipe

    devices = re.search(r"^#.* --devices (\d+)", path.read_text(), re.MULTILINE)
    check_recipe(load_recipe(path).recipe, int(devices[1]) if devices else 2)
