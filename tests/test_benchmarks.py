"""The harness of the benchmarks, over a clock that counts work instead of time."""

import pytest
from click.testing import CliRunner

from benchmarks.__main__ import main
from benchmarks.cases import CASES
from benchmarks.harness import Result, measure


class Clock:
    """Time that passes only when work is done, faster or slower as the machine is busy."""

    def __init__(self):
        self.now, self.calls = 0.0, 0

    def work(self, amount):
        self.calls += 1
        self.now += amount * (10 if self.calls > 6 else 1)  # from the third pair on the machine is busy

    def __call__(self):
        return self.now


@pytest.mark.parametrize(("ours", "peer", "ratio"), [(1, 1, 1.0), (3, 1, 3.0), (1, 4, 0.25)])
def test_the_ratio_is_that_of_the_work_however_busy_the_machine(ours, peer, ratio):
    clock = Clock()
    result = measure(lambda: clock.work(ours), lambda: clock.work(peer), 5, clock=clock)
    assert result.ratio == pytest.approx(ratio)
    assert result.spread == pytest.approx((ratio, ratio))
    assert len(result.ours) == 5 and clock.calls == 12
    assert result.ours[0] != result.ours[-1]


def test_one_bad_pair_does_not_move_the_ratio():
    result = Result(ours=(2.0, 2.0, 90.0, 2.0, 2.0), peer=(1.0, 1.0, 1.0, 1.0, 1.0))
    assert result.ratio == 2.0 and result.spread == (2.0, 2.0)


def test_an_unknown_case_is_named():
    done = CliRunner().invoke(main, ["stepp"])
    assert done.exit_code == 2 and "no case stepp; there are step-fp32" in done.output


def test_a_case_is_measured_and_written_down(tmp_path):
    done = CliRunner().invoke(main, ["swiglu", "--pairs", "2", "--json", str(tmp_path / "figures.json")])
    assert done.exit_code == 0, done.output
    assert "functional.silu(a) * b" in done.output and '"ours"' in (tmp_path / "figures.json").read_text()
    assert set(CASES) >= {
        "step-fp32",
        "step-bf16",
        "pipeline",
        "save",
        "load",
        "to-megatron",
        "to-hf",
        "tokenise-text",
        "tokenise-chat",
    }
