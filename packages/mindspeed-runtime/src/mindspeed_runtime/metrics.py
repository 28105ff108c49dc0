"""What a run reports: a line a step, records in metrics.jsonl and TensorBoard, a picture of the loss at the end."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from .loop import Done


class Metrics:
    """Reports of a run. On the main rank only; use it as a hook and as a context manager."""

    def __init__(self, folder: Path, *, steps: int, start: int, memory: Callable[[], int], console: Console) -> None:
        """``start``: steps taken before this process; what was recorded after them is dropped."""
        self.folder = folder
        self.console = console
        self._memory = memory
        self._width = len(str(steps))
        self._records = folder / "metrics.jsonl"
        self._keep_until(start)
        self._progress = Progress(
            TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), console=console
        )
        self._task = self._progress.add_task("training", total=steps, completed=start)
        self._file: Any = None
        self._board: Any = None
        self._start = start

    def __enter__(self) -> Self:
        from torch.utils.tensorboard.writer import SummaryWriter

        self._file = self._records.open("a")
        self._board = SummaryWriter(str(self.folder / "tensorboard"), purge_step=self._start + 1)
        if self.console.is_terminal:
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self.console.is_terminal:
            self._progress.stop()
        self._file.close()
        self._board.close()
        draw_loss(self._records, self.folder / "loss.png")

    def after_step(self, done: Done) -> None:
        """Report one step."""
        result = done.result
        rate = result.tokens / done.seconds
        memory = self._memory()
        record = {
            "step": done.step,
            "loss": result.loss,
            "lr": done.lr,
            "grad_norm": result.grad_norm,
            "tokens_per_s": rate,
            "memory_bytes": memory,
            "trained_tokens": result.trained,
            "skipped": result.skipped,
        }
        self._record(record)
        skipped = f" | [red]skipped: gradients not finite ({done.bad_steps} so far)[/red]" if result.skipped else ""
        self.console.print(
            f"step {done.step:>{self._width}}/{done.steps} | loss {result.loss:7.4f} | lr {done.lr:.2e} | "
            f"grad norm {result.grad_norm:8.3f} | {rate:8,.0f} tokens/s | {memory / 2**30:.2f} GiB{skipped}",
            highlight=False,
            soft_wrap=True,
        )
        self._progress.update(self._task, completed=done.step)

    def at_end(self, done: Done | None, stopped: bool) -> None:
        """Say why the loop was left, if it was before its end."""
        if stopped and done is not None:
            self.say(f"asked to stop: leaving after step {done.step}")

    def validation(self, step: int, loss: float) -> None:
        """Report a validation loss."""
        self._record({"step": step, "validation_loss": loss})
        self.say(f"step {step}: validation loss {loss:.4f}")

    def say(self, text: str) -> None:
        """A line for the reader."""
        self.console.print(text, highlight=False, soft_wrap=True, markup=False)

    def _record(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record) + "\n")
        self._file.flush()
        for name, value in record.items():
            if name != "step":
                self._board.add_scalar(name, float(value), record["step"])

    def _keep_until(self, start: int) -> None:
        kept = [record for record in read_records(self._records) if record["step"] <= start]
        self._records.write_text("".join(json.dumps(record) + "\n" for record in kept))


def read_records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file; a last line that was cut off is left out."""
    if path.exists():
        for line in path.read_text().splitlines():
            try:
                yield json.loads(line)
            except ValueError:
                return


def draw_loss(records: Path, picture: Path) -> None:
    """Draw training and validation loss over steps."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    found = list(read_records(records))
    train = [(record["step"], record["loss"]) for record in found if "loss" in record]
    validation = [(record["step"], record["validation_loss"]) for record in found if "validation_loss" in record]
    if not train:
        return
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    axes.plot(*zip(*train, strict=True), color="#1f6feb", linewidth=1.6, label="training")
    if validation:
        axes.plot(
            *zip(*validation, strict=True), "o-", color="#d1242f", markersize=4, linewidth=1.2, label="validation"
        )
        axes.legend(frameon=False)
    axes.set(xlabel="optimizer step", ylabel="loss (mean over trained tokens)", title=picture.resolve().parent.name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(picture, dpi=130)
    pyplot.close(figure)
