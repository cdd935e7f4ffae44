"""How a model is trained: frozen values, written whole into the run folder and read back exactly.

Only the standard library is imported, so loading a model never imports the trainer. A recipe is
changed by `dataclasses.replace`; a domain subclasses `Recipe` for its augmentation.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

from zoo.config import build, field_types
from zoo.errors import ConfigError, nearest, shown

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

R = TypeVar("R")


def _check(where: object, **ranges: tuple[bool, str]) -> None:
    """Raise for the first field that is out of range."""
    for name, (right, takes) in ranges.items():
        if not right:
            given = shown(getattr(where, name))
            raise ConfigError(f"{type(where).__name__}: {name} is {given}; it takes {takes}")


def _positive(value: float) -> tuple[bool, str]:
    return 0 < value < math.inf, "more than 0"


def _not_negative(value: float) -> tuple[bool, str]:
    return 0 <= value < math.inf, "0 or more"


def _share(value: float) -> tuple[bool, str]:
    return 0 <= value <= 1, "0 to 1"


def _below_one(value: float) -> tuple[bool, str]:
    return 0 <= value < 1, "0 or more, less than 1"


def _count(value: int | None) -> tuple[bool, str]:
    return value is None or value >= 1, "1 or more"


def _betas(values: tuple[float, float]) -> tuple[bool, str]:
    return len(values) == 2 and all(0 <= b < 1 for b in values), "two of 0 or more, less than 1"


@dataclass(frozen=True, kw_only=True)
class SGD:
    """Stochastic gradient descent with momentum.

    Attributes:
        lr: Highest learning rate.
        momentum: Share of the last step that is kept, in [0, 1).
        nesterov: Look ahead by the momentum.
        weight_decay: L2 penalty of everything but norms and biases, added to the gradient.
    """

    lr: float
    momentum: float = 0.9
    nesterov: bool = True
    weight_decay: float = 5e-4

    def __post_init__(self) -> None:
        _check(
            self,
            lr=_positive(self.lr),
            momentum=_below_one(self.momentum),
            nesterov=(not self.nesterov or self.momentum > 0, "no when momentum is 0"),
            weight_decay=_not_negative(self.weight_decay),
        )


@dataclass(frozen=True, kw_only=True)
class AdamW:
    """Adam with weight decay apart from the gradient.

    Attributes:
        lr: Highest learning rate.
        betas: Of the averages of the gradient and of its square.
        eps: Added to the root of the second.
        weight_decay: Of everything but norms and biases, times the learning rate.

    Source: Loshchilov, Hutter 2017, https://arxiv.org/abs/1711.05101, algorithm 2.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        _check(
            self,
            lr=_positive(self.lr),
            betas=_betas(self.betas),
            eps=_positive(self.eps),
            weight_decay=_not_negative(self.weight_decay),
        )


@dataclass(frozen=True, kw_only=True)
class Lion:
    """The sign of an interpolated momentum; takes a 3 to 10 times lower rate than AdamW.

    Attributes:
        lr: Highest learning rate.
        betas: Of the interpolation of the update and of the momentum.
        weight_decay: Of everything but norms and biases, times the learning rate.

    Source: Chen et al. 2023, https://arxiv.org/abs/2302.06675, program 1.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.1

    def __post_init__(self) -> None:
        _check(
            self,
            lr=_positive(self.lr),
            betas=_betas(self.betas),
            weight_decay=_not_negative(self.weight_decay),
        )


@dataclass(frozen=True, kw_only=True)
class LAMB:
    """Adam with the step of each tensor scaled to the tensor's norm, for large batches.

    Attributes:
        lr: Highest learning rate.
        betas: Of the averages of the gradient and of its square.
        eps: Added to the root of the second.
        weight_decay: Of everything but norms and biases, within the scaled step.

    Source: You et al. 2019, https://arxiv.org/abs/1904.00962, algorithm 2.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 0.01

    def __post_init__(self) -> None:
        _check(
            self,
            lr=_positive(self.lr),
            betas=_betas(self.betas),
            eps=_positive(self.eps),
            weight_decay=_not_negative(self.weight_decay),
        )


