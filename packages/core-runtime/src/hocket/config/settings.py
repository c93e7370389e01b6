"""The settings of a run beside its strategy: task, optimizer, length, ranks, transport and output."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import StrEnum

from hocket.config.reference import Reference
from hocket.delays import ComputeModel, Delays
from hocket.launch.hosts import MOST_RANKS
from hocket.loggers import Logger
from hocket.plain import Tree
from hocket.transport.network import NetworkModel

#: Keys that describe a strategy in words and change nothing.
DESCRIPTIVE = (
    "name",
    "description",
    "source",
    "changes",
    "loss_percent",
    "accuracy_points",
    "measured_with",
    "accuracy",
    "measured_on",
)

#: Keys that change no number of a run beside its seed: descriptions, reports, and what guards it.
REPORTING = (*DESCRIPTIVE, "recipe", "trace", "trace_steps", "report", "checkpoint", "timeout_s")


class TransportName(StrEnum):
    """The transport, which moves bytes between ranks."""

    MPI = "mpi"
    TORCH = "torch"
    VIRTUAL = "virtual"


class Device(StrEnum):
    """The device of a model; `auto`: CUDA if torch finds it and the run can use it, else the CPU."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class Precision(StrEnum):
    """The dtype in which a model computes; `bf16`: torch.autocast, and parameters and gradients stay float32."""

    FLOAT32 = "float32"
    BF16 = "bf16"


class Lanes(StrEnum):
    """The carrier of exchanges: the transport, in host memory, or a backend of torch, in the model's memory.

    `nccl` (experimental) does so on CUDA, `gloo` on the CPU.
    """

    HOST = "host"
    NCCL = "nccl"
    GLOO = "gloo"


class OnNonfinite(StrEnum):
    """The reaction to NaN or Inf in data to send: end the run, or skip the step and count it."""

    ERROR = "error"
    SKIP = "skip"


