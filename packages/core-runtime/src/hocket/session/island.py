"""Islands: ranks that hold one replica of the model together, sharded by FSDP2 or tensor parallelism.

Between islands a strategy runs as between ranks with whole models: each rank exchanges its shards with its column, the
ranks at the same place of all islands. A rank that holds a whole model is an island of one.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor, nn

from hocket.errors import AttachError
from hocket.segment.shards import fsdp_modules, is_sharded, whole_of
from hocket.transport.lane import Lane
from hocket.transport.peer import Peer, gather

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_log = logging.getLogger("hocket")

_ONE_ISLAND = (
    "the model is sharded over all %d ranks, so there is only one island, and nothing to exchange. Shard "
    "it over a part of the ranks: mesh = init_device_mesh(device, (islands, ranks of each), "
    "mesh_dim_names=('island', 'shard')); fully_shard(model, mesh=mesh['shard'])"
)

#: Names of a mesh's dimensions whose ranks compute with the same samples, if the model is sharded by FSDP, too.
_SAME_SAMPLES = ("tp", "cp", "sp", "tensor_parallel", "context_parallel", "sequence_parallel")


@dataclass(frozen=True)
class Island:
    """The ranks that hold one replica together, and this rank's place among them.

    Attributes:
        everyone: all ranks of the session.
        column: the ranks at this rank's place of all islands, by island.
        own: the island's ranks; None for a rank that holds a whole model.
        data_rank, data_size: this rank's share of the samples, and the number of shares.
        shares: number of different batches that the island's ranks read in a step.
        gathers: whether FSDP gathers the parameters, and adds to their gradients by itself.
        places: by rank of the session, its place in its island; empty if all hold whole models.
        members: the session's ranks in this rank's column, by island; empty if all hold whole models.
        described: the islands in words; empty if all hold whole models.
    """

    everyone: Peer
    column: Peer
    own: Peer | None
    data_rank: int
    data_size: int
    shares: int = 1
    gathers: bool = False
    places: tuple[int, ...] = ()
    members: tuple[int, ...] = ()
    described: str = ""
    _lane: Lane | None = field(init=False, repr=False, default=None)

    def __post_init__(self) -> None:
        if self.own is not None:
            object.__setattr__(self, "_lane", self.own.lane("island"))

    @classmethod
    def alone(cls, peer: Peer) -> Island:
        """Return the island of a rank that holds a whole model."""
        return cls(peer, peer, None, peer.rank, peer.size)

    @property
    def size(self) -> int:
        """Return the number of ranks that hold one replica."""
        return 1 if self.own is None else self.own.size

    @property
    def _rank(self) -> int:
        return 0 if self.own is None else self.own.rank

    @property
    def is_main(self) -> bool:
        """Tell whether this is the session's rank 0, the one that logs."""
        return self.everyone.rank == 0

    @property
    def lane(self) -> Lane:
        """Return the lane among the island's ranks; there is none for a whole model."""
        assert self._lane is not None
        return self._lane

    def sum(self, values: Sequence[float]) -> Sequence[float]:
        """Return the sums of the island's ranks' values; collective there."""
        if self._lane is None:
            return values
        own = np.array(values, np.float64)
        total = np.empty_like(own)
        self._lane.iallreduce(own, total).wait()
        sums: list[float] = total.tolist()
        return sums

    def max(self, value: float) -> float:
        """Return the largest value of the island's ranks; collective there."""
        return max(self.sum([value * (rank == self._rank) for rank in range(self.size)]))

    def any(self, value: bool) -> bool:
        """Return whether `value` is true on any rank of the island; collective there."""
        return value if self._lane is None else bool(self.sum([value])[0])

    def any_of(self, values: Sequence[bool]) -> Sequence[bool]:
        """Return of each value whether it is true on any rank of the island; collective there."""
        return values if self._lane is None else [total != 0 for total in self.sum(values)]

    def in_session(self, ranks: Sequence[int]) -> Sequence[int]:
        """Return the session's numbers of ranks of the column."""
        return [self.members[rank] for rank in ranks] if self.members else ranks

    def holders(self, parameter: Tensor) -> int:
        """Return the number of the island's ranks that hold the same part of a parameter."""
        whole: Any = whole_of(parameter)
        if not is_sharded(whole):
            return self.size
        parts = 1
        for dim, placement in enumerate(whole.placements):
            if not placement.is_replicate():
                parts *= whole.device_mesh.size(dim)
        return self.size // parts

    def close(self) -> None:
        """Close the lane; collective."""
        if self._lane is not None:
            self._lane.close()


def mesh_of(
    model: nn.Module, given: DeviceMesh | None = None, same_samples: Sequence[str] | None = None
) -> DeviceMesh | None:
    """Return the mesh over which one replica of a model is sharded; None if none of its parameters is.

    Args:
        model: the model.
        given: the mesh that the user names; None for the largest of its parameters'.
        same_samples: the mesh's dimensions that the user names.

    Raises:
        AttachError: a parameter is sharded over other ranks; or the model is not sharded, and either is named.
    """
    sharded: dict[str, Any] = {name: p for name, p in model.named_parameters() if is_sharded(p)}
    if not sharded:
        for key, named in (("island", given), ("same_samples", same_samples)):
            if named is not None:
                raise AttachError(
                    f"{key} is given, but no parameter of the model is sharded: leave {key} out"
                )
        return None
    meshes: list[DeviceMesh] = [parameter.device_mesh for parameter in sharded.values()]
    whole = given if given is not None else max(meshes, key=lambda mesh: mesh.mesh.numel())
    ranks = set(_ranks_of(whole))
    for name, mesh in zip(sharded, meshes, strict=True):
        if not set(_ranks_of(mesh)) <= ranks:
            raise AttachError(
                f"parameter {name} is sharded over ranks {_ranks_of(mesh)}, but the island has ranks "
                f"{_ranks_of(whole)}: name the mesh of one whole replica, hocket.attach(..., island=mesh['shard', "
                "'tp'])"
            )
    return whole


