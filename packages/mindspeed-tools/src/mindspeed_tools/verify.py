"""Is a checkpoint the model that it was made from? Three answers: by tensor, by configuration key, by what is computed.

Weights that are equal do not make a model that is: a key that was not understood changes no weight. So logits and
losses are compared too, at all positions, in every layout that the model allows. Where they differ, activations are
compared module by module, and the first that differs is named.
"""

import math
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from mindspeed_kernels.errors import UserError
from mindspeed_models.families import Arch
from mindspeed_models.families.settings import transformers_config
from mindspeed_models.plan import check_plan
from mindspeed_models.weights.convert import to_megatron
from mindspeed_models.weights.shards import Box, Shards
from mindspeed_models.weights.source import CheckpointSource, Source, open_source, read_config
from mindspeed_parallel.layout import Layout, parse_layout
from mindspeed_runtime.config import ConfigError
from mindspeed_runtime.launch import Pool
from mindspeed_train import PRELOAD
from torch import Tensor

from .verify_recipe import recipe_of

USUAL = ("tp1", "tp2", "tp3", "pp2", "tp2pp2", "pp2vpp2")
USUAL_WITH_EXPERTS = ("tp1", "tp2sp", "pp2", "ep2dp2", "tp2ep2sp", "tp2pp2sp", "pp2vpp2")
TOLERANCE = {"fp64": 1e-10, "fp32": 1e-4}  # of logits and losses, relative to the largest reference value
_HARMLESS = ("dtype", "torch_dtype", "transformers_version", "_name_or_path", "architectures")
_REFERENCE = "mindspeed_tools.verify_rank:reference"
_COMPUTED = "mindspeed_tools.verify_rank:computed"
_GRADIENTS = "mindspeed_tools.verify_rank:gradients"
_TIMEOUT_S = 900.0


@dataclass(frozen=True, kw_only=True)
class LayoutReport:
    """How one layout computes."""

    layout: str
    logits: float  # largest difference, relative to the largest reference value
    loss: float
    tolerance: float
    gradients: float | None = None  # largest difference of a gradient, relative to its largest value; None: not asked
    gradient: str | None = None  # the tensor that it is of
    first: str | None = None  # the first module that differs, in the order of a forward pass
    modules: dict[str, float] = field(default_factory=dict)  # differences, where they were asked for

    @property
    def holds(self) -> bool:
        """Within the tolerance; what is not a number never is."""
        return all(math.isfinite(x) and x <= self.tolerance for x in (self.logits, self.loss, self.gradients or 0.0))


@dataclass(frozen=True, kw_only=True)
class Report:
    """The three answers."""

    precision: str
    tensors: int
    differing_tensors: tuple[str, ...]
    differing_keys: tuple[str, ...]
    layouts: tuple[LayoutReport, ...]

    @property
    def holds(self) -> bool:
        """Equal in everything."""
        return not self.differing_tensors and not self.differing_keys and all(item.holds for item in self.layouts)

    @property
    def first_failure(self) -> str:
        """What differs, in a sentence; the most telling first."""
        if self.differing_keys:
            return f"configuration key {self.differing_keys[0]}"
        if self.differing_tensors:
            more = len(self.differing_tensors) - 1
            return f"tensor {self.differing_tensors[0]}" + (f" (and {more} more)" if more else "")
        for item in self.layouts:
            if not item.holds and item.first is None and item.gradients is not None:
                return f"layout {item.layout}: the gradient of {item.gradient} differs by {item.gradients:.1e}"
            if not item.holds:
                worst = max(item.logits, item.loss)
                return f"layout {item.layout}: differs by {worst:.1e}, first in {item.first}"
        return ""

    def as_json(self) -> dict[str, Any]:
        """For a file."""
        return {**asdict(self), "holds": self.holds}


def verify(
    model: Path,
    against: Path | None,
    *,
    layouts: str = "auto",
    precision: str = "fp64",
    gradients: bool = False,
    say: Callable[[str], None] = lambda _: None,
) -> Report:
    """Compare ``model`` with its checkpoint ``against``, or with a conversion made for the purpose.

    ``gradients``: those of every weight too, in fp64.
    """
    if gradients and precision != "fp64":
        raise UserError(f"--gradients: they are compared in fp64, not in {precision}; leave --precision out")
    source = open_source(model)
    if isinstance(source, CheckpointSource):
        raise UserError(
            f"{model}: is a checkpoint; name the Hugging Face folder or GGUF file that it came from, and it --against"
        )
    if against is not None and not isinstance(open_source(against, weights=False), CheckpointSource):
        raise UserError(f"--against {against}: is not a checkpoint; make one with `mindspeed-convert to-megatron`")
    chosen = choose_layouts(source.arch, layouts)
    with tempfile.TemporaryDirectory(prefix="mindspeed-verify-") as folder:
        if against is None:
            against = Path(folder) / "checkpoint"
            to_megatron(source, against)
        keys = _differing_keys(source, against)
        for key in keys:
            say(f"configuration  DIFFERS  {key}")
        if keys:
            # The checkpoint describes another model: what it computes would only say so again.
            return Report(precision=precision, tensors=0, differing_tensors=(), differing_keys=keys, layouts=())
        say("configuration  equal")
        count, tensors = _differing_tensors(source, open_source(against))
        say(f"tensors        {'DIFFERS  ' + tensors[0] if tensors else f'equal, all {count} bit for bit'}")
        reports = _computed(source, against, chosen, precision, gradients, Path(folder), say)
    return Report(
        precision=precision, tensors=count, differing_tensors=tensors, differing_keys=keys, layouts=tuple(reports)
    )


