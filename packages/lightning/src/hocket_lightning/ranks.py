"""The ranks of a job as Lightning sees them: their hosts, and collectives over Hocket's transport."""

from __future__ import annotations

import inspect
import os
import pickle
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import hocket
from hocket.api import Peer
from hocket.errors import UserError
from hocket_lightning.frameworks import lightning

#: As long as rank 0 may take to prepare data, in seconds, while the others wait: there may be much to download.
_LONGEST_S = 24 * 3600.0

_REDUCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "mean": lambda every: (every if every.is_floating_point() else every.float()).mean(0),
    "sum": lambda every: every.sum(0),
    "min": lambda every: every.amin(0),
    "max": lambda every: every.amax(0),
}


class RankEnvironment(lightning("fabric.plugins.environments").ClusterEnvironment):  # type: ignore[misc]
    """The ranks that Hocket's launcher, torchrun, srun or mpiexec has started; in place of what Lightning detects.

    Args:
        peer: this rank's endpoint among them.
    """

    creates_processes_externally = True
    main_address = "127.0.0.1"  # nobody asks: ranks have met by Hocket
    main_port = 0

    def __init__(self, peer: Peer) -> None:
        super().__init__()
        self.peer = peer
        self._hosts = peer.allgather_bytes(peer.memory.host_name.encode())

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.peer.size

    def set_world_size(self, size: int) -> None:
        pass

    def global_rank(self) -> int:
        return self.peer.rank

    def set_global_rank(self, rank: int) -> None:
        pass

    def local_rank(self) -> int:
        return self._hosts[: self.peer.rank].count(self._hosts[self.peer.rank])

    def node_rank(self) -> int:
        return list(dict.fromkeys(self._hosts)).index(self._hosts[self.peer.rank])


class RanksOfStrategy:
    """The part of a strategy of Lightning's that knows the ranks; the same for Trainer and Fabric.

    Attributes:
        session: Hocket's session, while a model trains; else None.
    """

    session: hocket.Session | None = None
    is_distributed = True
    _accelerator: Any
    cluster_environment: Any
    num_nodes: Any = 1
    parallel_devices: Any

    def _join(self, strategy: str, overrides: tuple[str, ...], options: dict[str, Any]) -> None:
        unknown = sorted({*options} - {*inspect.signature(hocket.attach).parameters})
        if unknown or not all(isinstance(each, str) for each in overrides):
            raise UserError(
                f"HocketStrategy({', '.join(f'{name}=...' for name in unknown) or '..., [...]'}): overrides of the "
                'strategy are text, as HocketStrategy("diloco", "parameters.0.every=8"); named arguments are those of '
                "hocket.attach"
            )
        self._exchanges = hocket.compose(strategy, *overrides)
        self._options = options
        self._peer = hocket.join(warn_alone=True)
        self.cluster_environment = RankEnvironment(self._peer)

    @property
    def root_device(self) -> torch.device:
        """The device that this rank trains on."""
        device: torch.device = self.parallel_devices[
            self.cluster_environment.local_rank() % len(self.parallel_devices)
        ]
        return device

    @property
    def distributed_sampler_kwargs(self) -> dict[str, int]:
        """The number of shares that Lightning deals samples out to, and this rank's."""
        return {"num_replicas": self._peer.size, "rank": self._peer.rank}

    def set_world_ranks(self) -> None:
        """Have Lightning's messages come from rank 0 alone, and compare its devices with the ranks; it calls this."""
        lightning("fabric.utilities.rank_zero").rank_zero_only.rank = self._peer.rank
        devices, size = len(self.parallel_devices), self._peer.size
        asked = devices * self.num_nodes
        # What devices="auto" gives asks for nothing, but where a GPU would be idle.
        if asked == size or (size > 1 and devices == self._accelerator.auto_device_count()):
            return
        asks = f"devices={devices}, num_nodes={self.num_nodes} ask for {asked} ranks"
        if size > 1:
            raise UserError(f"{asks}, but {size} were started: leave both out, or let them give {size}")
        raise UserError(
            f"{asks}, but HocketStrategy does not start ranks: `hocket launch -n {asked} "
            f"{os.path.basename(sys.argv[0])}` does, and so do torchrun, srun and mpiexec; devices=1 trains alone"
        )

    def gathered(self, value: Any, what: str, timeout_s: float | None = None) -> list[Any]:
        """Return every rank's value, by rank: for metrics and decisions; collective.

        Args:
            value: anything that pickle takes.
            what: the call, for reports on ranks that never make it.
            timeout_s: seconds to wait at most; None for the transport's own.
        """
        every = self._peer.allgather_bytes(pickle.dumps(value), timeout_s, f"Lightning's {what}")
        return [pickle.loads(each) for each in every]

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks; collective."""
        self.gathered(None, f"barrier {name or ''}", _LONGEST_S if name == "pre_setup" else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the object of rank `src`; collective."""
        return self.gathered(obj if self._peer.rank == src else None, "broadcast")[src]

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Return every rank's tensor, stacked; the tensor itself where there is one rank; collective.

        Raises:
            UserError: a group of some ranks, or gradients through it.
        """
        if group is not None and group is not torch.distributed.group.WORLD:
            raise UserError("HocketStrategy gathers among all ranks: leave the group out")
        if sync_grads and tensor.requires_grad:
            raise UserError("HocketStrategy gathers values without gradients: leave sync_grads=True out")
        return tensor if self._peer.size == 1 else torch.stack(self.gathered_tensors(tensor))

    def gathered_tensors(self, tensor: Tensor, group: Any = None) -> list[Tensor]:
        """Return every rank's tensor, on this rank's device; collective."""
        every = self.gathered(tensor.detach().cpu(), "all_gather")
        return [each.to(tensor.device) for each in every]

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, sum, minimum or maximum over the ranks; what is no tensor as it is; collective.

        Raises:
            UserError: another operation.
        """
        if not isinstance(tensor, Tensor):
            return tensor
        name = str(getattr(reduce_op, "name", reduce_op)).lower().replace("avg", "mean")
        if name not in _REDUCTIONS:
            raise UserError(f"reduce_op is {name}; allowed: {', '.join(_REDUCTIONS)}")
        if self._peer.size == 1:
            return tensor
        return _REDUCTIONS[name](self.all_gather(tensor, group))
