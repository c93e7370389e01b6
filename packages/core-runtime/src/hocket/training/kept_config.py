"""A run's complete configuration, as it lies in the folder of its results: what was cut off is noticed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hocket.errors import ConfigError

__all__ = ["read_config", "text_of_config"]

#: What ends a document of YAML.
_END = "..."

#: What no comparison can do without, and its type.
_NEEDED: Mapping[str, type | tuple[type, ...]] = {
    "task": dict,
    "optimizer": dict,
    "strategy": dict,
    "seed": int,
    "ranks": (int, type(None)),
}


def text_of_config(config: Mapping[str, Any]) -> str:
    """Return a run's complete configuration as it is written, with a last line that says that it is complete."""
    return yaml.safe_dump(dict(config), sort_keys=False, explicit_end=True)


def read_config(path: Path) -> dict[str, Any]:
    """Return a run's complete configuration.

    Raises:
        ConfigError: it cannot be read, is damaged, or ends early.
    """
    try:
        text = path.read_bytes().decode()
        config = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path}: cannot be read: {str(error).splitlines()[0]}") from error
    if text.rstrip().rpartition("\n")[2] != _END:
        raise ConfigError(
            f"{path}: ends early: its last line is not `{_END}`. Put the file back; if it is complete, and of an "
            "earlier version of Hocket, add that line"
        )
    if not isinstance(config, dict):
        raise ConfigError(f"{path}: damaged: it is no mapping")
    for key, kind in _NEEDED.items():
        if key not in config or not isinstance(config[key], kind):
            raise ConfigError(
                f"{path}: damaged: {key} is {'of another type' if key in config else 'missing'}"
            )
    return config