def choose_layouts(arch: Arch, text: str) -> list[Layout]:
    """The layouts to try: those named, or those of the usual ones that the model allows."""
    if text == "auto":
        usual = USUAL_WITH_EXPERTS if arch.expert_layers else USUAL
        return [layout for name in usual if _refusal(arch, layout := parse_layout(name)) is None]
    layouts = [parse_layout(name.strip()) for name in text.split(",")]
    for layout in layouts:
        if (reason := _refusal(arch, layout)) is not None:
            raise UserError(f"--layouts {layout}: {reason}")
    return layouts


def _refusal(arch: Arch, layout: Layout) -> str | None:
    """Why the model cannot run in ``layout``, in the words in which a recipe would be refused; None: it can."""
    try:
        check_plan(recipe_of("", layout, "fp64"), arch, layout.ranks)
    except ConfigError as error:
        return str(error)
    return None


def _differing_keys(source: Source, against: Path) -> tuple[str, ...]:
    theirs, ours = _understood(source.config), _understood(read_config(against))
    return tuple(
        f"{key}: {_shown(theirs, key)} in the model, {_shown(ours, key)} in the checkpoint"
        for key in sorted(set(theirs) | set(ours))
        if key not in _HARMLESS and not key.startswith("_") and theirs.get(key) != ours.get(key)
    )


def _understood(config: Mapping[str, Any]) -> dict[str, Any]:
    """Every key as transformers understands it: a default that is spelled out is the default."""
    return transformers_config(config).to_dict()


def _shown(config: dict[str, Any], key: str) -> str:
    return repr(config[key]) if key in config else "absent"


def _differing_tensors(source: Source, checkpoint: Source) -> tuple[int, tuple[str, ...]]:
    """Map the checkpoint back through the rules and compare with the model's own tensors, bit for bit."""
    differing: list[str] = []
    count = 0
    for rule, box in (part for name in source.rules for part in source.parts(name)):
        theirs, ours = (rule.unpack(held.read(box).view(rule.shape)) for held in (source, checkpoint))
        for hf, a, b in zip(rule.hf, theirs, ours, strict=True):
            count += 1
            if a.dtype != b.dtype or not torch.equal(_raw(a), _raw(b)):
                differing.append(f"{hf} ({box.key} in the checkpoint)")
    return count, tuple(differing)


def _raw(tensor: Tensor) -> Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _computed(
    source: Source,
    against: Path,
    layouts: Sequence[Layout],
    precision: str,
    gradients: bool,
    folder: Path,
    say: Callable[[str], None],
) -> list[LayoutReport]:
    reports = []
    size = max(layout.ranks for layout in layouts)
    with Pool(size, preload=PRELOAD, log_dir=folder / "logs") as pool:
        deserved = pool.run(_REFERENCE, source.path, precision, folder, gradients, nproc=1, timeout_s=_TIMEOUT_S)[0]
        tolerance = TOLERANCE[precision] if precision in TOLERANCE else float(deserved)
        for layout in layouts:
            arguments = (against, layout, precision, folder, tolerance)
            found = pool.run(_COMPUTED, *arguments, nproc=layout.ranks, timeout_s=_TIMEOUT_S)[0]
            if gradients:
                here = folder / f"gradients-{layout}"
                pool.run(_GRADIENTS, against, layout, here, nproc=layout.ranks, timeout_s=_TIMEOUT_S)
                found["gradients"], found["gradient"] = _compare_gradients(source, here, folder / "gradients.pt")
                shutil.rmtree(here)
            reports.append(LayoutReport(layout=str(layout), tolerance=tolerance, **found))
            say(_line(reports[-1]))
    return reports


def _compare_gradients(source: Source, ours: Path, theirs: Path) -> tuple[float, str]:
    """The largest relative difference of a gradient, and the Hugging Face tensor that it is of.

    Relative to the largest value of that gradient, or to a thousandth of the largest of all: some gradients are nothing
    but rounding, as that of a key bias without rotary embedding, which no softmax sees.
    """
    shards, expected = Shards(ours), torch.load(theirs, mmap=True)
    ruled = {hf for rule in source.rules.values() for hf in rule.hf}
    for name in expected:
        if name not in ruled:
            return math.inf, f"{name} (of transformers alone)"
    floor = 1e-3 * max((float(gradient.abs().max()) for gradient in expected.values()), default=0.0)
    worst = (0.0, "")
    for name, rule in source.rules.items():
        if not rule.is_trained:
            continue
        whole = torch.empty(rule.shape, dtype=torch.float64)
        shards.load([(Box.of_whole(name, rule.shape), whole)])
        for hf, part in zip(rule.hf, rule.unpack(whole), strict=True):
            if hf not in expected:
                return math.inf, f"{hf} (ours alone)"
            scale = max(float(expected[hf].abs().max()), floor) or 1.0
            difference = float((part - expected[hf]).abs().max()) / scale
            if not difference <= worst[0]:  # also when it is not a number
                worst = (difference, hf)
    return worst


def _line(item: LayoutReport) -> str:
    gradients = "" if item.gradients is None else f", gradients {item.gradients:.1e}"
    figures = f"logits {item.logits:.1e}, loss {item.loss:.1e}{gradients} (bound {item.tolerance:.1e})"
    where = ""
    if not item.holds:
        where = f"  first in {item.first}" if item.first else f"  gradient of {item.gradient}"
    return f"{item.layout:<14} {'equal' if item.holds else 'DIFFERS'}  {figures}{where}"