def find_island(peer: Peer, mesh: DeviceMesh, model: nn.Module, same_samples: Sequence[str] | None) -> Island:
    """Find the islands of all ranks; collective.

    Args:
        peer: all ranks.
        mesh: that of this rank's island.
        model: the sharded model.
        same_samples: the names of the mesh's dimensions whose ranks read the same samples; None to infer them.

    Raises:
        AttachError: on all ranks: islands differ in shape, overlap, or leave ranks out.
    """
    from torch import distributed

    job = peer.rank // distributed.get_world_size()  # islands may be jobs of their own
    gathered = gather(peer, [job, distributed.get_rank(), _ranks_of(mesh), list(mesh.mesh.shape)])
    islands = _islands_in(gathered)
    listed = _listed(islands)
    place, ranks = next((ranks.index(peer.rank), ranks) for ranks in islands if peer.rank in ranks)
    share, shares = _share(mesh, _together(mesh, model, same_samples))
    number = islands.index(ranks)
    members = tuple(ranks[place] for ranks in islands)
    own, column = peer.group(ranks), peer.group(members)
    assert own is not None
    assert column is not None
    places = {rank: place for ranks in islands for place, rank in enumerate(ranks)}
    found = Island(
        peer,
        column,
        own,
        number * shares + share,
        len(islands) * shares,
        shares,
        bool(fsdp_modules(model)),
        tuple(places[rank] for rank in range(peer.size)),
        members,
        f"{len(islands)} islands of {len(ranks)} ranks ({_named(mesh)}): {listed}; each rank reads 1 of "
        f"{len(islands) * shares} shares of the samples",
    )
    if found.is_main and len(islands) == 1 and peer.size > 1:
        _log.warning(_ONE_ISLAND, peer.size)
    return found


def _islands_in(gathered: Sequence[tuple[int, int, list[int], list[int]]]) -> list[tuple[int, ...]]:
    """Return the ranks of each island, by the session's numbers.

    Args:
        gathered: of each rank its job, its number in that job's torch.distributed, the numbers of its mesh's ranks
            there, and the mesh's shape.

    Raises:
        AttachError: islands differ in shape, overlap, or leave ranks out.
    """
    rank_of = {(job, theirs): rank for rank, (job, theirs, _, _) in enumerate(gathered)}
    islands = sorted(
        {tuple(rank_of.get((job, rank), -1) for rank in ranks) for job, _, ranks, _ in gathered}, key=min
    )
    if len(rank_of) < len(gathered) or any(-1 in ranks for ranks in islands):
        raise AttachError(
            "the ranks of torch.distributed are not those of this session: start all islands as one job, with one "
            "init_process_group over all ranks, or each island as its own job (HOCKET_ISLAND, docs/islands.md)"
        )
    if len({str(shape) for *_, shape in gathered}) > 1:
        raise AttachError(
            f"islands have different shapes (ranks {_listed(islands)}): shard the model in the same way on all of "
            "them"
        )
    if sorted(rank for ranks in islands for rank in ranks) != list(range(len(gathered))):
        raise AttachError(
            f"islands overlap (ranks {_listed(islands)}): each rank must be in the mesh of one replica only"
        )
    return islands


def _listed(islands: Sequence[Sequence[int]]) -> str:
    return ", ".join("-".join(map(str, ranks)) for ranks in islands)


def _ranks_of(mesh: DeviceMesh) -> list[int]:
    ranks: list[int] = mesh.mesh.flatten().tolist()
    return ranks


def _named(mesh: DeviceMesh) -> str:
    """Return a mesh's dimensions in words."""
    sizes = list(mesh.mesh.shape)
    names = mesh.mesh_dim_names or [f"dimension {number}" for number in range(len(sizes))]
    return " x ".join(f"{name} {size}" for name, size in zip(names, sizes, strict=True))


def _together(mesh: DeviceMesh, model: nn.Module, same_samples: Sequence[str] | None) -> set[int]:
    """Return the mesh's dimensions whose ranks read the same samples.

    Raises:
        AttachError: the mesh has no dimension of a given name, or a text is given for names.
    """
    names = mesh.mesh_dim_names or ()
    if isinstance(same_samples, str):
        raise AttachError(f"same_samples={same_samples!r} is text: give a list of names, [{same_samples!r}]")
    for name in same_samples or ():
        if name not in names:
            raise AttachError(
                f"same_samples names {name!r}, but the island's mesh has {', '.join(names) or 'no names'}"
            )
    if same_samples is None and not fsdp_modules(model):
        return set(range(mesh.ndim))  # nobody sums the gradients of different samples
    together = _SAME_SAMPLES if same_samples is None else same_samples
    return {dim for dim, name in enumerate(names) if name in together}


def shares_of(mesh: DeviceMesh, model: nn.Module, same_samples: Sequence[str] | None) -> int:
    """Return the number of different batches that an island's ranks read in a step.

    Raises:
        AttachError: the mesh has no dimension of a given name.
    """
    return _share(mesh, _together(mesh, model, same_samples))[1]


def _share(mesh: DeviceMesh, together: Collection[int]) -> tuple[int, int]:
    """Return this rank's share of its island's samples, and their number."""
    share, shares = 0, 1
    for dim, size in enumerate(mesh.mesh.shape):
        if dim not in together:
            share = share * size + mesh.get_local_rank(dim)
            shares *= size
    return share, shares
