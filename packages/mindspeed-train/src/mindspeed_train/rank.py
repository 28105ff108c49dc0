"""What one rank of a run does, in the order in which it happens."""

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mindspeed_models.text.encode import make_encoder
from mindspeed_models.text.tokenizer import load_tokenizer
from mindspeed_models.weights.convert import to_hf
from mindspeed_models.weights.source import TOKENIZER, CheckpointSource, Source
from mindspeed_runtime.config import dump_recipe
from mindspeed_runtime.data.loader import Cut
from mindspeed_runtime.data.open import Data, open_data
from mindspeed_runtime.hooks import Samples, Saving, Validation
from mindspeed_runtime.launch import Rank
from mindspeed_runtime.loop import Hook, StopFlag, fit
from mindspeed_runtime.metrics import Metrics
from mindspeed_runtime.recipe import Recipe
from mindspeed_runtime.rundir import Checkpoints, read_manifest
from mindspeed_runtime.schedule import make_schedule
from rich.console import Console

from .generate import greedy
from .run import Outcome
from .session import Session, open_session


def train(rank: Rank, recipe: Recipe, resume: bool) -> Outcome:
    """One rank of a run."""
    console = Console(highlight=False)
    folder = Path(recipe.checkpoint.folder)
    stop = StopFlag()
    with stop.on_sigterm(), open_session(rank, recipe) as session:
        engine = session.engine
        data = _open_data(recipe, session, folder, console)
        steps = recipe.training.steps or data.train.steps_for(recipe.training.epochs or 1)
        checkpoints = Checkpoints(folder / "checkpoints", recipe.checkpoint.keep_last)
        start = _resume(session, checkpoints) if resume else 0
        if rank.is_main:
            _announce(console, recipe, session, data, start, steps)
        with _reporting(rank, folder, steps, start, session, console) as metrics:
            hooks, saving = _hooks(recipe, session, data, checkpoints, metrics)
            finished = fit(
                engine,
                data.train.step,
                start=start,
                steps=steps,
                schedule=make_schedule(recipe.optimizer, recipe.schedule, steps),
                hooks=hooks,
                stop=stop,
                max_bad_steps=recipe.training.max_bad_steps,
            )
        last = saving.checkpoints.latest() if rank.is_main else None
        export = folder / "hf" if finished and recipe.checkpoint.export_hf else None
        if export is not None and last is not None:
            console.print(f"exporting the final weights to {export}", soft_wrap=True)
            to_hf(CheckpointSource(last), export, force=True)
        engine.share(None)  # nobody leaves before the export is done
        step = int(last.name.split("-")[1]) if last else 0
        return Outcome(step=step, finished=finished, checkpoint=last, export=export)


def describe_run(recipe: Recipe, source: Source) -> Callable[[Path], None]:
    """What is put into every checkpoint besides weights: the recipe, and the files that describe the model."""

    def describe(folder: Path) -> None:
        (folder / "recipe.yaml").write_text(dump_recipe(recipe))
        (folder / "hf").mkdir()
        source.copy_description(folder / "hf")
        if recipe.model.tokenizer is not None:  # not the one beside the weights
            for path in (folder / "hf" / name for name in TOKENIZER):
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            tokenizer_of(recipe).save_pretrained(folder / "hf")
        if recipe.data.chat_template is not None:
            shutil.copyfile(recipe.data.chat_template, folder / "hf" / "chat_template.jinja")

    return describe


def tokenizer_of(recipe: Recipe) -> Any:
    """The tokenizer that a recipe trains with."""
    template = recipe.data.chat_template
    return load_tokenizer(Path(recipe.model.tokenizer or recipe.model.path), Path(template) if template else None)


def data_of(recipe: Recipe, session: Session, cache: Path, console: Console | None = None) -> Data:
    """Loaders of the recipe's data for this rank."""
    training, groups = recipe.training, session.groups
    cut = Cut(
        global_batch=training.global_batch,
        micro_batch=training.micro_batch,
        data_rank=groups.data_rank,
        data_size=groups.layout.data,
    )
    return open_data(
        recipe,
        lambda: make_encoder(tokenizer_of(recipe), recipe.data, session.arch.vocab),
        cut,
        cache=cache,
        share=session.engine.share,
        is_main=session.rank.is_main,
        console=console,
    )


def _open_data(recipe: Recipe, session: Session, folder: Path, console: Console) -> Data:
    return data_of(recipe, session, Path(recipe.data.cache) if recipe.data.cache else folder / "data", console)


def _resume(session: Session, checkpoints: Checkpoints) -> int:
    """Load the newest complete checkpoint; how many steps it has."""
    engine = session.engine
    found = engine.share(checkpoints.latest() if engine.is_main else None)
    if engine.is_main:
        read_manifest(found)  # with the hash of every file
    engine.load(found)
    return int(found.name.split("-")[1])


def _announce(console: Console, recipe: Recipe, session: Session, data: Data, start: int, steps: int) -> None:
    groups = session.groups
    console.print(
        f"{session.arch.family} from {recipe.model.path} on {groups.layout.ranks} x {session.device.kind}, "
        f"layout {groups.layout}, {recipe.training.precision}, steps {start} to {steps}",
        soft_wrap=True,
    )
    for note in data.notes:
        console.print(note, soft_wrap=True, markup=False)


def _reporting(rank: Rank, folder: Path, steps: int, start: int, session: Session, console: Console) -> Any:
    if not rank.is_main:
        return contextlib.nullcontext()
    return Metrics(folder, steps=steps, start=start, memory=lambda: session.device.memory().peak, console=console)


def _hooks(
    recipe: Recipe, session: Session, data: Data, checkpoints: Checkpoints, metrics: Metrics | None
) -> tuple[list[Hook], Saving]:
    engine, training = session.engine, recipe.training
    hooks: list[Hook] = [] if metrics is None else [metrics]
    validation = None
    if (loader := data.validation) is not None:
        validation = Validation(
            engine, lambda: loader.once(training.validate_batches), every=training.validate_every, report=metrics
        )
        hooks.append(validation)
    if training.generate_every is not None:
        tokenizer = tokenizer_of(recipe)
        hooks.append(
            Samples(
                lambda prompt: greedy(engine, tokenizer, prompt, recipe.data.sequence),
                training.generate_prompts,
                every=training.generate_every,
                report=metrics,
            )
        )
    describe = describe_run(recipe, session.source)
    saving = Saving(engine, checkpoints, describe, every=recipe.checkpoint.every, validation=validation)
    return [*hooks, saving], saving
