"""The recipe: one frozen dataclass a section, shared by both backends.

Field comments are the documentation of the recipe; ``mindspeed_runtime.config`` reads YAML into these. A field of
None says in its comment whether that means off or derived.
"""

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal


class Section:
    """A part of a recipe: unknown keys are refused."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}


@dataclass(frozen=True, kw_only=True)
class ModelConfig(Section):
    """Which model, and where its first weights come from."""

    path: str  # Hugging Face folder, GGUF file, or checkpoint folder of this project
    init: Literal["weights", "random"] = "weights"  # random: the config of path, fresh weights
    init_std: float = 0.02  # of random weights
    tokenizer: str | None = None  # folder; None: beside the weights
    dropout: float | None = None  # of attention, and of what layers add if the model has it; None: the model's own


@dataclass(frozen=True, kw_only=True)
class DataConfig(Section):
    """What is trained on. Relative paths are relative to the recipe file."""

    train: tuple[str, ...]  # files, folders or globs
    validation: tuple[str, ...] = ()  # likewise; empty: no validation
    format: Literal["text", "messages", "alpaca"] = "text"  # text: pre-training; the others: chat rows
    text_key: str = "text"  # the field of a jsonl row that holds the text (format text)
    sequence: int = 512  # tokens a row
    packing: bool = False  # several documents a row, attention kept apart, positions restarted
    padding: Literal["full", "longest"] = "full"  # longest: of the global batch, rounded up to what the layout needs
    chat_template: str | None = None  # file with a Jinja template; None: the tokenizer's own
    shuffle: bool = True  # training rows in another order every epoch; false: as they stand
    cache: str | None = None  # folder of tokenised data; None: below the output folder
    bad_rows: Literal["stop", "skip"] = "stop"  # stop: list them before training; skip: leave out, and count


@dataclass(frozen=True, kw_only=True)
class ParallelConfig(Section):
    """Degrees that both backends know. Data parallelism is what the number of processes leaves."""

    tensor: int = 1  # parts that each matrix is cut into
    pipeline: int = 1  # stages that the layers are dealt to
    context: int = 1  # parts that the tokens of a row are cut into; 1 until it runs
    expert: int = 1  # parts that the experts are dealt to; 1 until it runs
    sequence: bool = False  # sequence parallelism over the tensor axis


@dataclass(frozen=True, kw_only=True)
class MegatronConfig(Section):
    """What only the Megatron backend knows."""

    virtual: int = 1  # model chunks a pipeline stage
    layers: tuple[int, ...] | None = None  # layers of each model chunk (uneven splits); None: evenly
    distributed_optimizer: bool = True  # optimizer state cut over the data ranks; false: whole on each


@dataclass(frozen=True, kw_only=True)
class Fsdp2Config(Section):
    """What only the FSDP2 backend knows."""

    shard: int | Literal["auto"] = "auto"  # ranks that share one copy of the weights; auto: all
    replicate: int = 1  # copies of the weights
    offload: bool = False  # weights and optimizer state in host memory
    compile: bool = False  # the model compiled by torch.compile


@dataclass(frozen=True, kw_only=True)
class TuningConfig(Section):
    """Which parameters are trained."""

    method: Literal["full"] = "full"  # full: all of them


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig(Section):
    """AdamW as Loshchilov and Hutter define it, decoupled weight decay."""

    name: Literal["adamw"] = "adamw"  # the algorithm
    lr: float = 1.0e-5  # the largest learning rate; the schedule says what becomes of it
    weight_decay: float = 0.1  # of matrices, embeddings among them
    beta1: float = 0.9  # decay of the mean of gradients
    beta2: float = 0.95  # decay of the mean of squared gradients
    eps: float = 1.0e-8  # added to the root of the mean of squared gradients
    clip: float | None = 1.0  # largest global gradient norm; None: off
    decay_1d: bool = False  # weight decay on norms and biases too


@dataclass(frozen=True, kw_only=True)
class ScheduleConfig(Section):
    """The learning rate over the run."""

    kind: Literal["cosine", "constant"] = "cosine"  # after the warm-up; cosine: half a wave down to min_lr
    warmup_steps: int = 0  # linear, from zero up to optimizer.lr
    min_lr: float = 0.0  # where the cosine ends


@dataclass(frozen=True, kw_only=True)
class TrainingConfig(Section):
    """How long and in what pieces."""

    steps: int | None = None  # optimizer steps; None: from epochs
    epochs: float | None = None  # passes over the training rows; None: from steps
    global_batch: int = 8  # rows an optimizer step
    micro_batch: int = 1  # rows a forward pass
    seed: int = 1234  # of data order, dropout and random weights
    precision: Literal["bf16", "fp32"] = "bf16"  # of weights and activations; gradients and moments are fp32
    validate_every: int | None = None  # steps; None: off
    validate_batches: int | None = None  # global batches of a validation; None: all rows
    generate_every: int | None = None  # steps between sample generations; None: off
    generate_prompts: tuple[str, ...] = ()  # what the samples answer to
    max_bad_steps: int = 5  # steps with non-finite gradients in a row before the run stops


@dataclass(frozen=True, kw_only=True)
class MemoryConfig(Section):
    """Memory against time."""

    recompute: Literal["none", "selective", "full"] = "none"  # in the backward pass; selective: attention; full: layers


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig(Section):
    """What is kept, and where. The folder also holds logs, metrics and the exported model."""

    folder: str = "out"  # relative to the working directory
    every: int | None = None  # steps; None: at the end only
    keep_last: int | None = 2  # None: all
    export_hf: bool = True  # final weights in Hugging Face format, folder/hf


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(Section):
    """Processes and devices."""

    device: Literal["auto", "npu", "cuda", "cpu"] = "auto"  # auto: the first that works, in this order
    timeout_s: float = 600.0  # of one collective
    port: int | None = None  # rendezvous; None: a free one


@dataclass(frozen=True, kw_only=True)
class Recipe(Section):
    """A whole run."""

    backend: Literal["megatron", "fsdp2"] = "megatron"  # which trainer
    stage: Literal["pretrain", "sft"] = "sft"  # pretrain: every token of text; sft: the answers of chat rows
    model: ModelConfig
    data: DataConfig
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    megatron: MegatronConfig = field(default_factory=MegatronConfig)
    fsdp2: Fsdp2Config = field(default_factory=Fsdp2Config)
    tuning: TuningConfig = field(default_factory=TuningConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    training: TrainingConfig = field(default_factory=TrainingConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    kernels: dict[str, str] = field(default_factory=dict)  # operator: implementation
    features: dict[str, dict[str, Any]] = field(default_factory=dict)  # feature: its options