@dataclass(frozen=True, kw_only=True)
class Muon:
    """Orthogonalised momentum for matrices and kernels; AdamW for the rest.

    The rest is all parameters of one axis, embeddings, and the model's head.

    Attributes:
        lr: Highest learning rate of matrices; the step of each is scaled to AdamW's size, so
            that AdamW's rates fit.
        momentum: Share of the last momentum that is kept, in [0, 1).
        weight_decay: Of everything but norms and biases, times the learning rate.
        adam_lr: Highest learning rate of the rest.

    Source: Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/; the scale is that of
        Liu et al. 2025, https://arxiv.org/abs/2502.16982, section 2.2.
    """

    lr: float
    momentum: float = 0.95
    weight_decay: float = 0.1
    adam_lr: float = 3e-4

    def __post_init__(self) -> None:
        _check(
            self,
            lr=_positive(self.lr),
            momentum=_below_one(self.momentum),
            weight_decay=_not_negative(self.weight_decay),
            adam_lr=_positive(self.adam_lr),
        )


@dataclass(frozen=True, kw_only=True)
class Cosine:
    """Linear warm-up, then half a cosine.

    Attributes:
        warmup: Share of all steps, in [0, 1].
        final: Factor of the learning rate that the end comes to, in [0, 1].
    """

    warmup: float = 0.0
    final: float = 0.0

    def __post_init__(self) -> None:
        _check(self, warmup=_share(self.warmup), final=_share(self.final))


@dataclass(frozen=True, kw_only=True)
class Linear:
    """Linear warm-up, then a straight line.

    Attributes:
        warmup: Share of all steps, in [0, 1].
        final: Factor of the learning rate that the end comes to, in [0, 1].
    """

    warmup: float = 0.0
    final: float = 0.0

    def __post_init__(self) -> None:
        _check(self, warmup=_share(self.warmup), final=_share(self.final))


@dataclass(frozen=True, kw_only=True)
class Poly:
    """Linear warm-up, then a power of the share that is left.

    Attributes:
        power: Above 0.
        warmup: Share of all steps, in [0, 1].
    """

    power: float = 0.9
    warmup: float = 0.0

    def __post_init__(self) -> None:
        _check(self, power=_positive(self.power), warmup=_share(self.warmup))


@dataclass(frozen=True, kw_only=True)
class OneCycle:
    """Half a cosine up, half a cosine down.

    Attributes:
        peak: Share of all steps after which the rate is highest, in [0, 1].
        start: Factor of the highest rate at the beginning, in [0, 1].
        final: Factor of the highest rate at the end, in [0, 1].

    Source: Smith, Topin 2017, https://arxiv.org/abs/1708.07120.
    """

    peak: float = 0.3
    start: float = 0.04
    final: float = 1e-4

    def __post_init__(self) -> None:
        _check(self, peak=_share(self.peak), start=_share(self.start), final=_share(self.final))


@dataclass(frozen=True, kw_only=True)
class Plateau:
    """Lower the rate whenever the metric has not improved for a while.

    Attributes:
        patience: Evaluations without improvement that are borne, 0 or more.
        factor: Of the rate, in (0, 1).
    """

    patience: int = 2
    factor: float = 0.1

    def __post_init__(self) -> None:
        factor = 0 < self.factor < 1, "more than 0, less than 1"
        _check(self, patience=_not_negative(self.patience), factor=factor)


@dataclass(frozen=True, kw_only=True)
class Constant:
    """One rate after a linear warm-up.

    Attributes:
        warmup: Share of all steps, in [0, 1].
    """

    warmup: float = 0.0

    def __post_init__(self) -> None:
        _check(self, warmup=_share(self.warmup))


