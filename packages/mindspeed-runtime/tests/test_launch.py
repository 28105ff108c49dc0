"""Rank processes: they meet, they fail with a reason, and they are gone."""

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time

import pytest
import torch
import torch.distributed as dist
from mindspeed_kernels.device import open_device
from mindspeed_kernels.errors import UserError
from mindspeed_runtime.launch import LaunchError, Pool, Rank, check_port, join_torchrun, world

pytestmark = pytest.mark.dist


class _OddError(UserError):
    """Of a type that only this test knows."""


def _sum(rank: Rank, value: int) -> tuple[int, int, int]:
    with world(rank, open_device("cpu"), 20):
        total = torch.tensor([value + rank.rank])
        dist.all_reduce(total)
        return int(total), dist.get_world_size(), os.getpid()


def _fail(rank: Rank, who: int, how: str) -> None:
    with world(rank, open_device("cpu"), 60):
        if rank.rank == who:
            if how == "user":
                raise _OddError("odd: the value is 3; use 4")
            if how == "bug":
                raise ZeroDivisionError("a bug")
            if how == "die":
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(60)
        dist.barrier()


def test_ranks_are_reused_and_each_run_has_a_world_of_its_own(pool):
    first = pool.run(_sum, 10, nproc=3)
    second = pool.run(_sum, 1, nproc=2)
    assert [total for total, *_ in first] == [33] * 3
    assert [size for _, size, _ in second] == [2, 2]
    assert [pid for *_, pid in first][:2] == [pid for *_, pid in second]


def test_a_rank_that_ends_while_it_is_signalled_is_no_error(monkeypatch):
    with Pool(2) as pool:
        pool.run(_sum, 1, nproc=2)
        first = pool._workers[0].process
        os.kill(first.pid, signal.SIGKILL)
        first.join()
        monkeypatch.setattr(type(first), "is_alive", lambda self: True)
        pool.signal(signal.SIGTERM)


class _Holder:
    """Refers to itself and to a process group, as models do."""

    def __init__(self, group):
        self.itself, self.group = self, group


def _held_group(rank: Rank) -> int:
    before = len(os.listdir("/proc/self/task"))
    with world(rank, open_device("cpu"), 20):
        _Holder(dist.new_group([0]))
    return before


def test_process_groups_do_not_outlive_their_run(pool):
    threads = [pool.run(_held_group, nproc=1)[0] for _ in range(4)]
    assert threads[-1] <= threads[1]


@pytest.mark.parametrize(
    ("how", "error", "text"),
    [
        ("user", _OddError, r"^odd: the value is 3; use 4"),
        ("bug", LaunchError, r"rank 1: ZeroDivisionError: a bug"),
        ("die", LaunchError, r"rank 1: the process was killed by SIGKILL"),
        ("hang", LaunchError, r"no answer within 3 s"),
    ],
)
def test_a_failed_rank_is_reported_within_seconds_and_leaves_no_process(how, error, text):
    with Pool(2) as pool:
        pids = [pid for *_, pid in pool.run(_sum, 0)]
        start = time.monotonic()
        with pytest.raises(error, match=text) as caught:
            pool.run(_fail, 1, how, timeout_s=3 if how == "hang" else 60)
        assert time.monotonic() - start < 12
        assert not any(_running(pid) for pid in pids)
        if how == "bug":
            assert "in rank 1" in caught.value.__notes__[0]
            assert "_fail" in caught.value.__notes__[0]
        assert [total for total, *_ in pool.run(_sum, 0)] == [1, 1]  # the pool works on


def test_ranks_go_when_their_starter_is_killed(tmp_path):
    script = tmp_path / "starter.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from mindspeed_runtime.launch import Pool
        import stays
        if __name__ == "__main__":
            Pool(2).run(stays.report, sys.argv[1], timeout_s=60)
        """)
    )
    (tmp_path / "stays.py").write_text(
        "import os, time\ndef report(rank, folder):\n"
        "    open(f'{folder}/pid-{rank.rank}', 'w').write(str(os.getpid()))\n    time.sleep(60)\n"
    )
    starter = subprocess.Popen([sys.executable, str(script), str(tmp_path)], cwd=tmp_path)
    files = [tmp_path / "pid-0", tmp_path / "pid-1"]
    deadline = time.monotonic() + 60
    while not all(file.exists() and file.read_text() for file in files):
        assert time.monotonic() < deadline
        assert starter.poll() is None
        time.sleep(0.05)
    starter.kill()
    starter.wait()
    deadline = time.monotonic() + 10
    while any(_running(file.read_text()) for file in files):
        assert time.monotonic() < deadline, "ranks outlive their starter"
        time.sleep(0.05)


def test_what_is_imported_ahead_goes_with_its_starter_at_once_and_is_there_for_the_pool(tmp_path):
    """An import that takes a minute stands for a slow one: Python's fork server alone would end after it."""
    (tmp_path / "slow.py").write_text(
        "import os, time\nopen('pid', 'w').write(str(os.getpid()))\nwhile os.path.exists('wait'): time.sleep(0.02)\n"
    )
    (tmp_path / "starter.py").write_text(
        textwrap.dedent("""
        import os, sys
        from mindspeed_runtime.launch import Pool, warm_up
        import asks
        if __name__ == "__main__":
            warm_up("slow")
            if os.path.exists("wait"):
                while not os.path.exists("pid") or not open("pid").read():
                    pass
                sys.exit(3)
            with Pool(2, preload=("slow",)) as pool:
                print(pool.run(asks.loaded, timeout_s=60))
        """)
    )
    (tmp_path / "asks.py").write_text("import sys\ndef loaded(rank): return 'slow' in sys.modules\n")
    (tmp_path / "wait").touch()
    command = [sys.executable, "starter.py"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    assert subprocess.run(command, cwd=tmp_path, env=environment, timeout=60, check=False).returncode == 3
    deadline = time.monotonic() + 5
    while _running((tmp_path / "pid").read_text()):
        assert time.monotonic() < deadline, "the import outlives its starter"
        time.sleep(0.05)
    (tmp_path / "wait").unlink()
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, timeout=60, check=True, capture_output=True, text=True
    )
    assert done.stdout == "[True, True]\n"


def _running(pid: int | str) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_output_of_ranks_goes_to_their_logs(tmp_path):
    with Pool(2, log_dir=tmp_path) as pool:
        pool.run(_speak)
    assert "from 1" in (tmp_path / "rank-1.log").read_text()


def _speak(rank: Rank) -> None:
    print(f"from {rank.rank}", flush=True)


def test_a_port_in_use_is_refused_by_name():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(UserError, match=rf"launch.port={taken.getsockname()[1]}: the port is in use"):
            check_port(taken.getsockname()[1])


def test_a_fixed_port_is_used():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with Pool(2) as pool:
        assert pool.run(_meets_at, port=port) == [f"tcp://127.0.0.1:{port}"] * 2


def _meets_at(rank: Rank) -> str:
    with world(rank, open_device("cpu"), 20):
        return rank.rendezvous


def test_a_launchers_variables_are_joined_and_half_of_them_are_refused(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    assert join_torchrun() is None
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "8")
    with pytest.raises(UserError, match="RANK, WORLD_SIZE set and MASTER_ADDR, MASTER_PORT not"):
        join_torchrun()
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29555")
    assert join_torchrun() == Rank(rank=3, size=8, local_rank=0)
