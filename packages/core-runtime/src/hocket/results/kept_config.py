"""A run's complete configuration in the folder of its results. A file that was cut off or changed is noticed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import yaml

from hocket.errors import ConfigError, reason
from hocket.own_files import remembered
from hocket.plain import Tree, TreeView, flattened

#: The line that ends a YAML document.
_END = "..."

#: The keys that every comparison needs, and their types.
_NEEDED: Mapping[str, type | tuple[type, ...]] = {
    "task": dict,
    "optimizer": dict,
    "strategy": dict,
    "seed": int,
    "ranks": (int, type(None)),
}


def text_of_config(config: TreeView) -> str:
    """Return a run's complete configuration as YAML, whose last line marks it as complete."""
    return yaml.safe_dump(dict(config), sort_keys=False, explicit_end=True)


def read_config(path: Path) -> Tree:
    """Return a run's complete configuration.

    Raises:
        ConfigError: it cannot be read, is damaged, or ends early.
    """
    try:
        text = path.read_bytes().decode()
        config = yaml.safe_load(text)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {reason(error)}") from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {str(error).splitlines()[0]}") from error
    if text.rstrip().rpartition("\n")[2] != _END:
        raise ConfigError(
            f"{path} ends early, because its last line is not `{_END}`: restore the file. If it is complete, from an "
            "earlier version of Hocket, add that line"
        )
    if not isinstance(config, dict):
        raise ConfigError(f"{path} is damaged, because it is not a mapping: restore the file")
    for key, kind in _NEEDED.items():
        if key not in config or not isinstance(config[key], kind):
            raise ConfigError(
                f"{path} is damaged, because {key} is {'of another type' if key in config else 'missing'}: restore "
                "the file"
            )
    return config


def changed_keys(path: Path, config: TreeView) -> list[tuple[str, object, object]]:
    """Return the keys in which a run's configuration is not as Hocket wrote it, with both values.

    Args:
        path: the configuration's file, in the folder whose note holds what was written.
        config: the file's content.
    """
    texts = remembered(path.parent, path.name)
    if not texts or text_of_config(config) in texts:
        return []
    written = [yaml.safe_load(text) for text in texts]
    return min((differing_keys(each, config, [*{**each, **config}]) for each in written), key=len)


def differing_keys(
    earlier: TreeView, later: TreeView, keys: Sequence[str]
) -> list[tuple[str, object, object]]:
    """Return the keys below `keys` in which two configurations differ, with both values."""
    was, now = (flattened({key: each.get(key) for key in keys}) for each in (earlier, later))
    absent = "nothing"
    return [
        (key, was.get(key, absent), now.get(key, absent))
        for key in {**was, **now}
        if was.get(key, absent) != now.get(key, absent)
    ]