@dataclass(frozen=True, kw_only=True)
class InverseRoot:
    """Linear warm-up, then the inverse square root of the step.

    Attributes:
        warmup: Share of all steps, in [0, 1]; without one the first step has the highest rate.

    Source: Vaswani et al. 2017, https://arxiv.org/abs/1706.03762, equation 3, whose highest rate is
        ``(d_model * warmup_steps) ** -0.5``.
    """

    warmup: float = 0.0

    def __post_init__(self) -> None:
        _check(self, warmup=_share(self.warmup))


Optimizer = SGD | AdamW | Lion | LAMB | Muon
Schedule = Cosine | Linear | Poly | OneCycle | Plateau | Constant | InverseRoot


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a model is trained, whatever its domain.

    Attributes:
        data: Training data: a published set ("cifar10/train") or a path.
        validation: Data to measure on, written as `data`, or a share of every class of the training
            data to hold out for it, "20%"; none measures nothing.
        init: Weights to begin with, TAG or NAME.TAG; none begins at random.
        task: Task of the model, where it is not the card's.
        config: Fields of the model's configuration that differ from the card's.
        epochs: Passes over the data, above 0; a fraction ends within one.
        batch_size: Items of a step, of all ranks and microbatches together.
        microbatches: Parts a rank's share of a step is computed in, one after the other.
        optimizer: What makes a step of a gradient, and how long a step.
        schedule: How the learning rate changes.
        precision: In which the model computes; weights stay float32.
        clip_norm: Highest norm of the gradient of all parameters; none clips nothing.
        ema: Decay of the average of the weights that is measured and kept, in (0, 1); none keeps
            none.
        label_smoothing: Share of the target given to all classes alike, in [0, 1).
        mixup: Parameter alpha of mixup, 0 or more; 0 is off.
        cutmix: Parameter alpha of cutmix, 0 or more; 0 is off.
        teacher: Trained weights whose probabilities are the targets, NAME.TAG; none learns from the
            labels alone.
        teacher_share: Share of the target that is the teacher's, in (0, 1].
        layer_decay: Factor of the learning rate from each depth to the one before, in (0, 1].
        freeze: Groups that are not trained, counted from the input; from the head if negative.
        freeze_epochs: Epochs after which these are thawed; none keeps them frozen.
        balanced: Draw every class equally often.
        buckets: Put items of like length into a batch.
        seed: Of the order, the augmentation, fresh weights and dropout.
        workers: Processes that prepare the data of each rank; 0 prepares in the training process.
        cache: GiB of memory for decoded items, which the workers share; 0 decodes each time anew.
        evaluate_every: Steps between two evaluations; none evaluates after each epoch.
        checkpoint_every: Steps between two checkpoints; none saves after each epoch.
        keep: Checkpoints that are kept, 1 or more; the last and the best are always among them.
        patience: Evaluations without improvement that are borne before the run ends early; none
            never ends it.
        metric: What "best" is measured by; empty means the task's own.
        nonfinite: What a step does whose loss or gradient is not finite: end the run or be skipped.
        compile: Compile the model.
        gradient_checkpointing: Compute activations twice rather than keep them.
        channels_last: Keep images and kernels with their channels last in memory.
        sync_batchnorm: Batch statistics over all ranks.
        strategy: Over several ranks: the whole model on each ("ddp"), a share of each parameter
            ("fsdp"), or some of the layers ("pipeline"), which then get the microbatches in turn.
    """

    data: str = ""
    validation: str = ""
    init: str | None = None
    task: str | None = None
    config: dict[str, Any] = field(default_factory=dict)
    epochs: float = 10.0
    batch_size: int = 128
    microbatches: int = 1
    optimizer: Optimizer = AdamW(lr=1e-3)
    schedule: Schedule = Cosine()
    precision: Literal["float32", "bfloat16", "float16"] = "float32"
    clip_norm: float | None = None
    ema: float | None = None
    label_smoothing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    teacher: str | None = None
    teacher_share: float = 1.0
    layer_decay: float = 1.0
    freeze: int = 0
    freeze_epochs: float | None = None
    balanced: bool = False
    buckets: bool = False
    seed: int = 0
    workers: int = 0
    cache: float = 0.0
    evaluate_every: int | None = None
    checkpoint_every: int | None = None
    keep: int = 2
    patience: int | None = None
    metric: str = ""
    nonfinite: Literal["stop", "skip"] = "stop"
    compile: bool = False
    gradient_checkpointing: bool = False
    channels_last: bool = False
    sync_batchnorm: bool = False
    strategy: Literal["ddp", "fsdp", "pipeline"] = "ddp"

    def __post_init__(self) -> None:
        _check(
            self,
            epochs=_positive(self.epochs),
            batch_size=_count(self.batch_size),
            microbatches=_count(self.microbatches),
            clip_norm=(self.clip_norm is None or 0 < self.clip_norm < math.inf, "more than 0"),
            ema=(self.ema is None or 0 < self.ema < 1, "more than 0, less than 1"),
            label_smoothing=_below_one(self.label_smoothing),
            mixup=_not_negative(self.mixup),
            cutmix=_not_negative(self.cutmix),
            teacher_share=(0 < self.teacher_share <= 1, "more than 0, at most 1"),
            layer_decay=(0 < self.layer_decay <= 1, "more than 0, at most 1"),
            freeze_epochs=_not_negative(self.freeze_epochs or 0),
            seed=(0 <= self.seed < 2**63, "0 or more, less than 2^63"),
            workers=_not_negative(self.workers),
            cache=_not_negative(self.cache),
            evaluate_every=_count(self.evaluate_every),
            checkpoint_every=_count(self.checkpoint_every),
            keep=_count(self.keep),
            patience=_not_negative(self.patience or 0),
        )


def to_plain(recipe: DataclassInstance) -> dict[str, Any]:
    """Every field as JSON holds it, defaults included; `from_plain` gives an equal recipe.

    An optimiser, a schedule and the like are tables that name their class under "kind".
    """
    return {f.name: _plain(getattr(recipe, f.name)) for f in dataclasses.fields(recipe)}


def from_plain(cls: type[R], values: Mapping[str, Any], *, where: str = "the recipe") -> R:
    """The recipe of plain values; fields that are absent have their defaults.

    Args:
        cls: `Recipe` or the one of a domain.
        values: As `to_plain` writes them.
        where: What they were read from; opens every message.

    Raises:
        ConfigError: An unknown field or kind, with the nearest names, a value of the wrong type or
            one that is out of range.
    """
    made = dict(values)
    for name, hint in field_types(cls).items():  # type: ignore[arg-type]
        able: tuple[type, ...] = get_args(hint) or (hint,)
        kinds = {k.__name__: k for k in able if dataclasses.is_dataclass(k)}
        if kinds and isinstance(value := made.get(name), Mapping):
            made[name] = _of_kind(kinds, value, where, name)
    for name in sorted(field_types(cls).keys() & made.keys()):  # type: ignore[arg-type]
        if isinstance(made[name], float) and not math.isfinite(made[name]):
            raise ConfigError(f"{where}: {name} is {made[name]}; it takes a finite number")
    try:
        return build(cls, made, where=where)
    except ConfigError as error:
        if error.line.startswith(where):
            raise
        raise ConfigError(f"{where}: {error.line}", *error.details) from None


def _of_kind(kinds: Mapping[str, type], value: Mapping[str, Any], where: str, name: str) -> object:
    fields = dict(value)
    kind = fields.pop("kind", None)
    if not isinstance(kind, str) or kind not in kinds:
        known = nearest(kind, kinds) if isinstance(kind, str) else ""
        takes = ", ".join(kinds)
        raise ConfigError(f"{where}: {name}.kind is {shown(kind)};{known} it is one of {takes}")
    try:
        return build(kinds[kind], fields, where=f"{where}: {name}")
    except ConfigError as error:
        if error.line.startswith(where):
            raise
        raise ConfigError(f"{where}: {name}: {error.line}", *error.details) from None


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
        return {"kind": type(value).__name__, **fields}
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
