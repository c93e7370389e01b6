"""The configuration of an `eapipe.pipeline`; imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from hocket.api import Engine, draws
from hocket_eapipe.mesh import Mesh


class Policy(StrEnum):
    """A policy of weights: the values that a batch's passes read, and the use of its gradient."""

    NAIVE = "naive"
    STASHING = "stashing"
    VERTICAL_SYNC = "vertical_sync"
    SPECTRAIN = "spectrain"
    ELASTIC = "elastic"
    FLUSH = "flush"


class Balance(StrEnum):
    """The quantity that stages share out about equally."""

    PARAMETERS = "parameters"
    LAYERS = "layers"


class BatchNormStatistics(StrEnum):
    """Sources of the master's BatchNorm statistics; in training each replica has its own."""

    AVERAGED = "averaged"
    REESTIMATED = "reestimated"


@dataclass(frozen=True)
class PipelineConfig(Engine):
    """A pipeline of N stages of a model, one per rank or several; batches follow each other through them.

    Each stage alternates forwards and backwards of different batches (one forward, one backward). With D pipelines the
    ranks are a D x P mesh, rank = pipeline * P + place, and the strategy runs among the D holders of each stage.

    Attributes:
        stages: N, the number of stages; null for as many as a pipeline has ranks. If there are more stages than ranks,
            a rank holds several (virtual stages), with the same results.
        pipelines: D, the number of pipelines, 1 or more; the number of ranks must be a multiple of it.
        policy: naive, stashing (PipeDream), vertical_sync (PipeDream), spectrain, elastic (EA-Pipe) or flush (GPipe).
        alpha: with elastic: the strength with which replica and master pull each other, strictly between 0 and 1.
        tau: with elastic: the number of a replica's batches from one pull to the next, 1 or more.
        micro_batches: with flush: the number of micro-batches per batch, 1 or more.
        clip_grad_norm: with flush: the largest norm of the whole model's gradient, more than 0; null for no clipping.
        balance: whether stages have about equally many `parameters`, or equally many `layers`.
        cuts: the layers, by name, with which each stage but the first begins; null to choose them by `balance`.
        buffers: with elastic: the master's BatchNorm statistics, elastically averaged like the weights, or reestimated
            by the master, before each evaluation, over the last batches.
        seed: the seed of modules' draws (dropout), 0 to 2**64 - 1: draws depend only on it, the stage and the batch.

    Raises:
        ValueError: a value is out of its range, or of no use with the policy.
    """

    stages: int | None = None
    pipelines: int = 1
    policy: Policy = Policy.ELASTIC
    alpha: float = 0.3
    tau: int = 1
    micro_batches: int = 1
    clip_grad_norm: float | None = None
    balance: Balance = Balance.PARAMETERS
    cuts: list[str] | None = None
    buffers: BatchNormStatistics = BatchNormStatistics.AVERAGED
    seed: int = 0

    def __post_init__(self) -> None:
        if self.cuts is not None:
            # A configuration is hashed by its fields.
            object.__setattr__(self, "cuts", tuple(self.cuts))
        for name in ("stages", "pipelines", "tau", "micro_batches"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value}")
        if not 0 < self.alpha < 1:
            raise ValueError(f"alpha must be more than 0 and less than 1, not {self.alpha}")
        if self.micro_batches > 1 and self.policy is not Policy.FLUSH:
            raise ValueError(
                f"micro_batches is {self.micro_batches}, but only policy flush divides batches: leave it out, or "
                "use policy flush"
            )
        if self.clip_grad_norm is not None:
            if not self.clip_grad_norm > 0:
                raise ValueError(f"clip_grad_norm must be more than 0, not {self.clip_grad_norm}")
            if self.policy is not Policy.FLUSH:
                raise ValueError(
                    "clip_grad_norm works only with policy flush, as with others stages step before the whole model's "
                    "gradient is known: leave it out, or use policy flush"
                )
        draws.check_seed(self.seed)

    @property
    def clips(self) -> str | None:
        return "engine.clip_grad_norm, with engine.policy=flush"

    def mesh(self, ranks: int) -> Mesh:
        """Return the mesh of that many ranks.

        Raises:
            ValueError: the pipelines and stages do not fit that many ranks.
        """
        return Mesh.of(ranks, self.pipelines, self.stages)

    def check_size(self, ranks: int) -> None:
        self.mesh(ranks)

    def data_size(self, ranks: int) -> int:
        return self.pipelines
