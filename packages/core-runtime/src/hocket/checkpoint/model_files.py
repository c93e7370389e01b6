"""A model's tensors in formats that other programs read: safetensors, in one file or several, and torch's DCP.

Several safetensors files have an index as Hugging Face's libraries write it: `model.safetensors.index.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from hocket.checkpoint import MODEL
from hocket.checkpoint.export_folder import whole_beside
from hocket.checkpoint.files import CODES, in_order, write_tensors
from hocket.checkpoint.subclasses import is_composite
from hocket.disk import write_text
from hocket.errors import CheckpointError, reason, some

#: The index of a model in several files.
INDEX = f"{MODEL}.index.json"

#: The file that torch's checkpoints end with, and the key of the model's tensors there.
_DCP_METADATA, _DCP_MODEL = ".metadata", "model"

_DTYPES = {code: dtype for dtype, code in CODES.items()}

#: Files that only pickle reads, which runs what is in them.
_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model, of which one at a time is in memory as a whole.

    Attributes:
        forms: tensors of the same dtypes and shapes, by name; without values (meta), or in parts (DTensor), too.
        value: returns a tensor by name.
    """

    forms: Mapping[str, Tensor]
    value: Callable[[str], Tensor]

    @classmethod
    def held(cls, state: Mapping[str, object]) -> ModelTensors:
        """Return the tensors of a state in memory, without what else it has."""
        tensors = {name: value for name, value in state.items() if isinstance(value, Tensor)}
        return cls(tensors, tensors.__getitem__)


def files_of(forms: Mapping[str, Tensor], most_bytes: int | None) -> dict[str, dict[str, Tensor]]:
    """Return the forms of the tensors in each safetensors file, by the file's name, in the order of writing.

    Args:
        forms: tensors by name.
        most_bytes: the size of a file, but for a single tensor that is larger; None for one file.
    """
    parts: list[dict[str, Tensor]] = [{}]
    size = 0
    for name, form in forms.items():
        nbytes = form.numel() * form.element_size()
        if most_bytes is not None and parts[-1] and size + nbytes > most_bytes:
            parts.append({})
            size = 0
        parts[-1][name] = form
        size += nbytes
    if len(parts) == 1:
        return {MODEL: in_order(parts[0])}
    return {
        f"model-{number:05d}-of-{len(parts):05d}.safetensors": in_order(part)
        for number, part in enumerate(parts, start=1)
    }


def write_safetensors(folder: Path, tensors: ModelTensors, most_bytes: int | None) -> None:
    """Write a model into safetensors files, and their index if there are several.

    Args:
        folder: an existing folder.
        tensors: the model's; their values are asked for in the order of `files_of`.
        most_bytes: as for `files_of`.

    Raises:
        CheckpointError: a tensor that the format cannot hold.
        OSError: a file cannot be written.
    """
    for name, form in tensors.forms.items():
        if is_composite(form) or form.layout != torch.strided:
            raise CheckpointError(
                f"{name} is a {type(form).__name__} ({form.layout}), which safetensors cannot hold: export with "
                "format='dcp'"
            )
    files = files_of(tensors.forms, most_bytes)
    for file, part in files.items():
        write_tensors(folder / file, part, tensors.value, {"format": "pt"})
    if len(files) > 1:
        total = sum(form.numel() * form.element_size() for form in tensors.forms.values())
        places = {name: file for file, part in files.items() for name in part}
        index = {"metadata": {"total_size": total}, "weight_map": places}
        write_text(folder / INDEX, json.dumps(index, indent=2) + "\n")


def write_dcp(
    folder: Path,
    state: Mapping[str, Any],
    strategy: Mapping[str, Tensor] | None = None,
    *,
    together: bool = False,
) -> None:
    """Write a model's state in the format of torch.distributed.checkpoint, as `{"model": state}`.

    Args:
        folder: an existing folder, which all writing ranks see.
        state: the model's, by name.
        strategy: the strategy's state, as `strategy_state` gives it, which becomes `{"strategy": ...}` beside it.
        together: whether all ranks of torch.distributed write, each what it holds; else this one alone.

    Raises:
        CheckpointError: torch could not write.
    """
    _without_dcp_note()
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_saver import save

    beside = {"strategy": dict(strategy)} if strategy else {}
    try:
        save({_DCP_MODEL: dict(state), **beside}, checkpoint_id=folder, no_dist=not together)
    except CheckpointException as error:
        raise CheckpointError(f"{folder}: torch.distributed.checkpoint: {error}") from error


