"""Transformers' Trainer whose ranks communicate by a strategy of Hocket's.

Trainer keeps its loop, its arguments, callbacks and files; Accelerate its devices, precision and the gathering of
metrics, as under torchrun. The session does in between what DistributedDataParallel would, and what that does not:
samples that are shared out uneven, evaluation and saving on the replicas' mean, the state of every rank in checkpoints.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import Trainer
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

import hocket as core
from hocket.errors import UserError
from hocket_transformers.local_sgd import refuse_distribution
from hocket_transformers.samples import Accumulated, TrainingSamples, shared_out, without_labels

_log = logging.getLogger("hocket")

#: The folder of a checkpoint of Trainer's that holds the session's.
_FOLDER = "hocket"

#: The ends of names that a run's rows leave out: they are of an evaluation's speed, or of the whole training.
_NO_METRICS = ("_runtime", "_per_second", "total_flos")

#: Arguments of Trainer's that the session stands in for, with what to do.
_REFUSED = {
    "auto_find_batch_size": "ranks would train with batches of different sizes: set per_device_train_batch_size",
    "deepspeed": "it shards the model over the ranks, and Hocket exchanges whole models: leave one of the two out",
    "enable_jit_checkpoint": "ranks would save different steps: set save_steps",
    "fsdp": "it shards the model over the ranks, and Hocket exchanges whole models: leave one of the two out",
    "ignore_data_skip": "the session continues in the middle of the pass, and reads no sample twice: leave it out",
    "parallelism_config": "it shards the model over the ranks, and Hocket exchanges whole models: leave it out",
    "use_legacy_prediction_loop": "it would evaluate each rank's own replica: leave it out",
}


class HocketTrainer(Trainer):  # type: ignore[misc]
    """A Trainer whose ranks communicate by a strategy of Hocket's.

    It goes before any other Trainer: `class MySFTTrainer(HocketTrainer, SFTTrainer): pass`.

    Args:
        args, kwargs: as of the Trainer after it.
        hocket: the strategy: a recipe, a recipe and overrides, or any argument of `hocket.compose`.
        hocket_options: keyword arguments of `hocket.attach`.
        blocking_saves: whether training waits until the state of the ranks in a checkpoint is written; else, as for
            `session.save`, a thread writes a copy in host memory. With save_total_limit=1 training waits all the same.

    Attributes:
        session: the session that trains; None before and after `train`.
    """

    session: core.Session | None = None
    _samples: TrainingSamples | None = None
    _training: ExitStack | None = None
    _holds_mean = False
    #: What makes up in a step's logged loss for batches that some ranks do not have.
    _logged = 1.0

    def __init__(
        self,
        *args: Any,
        hocket: core.Strategy | str | os.PathLike[str] | Mapping[str, Any] | Sequence[str],
        hocket_options: Mapping[str, Any] | None = None,
        blocking_saves: bool = True,
        **kwargs: Any,
    ) -> None:
        composed = isinstance(hocket, core.Strategy)
        given = hocket if isinstance(hocket, list | tuple) else (hocket,)
        self.strategy: core.Strategy = hocket if composed else core.compose(*given)  # type: ignore[assignment]
        self._options = dict(hocket_options or {})
        self._blocking_saves = blocking_saves
        super().__init__(*args, **kwargs)
        self.callback_handler.on_train_end = partial(self._end_training, self.callback_handler.on_train_end)

    def create_accelerator_and_postprocess(self) -> None:
        for name, problem in _REFUSED.items():
            if getattr(self.args, name, None):
                raise UserError(f"TrainingArguments({name}=...) does not work with Hocket: {problem}")
        if self.args.accelerator_config.split_batches:
            raise UserError(
                "TrainingArguments(accelerator_config={'split_batches': True}) does not work with Hocket: each "
                "rank has batches of its own. Set per_device_train_batch_size instead"
            )
        # The second is the first's name before Transformers 5.24.
        for name in ("activation_checkpointing", "gradient_checkpointing"):
            if getattr(self.args, name, False):
                # Where reentrant, as Trainer's default was, gradients are never known to be complete.
                own = getattr(self.args, f"{name}_kwargs") or {}
                setattr(self.args, f"{name}_kwargs", {"use_reentrant": False} | own)
        super().create_accelerator_and_postprocess()
        refuse_distribution(self.accelerator)
        peer = core.join()
        if self.accelerator.num_processes != peer.size:
            raise UserError(
                f"Accelerate found {self.accelerator.num_processes} ranks, but the launcher started {peer.size}: "
                "import hocket_transformers before you create TrainingArguments(...); without GPUs, set use_cpu=True"
            )
        # In evaluation mode Accelerate prepares all but DistributedDataParallel.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)
        self.accelerator.backward = partial(self._backward, self.accelerator.backward)

    # ---- training ----------------------------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train as Trainer does; collective.

        Args:
            resume_from_checkpoint: as for Trainer; True continues from the newest complete checkpoint, as "last" does,
                which begins if there is none.
            args, kwargs: as for Trainer.
        """
        if resume_from_checkpoint in (True, "last"):
            needed = True if resume_from_checkpoint is True else None  # Trainer reports that there is none
            resume_from_checkpoint = _newest(self.args.output_dir) or needed
        with ExitStack() as training:
            self._training = training
            try:
                return super().train(resume_from_checkpoint, *args, **kwargs)
            finally:
                self.session = self._training = None

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        optimizer = super().create_optimizer(*args, **kwargs)
        if self._training is not None and self.session is None:
            attached = core.attach(self.model, self.optimizer, self.strategy, **self._options)
            self.session = self._training.enter_context(attached)
            core.join(warn_alone=True)
            if self.args.save_strategy != "no":
                self.session.save_on_signal(self._save_at_last, unless_handled=True)
        return optimizer

    def _end_training(self, own: Any, *given: Any) -> Any:
        """Let callbacks that save, or average, the trained model find it."""
        self._end_session()
        return own(*given)

    def _end_session(self) -> None:
        """Let all ranks hold the replicas' mean, and close the session; collective."""
        if self.session is None or self._training is None:
            return
        if self._samples is not None:
            self._samples.end_pass()
        self.session.consensus()
        self.session = None
        self._training.close()

    def get_train_dataloader(self) -> Any:
        # As Trainer, or who overrides it, makes it for all ranks; Accelerate would share it out.
        self.accelerator.prepare = lambda loader, **_: loader
        try:
            given = super().get_train_dataloader()
        finally:
            del self.accelerator.prepare
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        size = getattr(given, "batch_size", None)
        self._samples = TrainingSamples(self, shared_out(given, seed), size)
        # With a generator of its own the loader takes no number from torch's.
        return DataLoader(self._samples, None, collate_fn=_as_it_is, generator=torch.Generator())

    def num_examples(self, dataloader: Any) -> int:
        own = self._samples is not None and dataloader.dataset is self._samples
        return int(super().num_examples(self._samples.loader if own else dataloader))  # type: ignore[union-attr]

    def counts_tokens_of_all(self, batch: Any) -> bool:
        """Return whether the loss is divided by the tokens of all ranks, so that batches count by their tokens."""
        uses = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        is_counted = isinstance(batch, Mapping) and "labels" in batch
        asked = self.args.average_tokens_across_devices and self._exchanges_gradients()
        return bool(asked and uses and is_counted)

    def _exchanges_gradients(self) -> bool:
        assert self.session is not None
        return bool(self.strategy.at(self.session.step).gradients)

    @contextmanager
    def _tokens_of_step(self) -> Iterator[None]:
        """Count a step's tokens on all ranks only if they exchange its gradients: Trainer waits for all to count."""
        asked = self.args.average_tokens_across_devices
        self.args.average_tokens_across_devices = asked and self._exchanges_gradients()
        try:
            yield
        finally:
            self.args.average_tokens_across_devices = asked

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> tuple[Any, Any]:
        if self.session is None or self._samples is None:
            return super().get_batch_samples(epoch_iterator, num_batches, device)  # type: ignore[no-any-return]
        batch = next(epoch_iterator, None)
        if batch is None:
            return [], None
        # A rank out of data repeats its last batch, of weight 0, and counts no token of it.
        own = self._samples.group if self.session.weight else []
        counted = own or [without_labels(batch)]
        with self._tokens_of_step():
            _, num_items = super().get_batch_samples(iter(counted), len(counted), device)
        self._logged = 1.0
        if self._samples.may_end_with(num_batches):
            lengths = self.session.gather(len(own))
            num_batches = max(lengths)
            self._logged = num_batches * len(lengths) / sum(lengths)
            if num_items is not None:
                num_items = num_items * self._left_out(lengths, len(own), batch)
        return Accumulated(batch, epoch_iterator, num_batches), num_items

    def _left_out(self, lengths: Sequence[int], own: int, batch: Any) -> float:
        """Return the factor of a step's tokens that makes up for batches that some ranks do not have.

        The session divides by the number of batches, and the loss by tokens: it takes one of them.

        Args:
            lengths: by rank, the number of batches.
            own: this rank's.
            batch: one of them.
        """
        whole = max(lengths)
        if self.counts_tokens_of_all(batch):
            return whole * len(lengths) / sum(lengths)
        return whole / own if own else 1.0

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.session is None:
            return super().training_step(*args, **kwargs)
        adds = not self.accelerator.sync_gradients
        with self._tokens_of_step(), self.session.accumulate() if adds else nullcontext():
            loss = super().training_step(*args, **kwargs)
        return loss * self._logged if self.session.weight else torch.zeros_like(loss)

    def _backward(self, own: Any, *args: Any, **kwargs: Any) -> None:
        if self.session is None and core.join().size > 1:
            raise UserError(
                f"{type(self).__name__} exchanges only within Trainer's own train(). Call that instead of "
                "training_step(), or write a loop of your own with hocket.attach(model, optimizer, ...)"
            )
        own(*args, **kwargs)

    def log(self, logs: dict[str, Any], *args: Any, **kwargs: Any) -> None:
        super().log(logs, *args, **kwargs)
        if self.session is not None:
            self.session.log({name: v for name, v in logs.items() if not name.endswith(_NO_METRICS)})

    # ---- the replicas' mean --------------------------------------------------------------------------------------

    @contextmanager
    def _consensus(self) -> Iterator[None]:
        if self.session is None or self._holds_mean:
            yield
            return
        with self.session.consensus():
            self._holds_mean = True
            try:
                yield
            finally:
                self._holds_mean = False

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        with self._consensus():
            return super().evaluation_loop(*args, **kwargs)

    def save_model(self, *args: Any, **kwargs: Any) -> None:
        with self._consensus():
            super().save_model(*args, **kwargs)

    def _load_best_model(self) -> None:
        self._end_session()
        super()._load_best_model()

    # ---- checkpoints -----------------------------------------------------------------------------------------------

    def _saved(self) -> dict[str, Any]:
        scaler = self.accelerator.scaler
        return {"scheduler": self.lr_scheduler} | ({} if scaler is None else {"scaler": scaler})

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.session is None:
            super()._save_optimizer_and_scheduler(output_dir)
        else:
            # Trainer removes all but the newest then, which a kill would leave incomplete.
            blocking = self._blocking_saves or self.args.save_total_limit == 1
            self.session.save(Path(output_dir, _FOLDER), keep=1, blocking=blocking, **self._saved())

    def _save_scaler(self, output_dir: str) -> None:
        if self.session is None:
            super()._save_scaler(output_dir)

    def _save_at_last(self) -> Path:
        """Save a checkpoint of Trainer's before the process ends; collective."""
        self._blocking_saves = True
        self._save_checkpoint(self.model, trial=None)
        return Path(self.args.output_dir, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.session is None or self._samples is None:
            super()._load_optimizer_and_scheduler(checkpoint)
        elif Path(checkpoint, _FOLDER).is_dir():
            self.session.load(Path(checkpoint, _FOLDER), **self._saved())
            self._samples.resumed = True
        else:
            raise UserError(
                f"{checkpoint} has no folder {_FOLDER}, because Trainer saved it without Hocket, or with "
                "save_only_model: load its weights with from_pretrained(...), without resume_from_checkpoint"
            )

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if self.session is None:  # which has loaded its own
            super()._load_rng_state(checkpoint)


def _as_it_is(batch: Any) -> Any:
    return batch


def _newest(folder: str | None) -> str | None:
    """Return the newest checkpoint that was not cut off, if there is one."""
    found = [
        path.parent for path in Path(folder or "").glob(f"{PREFIX_CHECKPOINT_DIR}-*/{TRAINER_STATE_NAME}")
    ]
    numbered = {
        int(number): path
        for path in found
        if (number := path.name.removeprefix(f"{PREFIX_CHECKPOINT_DIR}-")).isdigit()
    }
    for _, path in sorted(numbered.items(), reverse=True):
        if not _was_cut_off(path / _FOLDER):
            return str(path)
        if core.join().rank == 0:
            _log.warning(
                "%s is incomplete, because its job ended during the save: trying an older checkpoint", path
            )
    return None


def _was_cut_off(folder: Path) -> bool:
    """Return whether a session was still saving into a folder when its process ended."""
    return folder.is_dir() and not any(folder.glob("step-????????/manifest.json"))