@dataclass(frozen=True)
class CheckpointSettings:
    """The times at which a run is saved, so that `hocket resume` can continue it.

    Attributes:
        every: number of steps between two checkpoints, 1 or more; a run also saves at its end. Null: no checkpoints.
        keep: the number of newest checkpoints to keep, 1 or more.
        blocking: whether training waits until a checkpoint is written; if not, a thread writes a copy of the state
            from host memory.
    """

    every: int | None = None
    keep: int = 2
    blocking: bool = True

    def __post_init__(self) -> None:
        for name in ("every", "keep"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")


@dataclass(frozen=True)
class IslandSettings:
    """The ranks that share one replica, by FSDP2 or tensor parallelism; strategies run between islands.

    Attributes:
        shard: the number of ranks over which each replica is sharded, 1 or more; with 1, every rank has a whole model.
        replicate: the number of such shardings in an island, whose gradients FSDP2 averages in each step (HSDP); 1 or
            more.
        tensor: the number of ranks that share each shard by tensor parallelism, and compute with the same samples, 1 or
            more; the task gives the plan.
    """

    shard: int = 1
    replicate: int = 1
    tensor: int = 1

    def __post_init__(self) -> None:
        for name in ("shard", "replicate", "tensor"):
            value = getattr(self, name)
            if not 1 <= value <= MOST_RANKS:
                raise ValueError(f"{name} must be 1 to {MOST_RANKS}, not {value}")
        if self.replicate > self.shard == 1:
            raise ValueError(
                f"replicate is {self.replicate}, but shard is 1, so every rank holds a whole model: leave replicate "
                "out, or shard over 2 ranks or more"
            )

    @property
    def ranks(self) -> int:
        """The number of ranks of an island; 1 for whole models."""
        return self.shard * self.replicate * self.tensor

    def count(self, ranks: int) -> str:
        """Return a number of ranks, and that of their islands, as text."""
        text = f"{ranks} rank{'s' * (ranks != 1)}"
        islands = ranks // self.ranks
        return (
            text if self.ranks == 1 else f"{text} in {islands} island{'s' * (islands != 1)} of {self.ranks}"
        )


#: Ranks add theirs to it, and torch takes 64 bits.
LARGEST_SEED = 2**63 - 1
#: More processes of one rank than any host has use for.
MOST_WORKERS = 1024

#: The longest wait that threads can express; nobody waits so long.
LONGEST_TIMEOUT_S = 1e9


@dataclass(frozen=True)
class RunSettings:
    """A run's file without its strategy; each field is a key of the file.

    Attributes:
        name: the name of the run's recipe or file.
        description: one line on what the recipe does.
        source: the paper that the recipe comes from.
        changes: how a step of the recipe differs from a step with the mean of all gradients, for `hocket recommend`;
            the text begins with `nothing` if there is no difference.
        loss_percent: the difference of the loss on characters from that of `sgd`, in per cent, after 600 steps with
            AdamW on 8 ranks (docs/atlas); null where not measured.
        accuracy_points: the difference of the accuracy on Fashion-MNIST, with SGD, in percentage points; null where not
            measured.
        measured_with: the overrides with which `loss_percent` and `accuracy_points` were measured.
        accuracy: the loss of accuracy in tests other than those of `loss_percent` and `accuracy_points`.
        measured_on: the tests in which `accuracy` was measured, and the page that reports them.
        recipe: the name of the recipe that the file is based on.
        task: data, model and loss.
        optimizer: an optimizer of torch.optim by its lower-case name, or any other as `module:Class`, with keyword
            arguments. `rest` is a second optimizer; the first then gets only the hidden matrices: parameters with two
            dimensions, except those of embeddings and of the head.
        start_from: the file or folder of the model to begin with, as for `hocket run --from`; null for the task's
            own model.
        schedulers: schedulers of torch.optim.lr_scheduler by their lower-case names, with keyword arguments. All of
            them step after each step, so their factors multiply; reducelronplateau steps when its `metric` is known.
        accumulate: batches per step of the optimizer, 1 or more; each step uses the mean gradient of their samples.
            `steps` counts the optimizer's steps.
        clip_grad_norm: the largest norm of the whole model's gradient, more than 0; null for no clipping.
        engine: the engine, which runs a batch through the model.
        epochs: passes over the data, 1 or more.
        batch_size: samples per rank and batch, 1 or more.
        seed: the seed of the model, the data's order, dropout and injected delays; 0 to 2**63 - 1. Components of the
            strategy have a key `seed` of their own, which this key does not change.
        ranks: the number of ranks to start, 1 or more; null for the number that the launcher starts.
        transport: the transport between ranks; null for the one that fits the launcher, without a launcher MPI if it is
            installed, else torch.
        island: the group of ranks that holds one replica of the model; strategies run between these islands.
        device: the device that the model is trained on.
        precision: the dtype in which the model computes.
        lanes: the way in which exchanges travel: `host` for messages from host memory, or torch's `nccl` or `gloo`.
        timeout_s: the longest wait before an error, in seconds; more than 0, at most 1e9.
        log_every: steps between two lines of metrics, 1 or more.
        eval_every: steps between two evaluations on held-out samples, 1 or more; null to evaluate only at the end of
            each epoch, which always happens.
        num_workers: processes of each rank that read samples ahead, 0 to 1024; 0 for none.
        trace: write `trace.json.gz`, a timeline of every rank, beside the other results.
        trace_steps: the steps in the trace, counted from 0: [100, 120] for 100 to 119; null for all.
        loggers: other places to write metrics to, besides `metrics.jsonl`: csv, tensorboard, wandb, or a plugin's
            logger.
        report: write `report.html`, a page on the run, beside the other results; needs plotly.
        checkpoint: the times at which the run is saved.
        on_nonfinite: the reaction to NaN or Inf in gradients: an `error` that names rank and parameter, or all ranks
            `skip` the step.
        steps: the number of steps to stop after, 1 or more; null to run all epochs.
        network: the network that the virtual transport imitates and `plan` predicts for.
        compute: the computing time of a step on the virtual transport, whose clock does not measure it.
        delays: injected imbalance: the delay of each rank in each step, for any strategy; null for none.
        synchronous_steps: the number of first steps that exchange as recipe `agd` does, 0 or more; if `steps` is set,
            it may be a share of them, such as 25%. The complete configuration (`--print-config`) lists them under
            `phases`.
        phases: overrides of the strategy, by the step from which they hold; each adds to the earlier ones.
    """

    name: str | None = None
    description: str = ""
    source: str = ""
    changes: str = ""
    loss_percent: float | None = None
    accuracy_points: float | None = None
    measured_with: tuple[str, ...] = ()
    accuracy: str = ""
    measured_on: str = ""
    recipe: str | None = None
    task: Reference = field(default_factory=lambda: Reference("digits"))
    optimizer: Reference = field(default_factory=lambda: Reference("sgd", {"lr": 0.1, "momentum": 0.9}))
    start_from: str | None = None
    schedulers: tuple[Reference, ...] = ()
    accumulate: int = 1
    clip_grad_norm: float | None = None
    engine: Reference = field(default_factory=lambda: Reference("data_parallel"))
    epochs: int = 20
    batch_size: int = 32
    seed: int = 0
    ranks: int | None = None
    transport: TransportName | None = None
    island: IslandSettings = field(default_factory=IslandSettings)
    device: Device = Device.AUTO
    precision: Precision = Precision.FLOAT32
    lanes: Lanes = Lanes.HOST
    timeout_s: float = 300.0
    log_every: int = 10
    eval_every: int | None = None
    num_workers: int = 0
    trace: bool = False
    trace_steps: list[int] | None = None
    loggers: tuple[Logger, ...] = ()
    report: bool = False
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    on_nonfinite: OnNonfinite = OnNonfinite.ERROR
    steps: int | None = None
    network: NetworkModel = field(default_factory=NetworkModel)
    compute: ComputeModel = field(default_factory=ComputeModel)
    delays: Delays | None = None
    synchronous_steps: int = 0
    phases: Tree = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.name is not None and not self.name.isprintable():
            raise ValueError(f"name is {self.name!r}; allowed: printable characters on one line")
        for name in ("accumulate", "epochs", "batch_size", "ranks", "log_every", "eval_every", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")
        if self.ranks is not None and self.ranks > MOST_RANKS:
            raise ValueError(f"ranks must be {MOST_RANKS} or fewer, not {self.ranks}")
        for name, most in (("seed", LARGEST_SEED), ("num_workers", MOST_WORKERS)):
            value = getattr(self, name)
            if not 0 <= value <= most:
                words = "0 or more" if value < 0 else f"at most {most}"
                raise ValueError(f"{name} must be {words}, not {value}")
        window = self.trace_steps
        if window is not None and not (len(window) == 2 and 0 <= window[0] < window[1]):
            raise ValueError(
                f"trace_steps is {window}; allowed: the first step, counted from 0, and the step after the last, "
                "such as [100, 120]"
            )
        for name in ("task", "optimizer", "schedulers", "engine"):
            problem = _no_number(getattr(self, name), name)
            if problem:
                raise ValueError(problem)
        for name in ("timeout_s", "clip_grad_norm"):
            value = getattr(self, name)
            if value is not None and not 0 < value < math.inf:
                raise ValueError(f"{name} must be finite and more than 0, not {value}")
        if self.timeout_s > LONGEST_TIMEOUT_S:
            raise ValueError(f"timeout_s must be at most {LONGEST_TIMEOUT_S:g}, not {self.timeout_s}")

    @property
    def trace_window(self) -> tuple[int, int] | None:
        """The steps in the trace, as the first and the one after the last; None for all."""
        return None if self.trace_steps is None else (self.trace_steps[0], self.trace_steps[1])


def _no_number(given: object, path: str) -> str:
    """Return the problem with a number among a component's arguments, or an empty string."""
    if isinstance(given, Reference):
        given = given.arguments
    items = (
        given.items()
        if isinstance(given, Mapping)
        else enumerate(given)
        if isinstance(given, list | tuple)
        else ()
    )
    for key, value in items:
        if isinstance(value, float) and not math.isfinite(value):
            return f"{path}: {key} is {value}; allowed: finite numbers"
        if isinstance(value, int) and abs(value) > 2**63:
            return f"{path}: {key} is an integer of more than 64 bits"
        if problem := _no_number(value, f"{path}: {key}"):
            return problem
    return ""


#: The components that a run's file may change in part, such as `optimizer: {lr: 0.05}`, as configuration.
DEFAULTS = {name: getattr(RunSettings(), name).plain() for name in ("task", "optimizer", "engine")}

#: The keys at the root of a run's file.
ROOT_KEYS = (*(setting.name for setting in fields(RunSettings)), "strategy")