@contextlib.contextmanager
def open_model(path: Path) -> Iterator[ModelTensors]:
    """Open a model that somebody has written: a safetensors file, a Hugging Face folder, or a DCP folder.

    Raises:
        CheckpointError: there is none, or it cannot be read; says what would be.
    """
    with contextlib.ExitStack() as stack:
        if (path / _DCP_METADATA).exists():
            yield _dcp(path)
            return
        files = _files_in(path)
        opened: dict[str, Any] = {}
        for file in files:
            try:
                handle = stack.enter_context(safe_open(file, framework="pt"))
            except FileNotFoundError as error:
                raise CheckpointError(f"{file} is missing") from error
            except OSError as error:
                raise CheckpointError(f"{file}: {reason(error)}") from error
            except SafetensorError as error:
                raise CheckpointError(f"{file} is not a safetensors file, or is damaged: {error}") from error
            opened |= dict.fromkeys(handle.keys(), handle)
        forms = {name: _form(name, handle.get_slice(name)) for name, handle in opened.items()}
        yield ModelTensors(forms, lambda name: opened[name].get_tensor(name))


def _form(name: str, part: Any) -> Tensor:
    """Return an empty tensor of the dtype and shape of a tensor in a file."""
    code = part.get_dtype()
    if code not in _DTYPES:
        raise CheckpointError(f"{name} has dtype {code}, which torch does not know")
    return torch.empty(part.get_shape(), dtype=_DTYPES[code], device="meta")


def _files_in(path: Path) -> list[Path]:
    """Return a model's safetensors files."""
    if path.is_file():
        if path.suffix in _PICKLES:
            raise CheckpointError(
                f"reading {path} needs pickle, which can run any code. If you trust the file, convert it: "
                f"safetensors.torch.save_file(torch.load({path.name!r}), {MODEL!r})"
            )
        return [path]
    if not path.is_dir():
        left = whole_beside(path)
        also = (
            f"; {left} is a complete export, but its process was killed before the export was renamed: "
            f"rename {left} to {path.name}"
        )
        raise CheckpointError(f"{path}: there is no such file or folder{also if left else ''}")
    index = path / INDEX
    if index.exists():
        try:
            names = list(dict.fromkeys(json.loads(index.read_bytes())["weight_map"].values()))
            return [path / name for name in names]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise CheckpointError(f"{index} is damaged: {type(error).__name__}: {error}") from error
    if (path / MODEL).exists():
        return [path / MODEL]
    raise CheckpointError(f"{path} holds no model: {_instead(path)}")


def _instead(path: Path) -> str:
    """Return the reason why a folder is not read as a model's, and what to do."""
    names = sorted(os.listdir(path))
    if "adapter_model.safetensors" in names:
        return (
            "it holds only an adapter. Merge it into its base model: merge_and_unload(), then save_pretrained"
        )
    if "checkpoints" in names or any(name.startswith("step-") for name in names) or "manifest.json" in names:
        return (
            f"it is the folder of a run. `hocket export {path} --out FOLDER` writes a model from its "
            "checkpoint"
        )
    pickles = [name for name in names if name.endswith(_PICKLES)]
    if pickles:
        return (
            f"reading {some(pickles)} needs pickle. With a newer transformers, save_pretrained writes {MODEL}"
        )
    return f"expected {MODEL}, {INDEX}, or {_DCP_METADATA} of torch.distributed.checkpoint"


def _dcp(path: Path) -> ModelTensors:
    from torch.distributed.checkpoint.filesystem import FileSystemReader
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    try:
        content = FileSystemReader(path).read_metadata().state_dict_metadata
    except Exception as error:
        raise CheckpointError(
            f"{path / _DCP_METADATA} is damaged: {type(error).__name__}: {error}"
        ) from error
    forms = {
        name: torch.empty(each.size, dtype=each.properties.dtype, device="meta")
        for name, each in content.items()
        if isinstance(each, TensorStorageMetadata)
    }
    within = f"{_DCP_MODEL}."
    if any(name.startswith(within) for name in forms):  # and not the optimizer's
        forms = {name: form for name, form in forms.items() if name.startswith(within)}
    return ModelTensors(forms, lambda name: _read_dcp(path, name, forms[name]))


def _read_dcp(path: Path, name: str, form: Tensor) -> Tensor:
    _without_dcp_note()
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.state_dict_loader import load

    value = torch.empty_like(form, device="cpu")
    try:
        load({name: value}, checkpoint_id=path, no_dist=True)
    except (CheckpointException, OSError) as error:
        raise CheckpointError(f"{path}: {name} cannot be read: {error}") from error
    return value


def _without_dcp_note() -> None:
    """Leave out torch's warning that one process alone saves or loads, as is meant."""
    warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized")
