"""A mesh of ranks, D pipelines of P processes, and the holders of its N stages."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Mesh:
    """A mesh of D pipelines next to each other: rank = pipeline * P + place.

    Attributes:
        pipelines: D, 1 or more.
        processes: P, ranks of a pipeline, 1 or more.
        stages: N, P or more; a rank holds neighbouring ones.

    Raises:
        ValueError: there are more processes than stages.
    """

    pipelines: int
    processes: int
    stages: int

    def __post_init__(self) -> None:
        if self.processes > self.stages:
            raise ValueError(
                f"{self.stages} stages are too few for {self.processes} ranks in a pipeline, because each rank needs "
                f"a stage: use {self.processes} stages or more, more pipelines, or fewer ranks"
            )

    @classmethod
    def of(cls, ranks: int, pipelines: int, stages: int | None) -> Mesh:
        """Return the mesh of that many ranks.

        Args:
            ranks: all of them.
            pipelines: D.
            stages: N; one per process where None.

        Raises:
            ValueError: the pipelines and stages do not fit that many ranks.
        """
        processes, rest = divmod(ranks, pipelines)
        if rest or not processes:
            raise ValueError(
                f"{ranks} ranks cannot be divided evenly into {pipelines} pipelines: use a multiple of {pipelines} "
                "ranks, or change pipelines"
            )
        return cls(pipelines, processes, processes if stages is None else stages)

    @cached_property
    def holders(self) -> tuple[int, ...]:
        """The place in the pipeline that holds each stage, by stage."""
        least, rest = divmod(self.stages, self.processes)
        counts = [least + (place < rest) for place in range(self.processes)]
        return tuple(place for place, count in enumerate(counts) for _ in range(count))

    def pipeline_of(self, rank: int) -> int:
        """Return the number of the pipeline that `rank` is in."""
        return rank // self.processes

    def place_of(self, rank: int) -> int:
        """Return the place of `rank` in its pipeline."""
        return rank % self.processes

    def stages_of(self, place: int) -> list[int]:
        """Return the stages that the rank at a place of a pipeline holds."""
        return [stage for stage, holder in enumerate(self.holders) if holder == place]

    def pipeline_ranks(self, pipeline: int) -> list[int]:
        """Return the ranks of a pipeline, by place."""
        return list(range(pipeline * self.processes, (pipeline + 1) * self.processes))

    def data_ranks(self, place: int) -> list[int]:
        """Return the ranks that hold the same stages, by pipeline."""
        return list(range(place, self.pipelines * self.processes, self.processes))
