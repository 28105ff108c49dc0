"""Rank processes: started, watched, and gone when they should be.

A ``Pool`` starts its processes once and runs functions in them, each run in a world of its own, so that the seconds
which importing takes are paid once. ``launch`` is a pool for a single run of a command. Under torchrun, or any other
launcher that sets its variables, this process is a rank already: ``join_torchrun``.
"""

import contextlib
import datetime
import gc
import importlib
import logging
import multiprocessing
import os
import pickle
import signal
import socket
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from types import FrameType
from typing import Any, Self

from mindspeed_kernels.errors import RunError, UserError

GRACE_S = 2.0  # how long the other ranks may take to say something better once one has failed
_LEASH = "mindspeed_runtime.leash"
_log = logging.getLogger(__name__)


class LaunchError(RunError):
    """A rank that failed, died or never answered."""


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Which process this is among those of a run, and how they meet."""

    rank: int
    size: int
    local_rank: int
    rendezvous: str = "env://"

    @property
    def is_main(self) -> bool:
        """This rank reports."""
        return self.rank == 0


def warm_up(*modules: str) -> None:
    """Start importing what rank processes will need, beside this process, and return at once.

    A pool with these as its ``preload`` then starts sooner. Nothing of it outlives this process.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([_LEASH, *modules])
    forkserver.ensure_running()


