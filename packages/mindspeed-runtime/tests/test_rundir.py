"""Checkpoints and outputs: whole or not there."""

import json
import os
import resource
import subprocess
import sys
import textwrap

import pytest
from mindspeed_kernels.errors import RunError, UserError
from mindspeed_runtime.engine import StepResult
from mindspeed_runtime.hooks import Saving
from mindspeed_runtime.loop import Done, StopFlag, fit
from mindspeed_runtime.rundir import CheckpointError, Checkpoints, new_folder, read_manifest, write_manifest
from mindspeed_runtime.schedule import Schedule


def test_a_folder_that_was_not_finished_is_not_there(tmp_path):
    with pytest.raises(KeyError), new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("x")
        raise KeyError
    assert not list(tmp_path.iterdir())
    with new_folder(tmp_path / "out") as folder:
        (folder / "a").write_text("x")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "a").read_text() == "x"
    with pytest.raises(UserError, match="exists and is not empty"), new_folder(tmp_path / "out"):
        pytest.fail("a folder that is there was opened")
    with new_folder(tmp_path / "out", force=True) as folder:
        (folder / "b").write_text("y")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]


def _checkpoint(checkpoints, step, **facts):
    partial = checkpoints.start(step)
    (partial / "model").mkdir()
    (partial / "model" / "w").write_bytes(bytes(1000 + step))
    return checkpoints.finish(partial, step, **facts)


def test_a_manifest_sees_a_missing_a_cut_and_a_changed_file(tmp_path):
    path = _checkpoint(Checkpoints(tmp_path), 3)
    assert read_manifest(path).facts == {"step": 3}
    file = path / "model" / "w"
    content = file.read_bytes()
    file.write_bytes(content[:-1] + b"x")
    with pytest.raises(CheckpointError, match="hash differs"):
        read_manifest(path)
    file.write_bytes(content[:-1])
    with pytest.raises(CheckpointError, match="has 1002 bytes, the manifest says 1003"):
        read_manifest(path)
    file.unlink()
    with pytest.raises(CheckpointError, match="w: missing"):
        read_manifest(path)
    (path / "manifest.json").unlink()
    with pytest.raises(CheckpointError, match=r"no manifest\.json, so this is not a complete checkpoint"):
        read_manifest(path)


def test_the_newest_complete_checkpoint_is_the_latest(tmp_path):
    checkpoints = Checkpoints(tmp_path)
    first, second = _checkpoint(checkpoints, 2), _checkpoint(checkpoints, 10)
    assert checkpoints.latest() == second
    (second / "model" / "w").unlink()
    assert checkpoints.latest() == first
    assert checkpoints.start(12).name == ".step-00000012.partial"
    assert checkpoints.latest() == first


def test_the_last_and_the_best_are_kept(tmp_path):
    checkpoints = Checkpoints(tmp_path, keep_last=2)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 2.5), (5, 2.6)):
        _checkpoint(checkpoints, step, validation_loss=loss)
    assert [path.name[-1] for path in checkpoints.all()] == ["2", "4", "5"]
    assert not list(tmp_path.glob(".*"))


class _Engine:
    """A world of one rank that writes a real file and fails where it is told to."""

    is_main = True

    def __init__(self, size=2000, finite=True):
        self.size, self.finite = size, finite

    def train_step(self, step, batches, lr):
        return StepResult(loss=1.0, grad_norm=1.0, tokens=1, trained=1, skipped=step in batches)

    def save(self, folder):
        (folder / "model").mkdir()
        (folder / "model" / "w").write_bytes(bytes(self.size))

    def is_finite(self):
        return self.finite

    def share(self, value):
        return value

    def any(self, flag):
        return flag


def _saving(engine, folder, **options):
    return Saving(engine, Checkpoints(folder, keep_last=1), lambda path: None, **{"every": 1, **options})


def test_weights_that_are_not_finite_never_replace_good_ones(tmp_path):
    engine = _Engine()
    saving = _saving(engine, tmp_path)
    saving.save(1)
    engine.finite = False
    with pytest.raises(RunError, match="not finite after step 2; nothing was written"):
        saving.save(2)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


DISK_FULL = """
import resource, sys
from pathlib import Path
from test_rundir import _Engine, _saving
from mindspeed_kernels.errors import RunError

folder = Path(sys.argv[1])
saving = _saving(_Engine(), folder)
saving.save(1)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
saving.engine.size = 200_000
try:
    saving.save(2)
except RunError as error:
    print(error)
"""


def test_a_full_disk_is_reported_and_older_checkpoints_stay(tmp_path):
    assert resource.RLIMIT_FSIZE is not None
    environment = {**os.environ, "PYTHONPATH": os.path.dirname(__file__)}
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(DISK_FULL), str(tmp_path)],
        capture_output=True, text=True, env=environment, timeout=60, check=True,
    )  # fmt: skip
    assert "File too large" in done.stdout and "the last good checkpoint is" in done.stdout
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    read_manifest(tmp_path / "step-00000001")


def _fit(engine, bad, steps=10, hooks=(), stop=None, max_bad_steps=3):
    schedule = Schedule(kind="constant", peak=1.0, warmup=0, minimum=0.0, steps=steps)
    return fit(engine, lambda n: bad, start=0, steps=steps, schedule=schedule, hooks=hooks, stop=stop or StopFlag(), max_bad_steps=max_bad_steps)  # fmt: skip


def test_too_many_bad_steps_in_a_row_stop_the_run_and_single_ones_do_not():
    assert _fit(_Engine(), {1, 3, 5, 6})
    with pytest.raises(RunError, match="3 steps in a row with gradients that are not finite, the last is step 7"):
        _fit(_Engine(), {1, 4, 5, 6})


def test_a_run_that_is_asked_to_stop_saves_and_leaves(tmp_path):
    stop = StopFlag()

    class Asks:
        def after_step(self, done: Done) -> None:
            stop.is_set = done.step == 4

        def at_end(self, done, stopped):
            assert stopped and done.step == 4

    engine = _Engine()
    assert not _fit(engine, set(), hooks=[Asks(), _saving(engine, tmp_path, every=None)], stop=stop)
    assert Checkpoints(tmp_path).latest() == tmp_path / "step-00000004"
    assert json.loads((tmp_path / "step-00000004" / "progress.json").read_text()) == {"step": 4}


def test_the_schedule_warms_up_and_comes_down():
    schedule = Schedule(kind="cosine", peak=2.0, warmup=4, minimum=0.2, steps=20)
    rates = [schedule.lr(step) for step in range(20)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0] and rates[4] == 2.0
    assert all(a > b for a, b in zip(rates[4:], rates[5:], strict=False)) and 0.2 < rates[-1] < 0.25
    constant = Schedule(kind="constant", peak=2.0, warmup=0, minimum=0.0, steps=20)
    assert {constant.lr(step) for step in range(30)} == {2.0}


def test_a_manifest_names_versions(tmp_path):
    (tmp_path / "x").write_text("1")
    write_manifest(tmp_path, "weights")
    assert "mindspeed-runtime" in read_manifest(tmp_path).versions
