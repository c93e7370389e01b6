"""Accelerate's own scripts, with a session of Hocket's wherever they prepare a model.

What they download is replaced: the GLUE sentences by random ones, BERT by a tiny one, the package evaluate by an
accuracy.
"""

from __future__ import annotations

import importlib.machinery
import os
import runpy
import sys
import types
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate import Accelerator, PartialState
from torch import Tensor
from torch.optim import Optimizer
from torch.utils.data import Dataset

SCRIPTS = Path(accelerate.__file__).parent / "test_utils" / "scripts"
#: Those of other ways to distribute (DeepSpeed, pipelines, FSDP), of notebooks and of GPUs alone are left out.
CASES = (
    "test_script.py",
    "test_sync.py",
    "test_ops.py",
    "test_distributed_data_loop.py",
    "external_deps/test_metrics.py",
    "external_deps/test_performance.py",
    "external_deps/test_checkpointing.py",
)
RECIPE = os.environ.get("HOCKET_RECIPE", "sgd").split()
VOCABULARY, LENGTH = 64, 16

_prepare = Accelerator.prepare
_session = ExitStack()


def prepare(self: Accelerator, *objects: Any, **named: Any) -> Any:
    """Prepare as Accelerate does, and attach the model that is among the objects."""
    from hocket_transformers import exchanging  # by a rank: it joins the others

    prepared = _prepare(self, *objects, **named)
    made = prepared if isinstance(prepared, tuple) else (prepared,)
    models = [each for each in made if isinstance(each, torch.nn.Module)]
    if models:
        _session.close()
        parameters = models[0].parameters()
        found: Any = [each for each in made if isinstance(each, Optimizer)]
        optimizer = found[0] if found else torch.optim.SGD(parameters, lr=0.0)
        _session.enter_context(exchanging(self, models[0], optimizer, *RECIPE))
    return prepared


class Sentences(Dataset[dict[str, Any]]):
    """Pairs of random words, of which the first says whether they are a paraphrase."""

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        words = torch.randint(4, VOCABULARY, (count, LENGTH), generator=generator)
        self._rows = [{"input_ids": row.tolist(), "labels": int(row[0] % 2)} for row in words]

    def map(self, *given: Any, **named: Any) -> Sentences:
        return self

    def rename_column(self, *given: Any) -> Sentences:
        return self

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        return self._rows[index]


class Parts(dict[str, Sentences]):
    """Sentences to train with, and held-out ones."""

    def map(self, *given: Any, **named: Any) -> Parts:
        return self

    def rename_column(self, *given: Any) -> Parts:
        return self


class Encoded(dict[str, Tensor]):
    """A batch as a tokenizer makes it."""

    def to(self, device: Any) -> Encoded:
        return self


class Tokenizer:
    """The padding of a tokenizer."""

    def pad(self, examples: Any, **named: Any) -> Encoded:
        return Encoded({name: torch.tensor([each[name] for each in examples]) for name in examples[0]})


class Accuracy:
    """The metric of `evaluate.load`."""

    def __init__(self) -> None:
        self._right: list[bool] = []

    def add_batch(self, predictions: Tensor, references: Tensor) -> None:
        self._right += (predictions == references).tolist()

    def compute(self) -> dict[str, float]:
        right, self._right = self._right, []
        return {"accuracy": sum(right) / len(right), "f1": sum(right) / len(right)}


def load_dataset(*given: Any, split: str | None = None, **named: Any) -> Any:
    parts = Parts({"train": Sentences(192, 1), "validation": Sentences(101, 2)})
    return parts if split is None else parts[split]


def tiny_bert(*given: Any, **named: Any) -> Any:
    from transformers import BertConfig, BertForSequenceClassification

    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
    return BertForSequenceClassification(
        BertConfig(**sizes, num_attention_heads=2, max_position_embeddings=LENGTH, use_cache=False)
    )


def replace_downloads() -> None:
    import transformers

    for name, contents in {
        "evaluate": {"load": lambda *given: Accuracy()},
        "datasets": {"load_dataset": load_dataset, "utils": types.SimpleNamespace(logging=_Quiet())},
    }.items():
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        vars(module).update(contents)
        sys.modules[name] = module
    transformers.AutoTokenizer.from_pretrained = lambda *given, **named: Tokenizer()
    transformers.AutoModelForSequenceClassification.from_pretrained = tiny_bert


class _Quiet:
    """A logging module that has every function."""

    def __getattr__(self, name: str) -> Any:
        return lambda *given: None


def cases(checkout: Path | None) -> list[str]:
    """Return the names of the scripts, and of parts of them, that train by data parallelism."""
    return [*CASES, "external_deps/test_checkpointing.py resumed"]


def run(case: str, checkout: Path | None, folder: Path) -> int:
    """Carry out a script as a rank of a job."""
    name, _, resumed = case.partition(" ")
    script = SCRIPTS / name
    Accelerator.prepare = prepare
    os.environ["ACCELERATE_USE_CPU"] = "true"
    PartialState(cpu=True)  # as Accelerate does without GPUs only where it is said
    if script.parent.name == "external_deps":
        replace_downloads()
    carried_out(script)
    if resumed:
        carried_out(script, "--resume_from_checkpoint", str(folder / "epoch_0"))
    return 0


def carried_out(script: Path, *words: str) -> None:
    sys.argv = [str(script), *words]
    runpy.run_path(str(script), run_name="__main__")
    _session.close()