class Pool:
    """Processes that run functions together, again and again."""

    def __init__(self, size: int, *, preload: Sequence[str] = ("torch",), log_dir: Path | None = None) -> None:
        """``preload``: modules imported once, before the processes are made. ``log_dir``: rank-N.log for their output."""
        self.size = size
        self._log_dir = log_dir
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([_LEASH, *preload])
        self._workers: list[_Worker] = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def run(
        self,
        function: Callable[..., Any] | str,
        *args: Any,
        nproc: int | None = None,
        timeout_s: float | None = 120.0,
        port: int | None = None,
    ) -> list[Any]:
        """``function(rank, *args)`` in ranks 0 to ``nproc - 1``; their results by rank.

        A function may be named, "module:attribute": then only the ranks import it.

        A rank's UserError is raised here as it is. Any other error, a dead rank, or no answer within ``timeout_s``
        raises LaunchError, and every process of the pool is gone by then; the next run starts new ones.
        """
        nproc = self.size if nproc is None else nproc
        if nproc > self.size:
            raise ValueError(f"{nproc} ranks asked of a pool of {self.size}")
        self._start()
        with tempfile.TemporaryDirectory(prefix="mindspeed-") as folder:
            rendezvous = f"file://{folder}/store" if port is None else f"tcp://127.0.0.1:{port}"
            ranks = [Rank(rank=r, size=nproc, local_rank=r, rendezvous=rendezvous) for r in range(nproc)]
            for worker, rank in zip(self._workers, ranks, strict=False):
                worker.connection.send((function, rank, args))
            try:
                return self._collect(nproc, timeout_s)
            except BaseException:
                self.close()
                raise

    def signal(self, number: int) -> None:
        """Send a signal to every living rank."""
        for worker in self._workers:
            if worker.process.pid is not None and worker.process.is_alive():
                with contextlib.suppress(ProcessLookupError):  # it has ended since
                    os.kill(worker.process.pid, number)

    def close(self) -> None:
        """End every process."""
        for worker in self._workers:
            worker.connection.close()  # an idle worker leaves by itself
        for worker in self._workers:
            worker.process.join(0.2)
        self.signal(signal.SIGKILL)
        for worker in self._workers:
            worker.process.join()
        self._workers = []

    def _start(self) -> None:
        if self._workers and not all(worker.process.is_alive() for worker in self._workers):
            self.close()
        for number in range(len(self._workers), self.size):
            ours, theirs = self._context.Pipe()
            log = None if self._log_dir is None else self._log_dir / f"rank-{number}.log"
            threads = max(1, (os.cpu_count() or 1) // self.size)
            process = self._context.Process(target=_work, args=(theirs, number, log, threads), daemon=True)
            process.start()
            theirs.close()
            self._workers.append(_Worker(process=process, connection=ours))  # pyright: ignore[reportArgumentType]  a PipeConnection is one

    def _collect(self, nproc: int, timeout_s: float | None) -> list[Any]:
        pending = dict(enumerate(self._workers[:nproc]))
        results: dict[int, Any] = {}
        failure: _Failure | None = None
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while pending:
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait([item for worker in pending.values() for item in worker.waits_on], left)
            for number in [n for n, worker in pending.items() if set(ready) & set(worker.waits_on)]:
                answer = _answer(number, pending.pop(number))
                if isinstance(answer, _Failure):
                    failure = _worse(failure, answer)
                    limit = time.monotonic() + GRACE_S
                    deadline = limit if deadline is None else min(deadline, limit)
                else:
                    results[number] = answer
            if not ready:  # out of time
                if failure is not None:
                    break
                silent = ", ".join(map(str, sorted(pending)))
                raise LaunchError(f"rank {silent}: no answer within {timeout_s:g} s; all ranks were ended")
        if failure is not None:
            raise failure.error()
        return [results[number] for number in range(nproc)]


@dataclass(frozen=True, kw_only=True)
class _Worker:
    process: BaseProcess
    connection: Connection

    @property
    def waits_on(self) -> tuple[Any, ...]:
        return (self.connection, self.process.sentinel)


@dataclass(frozen=True, kw_only=True)
class _Failure:
    """How one rank failed."""

    rank: int
    text: str
    trace: str = ""
    user_error: UserError | None = None
    died: bool = False

    def error(self) -> Exception:
        """What is raised for it; the rank's own traceback is a note of it, shown with --debug."""
        error = self.user_error or LaunchError(f"rank {self.rank}: {self.text}")
        if self.trace:
            error.add_note(f"in rank {self.rank}:\n{self.trace}")
        return error


def _worse(first: _Failure | None, second: _Failure) -> _Failure:
    """The failure to report: a user's mistake, else a dead rank (it makes the others fail), else the earlier one."""
    if first is None or (second.user_error and not first.user_error):
        return second
    return second if second.died and not (first.died or first.user_error) else first


def _answer(number: int, worker: _Worker) -> Any:
    try:
        if worker.connection.poll():
            kind, content = worker.connection.recv()
            return content if kind == "result" else _Failure(rank=number, **content)
    except (EOFError, ConnectionResetError):
        pass
    worker.process.join(1.0)
    code = worker.process.exitcode
    how = f"was killed by {signal.Signals(-code).name}" if code is not None and code < 0 else f"left with code {code}"
    return _Failure(rank=number, text=f"the process {how}; its log has more", died=True)


def _work(connection: Connection, number: int, log: Path | None, threads: int) -> None:
    """The life of a rank process."""
    threading.Thread(target=_end_with_the_starter, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the starter, which forwards it as SIGTERM
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    if log is not None:
        _redirect(log, with_stdout=number > 0)
    torch = importlib.import_module("torch")
    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(threads)
    gc.freeze()  # what was preloaded stays
    while True:
        try:
            function, rank, args = connection.recv()
        except (EOFError, OSError):
            return
        except Exception as error:  # noqa: BLE001  what was sent cannot be unpickled here
            connection.send(("failure", _described(error)))
            continue
        try:
            answer = ("result", _resolved(function)(rank, *args))
            connection.send_bytes(pickle.dumps(answer))
        except BaseException as error:  # noqa: BLE001  whatever it was, the starter must hear of it
            traceback.print_exc()
            with contextlib.suppress(OSError):
                connection.send(("failure", _described(error)))
            if not isinstance(error, Exception):
                return
        # A model refers to itself, and to its process groups: gloo's keep three threads each, which poll.
        answer = None
        gc.collect()


def _resolved(function: Callable[..., Any] | str) -> Callable[..., Any]:
    if not isinstance(function, str):
        return function
    module, _, name = function.partition(":")
    return getattr(importlib.import_module(module), name)


def _end_with_the_starter() -> None:
    starter = multiprocessing.parent_process()
    assert starter is not None
    wait([starter.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _described(error: BaseException) -> dict[str, Any]:
    described: dict[str, Any] = {
        "text": f"{type(error).__name__}: {error}" if not isinstance(error, RunError) else str(error),
        "trace": "".join(traceback.format_exception(error)),
    }
    if isinstance(error, UserError):
        described["user_error"] = _portable(error)
    return described


def _portable(error: UserError) -> UserError:
    try:
        return pickle.loads(pickle.dumps(error))  # noqa: S301  what this process itself has made
    except (pickle.PickleError, TypeError, AttributeError):
        return UserError(str(error))


def _redirect(log: Path, *, with_stdout: bool) -> None:
    log.parent.mkdir(parents=True, exist_ok=True)
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.dup2(file, 2)
    if with_stdout:
        os.dup2(file, 1)
    os.close(file)


def launch(
    function: Callable[..., Any] | str,
    *args: Any,
    nproc: int,
    log_dir: Path | None = None,
    port: int | None = None,
    preload: Sequence[str] = ("torch",),
) -> list[Any]:
    """Run ``function(rank, *args)`` in ``nproc`` new processes of this machine and wait for them, however long.

    SIGTERM and SIGINT are handed to the ranks as SIGTERM; a second SIGINT ends everything.
    """
    if port is not None:
        check_port(port)
    with Pool(nproc, preload=preload, log_dir=log_dir) as pool, _forwarding(pool):
        return pool.run(function, *args, timeout_s=None, port=port)


def check_port(port: int) -> None:
    """UserError when something listens on ``port`` already."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            raise UserError(
                f"launch.port={port}: the port is in use ({error.strerror}); name another, or leave launch.port out and "
                "a free meeting place is taken"
            ) from error


@contextlib.contextmanager
def _forwarding(pool: Pool) -> Iterator[None]:
    interrupts = 0

    def forward(number: int, _: FrameType | None) -> None:
        nonlocal interrupts
        interrupts += number == signal.SIGINT
        if interrupts > 1:
            raise KeyboardInterrupt
        pool.signal(signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def join_torchrun() -> Rank | None:
    """This process's rank when a launcher has set RANK, WORLD_SIZE and MASTER_ADDR; else None."""
    names = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    given = [name for name in names if name in os.environ]
    if not given:
        return None
    if missing := [name for name in names if name not in os.environ]:
        raise UserError(f"environment: {', '.join(given)} set and {', '.join(missing)} not; set all four, or none")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return Rank(rank=rank, size=size, local_rank=int(os.environ.get("LOCAL_RANK", "0")))


@contextlib.contextmanager
def world(rank: Rank, device: Any, timeout_s: float = 600.0) -> Iterator[None]:
    """The process group of a run, over the device's collective backend; destroyed on the way out."""
    dist = importlib.import_module("torch.distributed")
    device.prepare_collectives(timeout_s)
    dist.init_process_group(
        device.collective_backend,
        init_method=rank.rendezvous,
        rank=rank.rank,
        world_size=rank.size,
        timeout=datetime.timedelta(seconds=timeout_s),
    )
    yield
    # Not on an error: taking the group down would make the other ranks fail too, and their errors hide the cause.
    dist.barrier()  # no rank takes the store away while another still needs it
    dist.destroy_process_group()
