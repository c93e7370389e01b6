"""Sources of configuration: YAML files, recipes, mappings, and overrides `KEY=VALUE`."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path as FilePath
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from hocket.config.document import Document, Origin
from hocket.config.settings import DEFAULTS, DESCRIPTIVE
from hocket.disk import path_of
from hocket.errors import ConfigError, shortened
from hocket.plain import Tree, TreeView
from hocket.plugin import Registry

#: The recipe of a run's file that has neither a strategy nor a recipe.
DEFAULT_RECIPE = "sgd"

#: The moments of a step, as keys of a strategy.
SLOTS = ("samples", "gradients", "parameters")

# Limits of a file: far more than any strategy has, and little enough to be built and copied at once.
_DEEPEST = 50
_MOST_VALUES = 1_000_000
_TOO_DEEP = f"nested deeper than {_DEEPEST} levels"

#: The keys of a file that concern its strategy.
OF_STRATEGIES = ("strategy", "phases", "synchronous_steps", "recipe", *DESCRIPTIVE)

_SHARE = re.compile(r"(\d{1,3}(?:\.\d+)?)\s*%")

#: A recipe's name, a YAML file, or a mapping with the content of one.
Target = str | os.PathLike[str] | TreeView


class _YamlLoader(yaml.SafeLoader):
    """A loader of YAML as people write it: 1e-3 is a number, a key 500 text, repeated keys errors."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        seen = set()
        for key_node, value_node in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if key_node.tag == "tag:yaml.org,2002:int":
                key_node.tag = "tag:yaml.org,2002:str"
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or key in seen:
                problem = "is given twice" if isinstance(key, str) else "is not text"
                raise yaml.MarkedYAMLError(
                    problem=f"the key {key!r} {problem}", problem_mark=key_node.start_mark
                )
            word, colon, text = key.partition(":")
            if colon and value_node.value == "" and word.isidentifier():
                raise yaml.MarkedYAMLError(
                    problem=f"{key!r} needs a space after its colon: write {word}: {text}",
                    problem_mark=key_node.start_mark,
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_YamlLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def _number(loader: _YamlLoader, node: yaml.ScalarNode) -> int | float:
    """Return a number; refuse those that YAML reads otherwise than people do: 010 as eight, 1:30 as ninety.

    Raises:
        yaml.MarkedYAMLError: it is one of these.
    """
    construct = loader.construct_yaml_int if node.tag.endswith(":int") else loader.construct_yaml_float
    value: int | float = construct(node)
    if ":" in node.value or re.fullmatch(r"[-+]?0[\d_]+", node.value):
        raise yaml.MarkedYAMLError(
            problem=f"YAML reads {node.value} as {value}: write {value} if you mean that, or '{node.value}' for text",
            problem_mark=node.start_mark,
        )
    return value


for _tag in ("int", "float"):
    _YamlLoader.add_constructor(f"tag:yaml.org,2002:{_tag}", _number)


@dataclass(frozen=True)
class Override:
    """One `KEY=VALUE`, parsed.

    Attributes:
        keys: the path from a run's root; slots are below `strategy`.
        value: the value, as YAML reads it.
        origin: its name in errors, and whether it was written without `strategy`.
    """

    keys: tuple[str, ...]
    value: object
    origin: Origin


def parse_override(text: str) -> Override:
    """Parse `KEY=VALUE`: a path of keys and list indices joined by dots, and a value in YAML.

    Raises:
        ConfigError: there is no `=`, the key has an empty part, or the value is not YAML.
    """
    label = f"override {text!r}"
    key, separator, value = text.partition("=")
    keys = tuple(part.strip() for part in key.split("."))
    if not (separator and all(keys)):
        raise ConfigError(f"{label}: not of the form KEY=VALUE, such as gradients.0.overlap=backward")
    bare = keys[0] in SLOTS
    return Override(("strategy", *keys) if bare else keys, _parse_yaml(value, label), Origin(label, bare))


def load_document(target: Target, overrides: Sequence[str], registry: Registry) -> Document:
    """Read a target, its base recipe and the overrides into one document, in the form of a run's file.

    The order is base recipe (the one that an override names, else the target's), target, overrides. Those of a key
    come before those of what it contains: `optimizer={...}` leaves `optimizer.lr=0.1` as it is, on either side of it. A
    recipe may be a file, too. A strategy alone (a mapping with slots at its root) is put below `strategy`.

    Raises:
        ConfigError: unreadable or malformed, an unknown recipe, or an override that leads nowhere.
    """
    parsed = sorted(map(parse_override, overrides), key=lambda override: len(override.keys))
    layers = [_read(target, registry)]
    of_recipe = next((o for o in reversed(parsed) if o.keys == ("recipe",)), None)
    if of_recipe is not None and isinstance(target, str) and not _is_file(target):
        raise ConfigError(
            f"{of_recipe.origin.label}: no effect after recipe {target}: write {of_recipe.value} instead of "
            f"{target}, or `recipe: {of_recipe.value}` in a file"
        )
    named = of_recipe and of_recipe.value
    base = named or layers[0][0].get("recipe")
    seen: list[object] = []
    while base is not None or not any("strategy" in layer for layer, _ in layers):
        base = base or DEFAULT_RECIPE
        if base in seen:
            raise ConfigError(
                f"{layers[-1][1].label}: recipe: {' -> '.join(map(str, [*seen, base]))} is based on itself"
            )
        seen.append(base)
        layers.append(_read_recipe(base, layers[-1][1], registry))
        base = layers[-1][0].get("recipe")
    document = Document(layers[0][1])
    document.lay(DEFAULTS, Origin("defaults"))
    for layer, origin in reversed(layers):
        document.lay(layer, origin)
    for override in parsed:
        document.assign(override.keys, override.value, override.origin)
    document.interpolate()
    _count_share(document)
    return document


def _count_share(document: Document) -> None:
    """Write a share of the run's steps, such as `synchronous_steps: 25%`, as their number.

    Raises:
        ConfigError: the number of steps is not given.
    """
    where = document.root.child("synchronous_steps")
    share = _SHARE.fullmatch(where.value) if isinstance(where.value, str) else None
    if share is None:
        return
    steps = document.root.child("steps").value
    if not isinstance(steps, int) or float(share[1]) > 100:
        raise where.error(
            f"got {where.given}",
            "a number of steps, or, if steps=N is set, a share of N, 0% to 100%. A script writes "
            'f"synchronous_steps={steps // 4}"',
        )
    document.assign(
        ("synchronous_steps",), round(float(share[1]) / 100 * steps), document.origin_of(where.path)
    )


def based_on(target: str, recipe: str, registry: Registry) -> Target:
    """Return a target with another recipe or file in place of its strategy; a file's other settings stay.

    Raises:
        ConfigError: the file is unreadable or malformed.
    """
    if not _is_file(target):
        return recipe
    layer, _ = _read(target, registry)
    kept = {key: value for key, value in layer.items() if key.partition(".")[0] not in OF_STRATEGIES}
    return {**kept, "recipe": recipe, "name": recipe}


def run_keys(target: Target, registry: Registry) -> list[str]:
    """Return the root keys of a file that do not concern its strategy; none for other targets.

    Raises:
        ConfigError: the file is unreadable or malformed.
    """
    if isinstance(target, Mapping) or not _is_file(os.fspath(target)):
        return []
    layer, _ = _read(target, registry)
    roots = dict.fromkeys(key.partition(".")[0] for key in layer)
    return [key for key in roots if key not in OF_STRATEGIES]


def _is_file(name: str) -> bool:
    return name.endswith((".yaml", ".yml")) or os.path.isfile(name)


def _read(target: Target, registry: Registry) -> tuple[Tree, Origin]:
    if isinstance(target, DictConfig):
        target = _of_omegaconf(target)
    if isinstance(target, Mapping):
        return _as_run(_plain(target, "mapping", ""), "mapping")
    if not isinstance(target, str | os.PathLike):
        raise ConfigError(
            f"got {target!r} for a strategy; allowed: a recipe's name, a YAML file, a mapping, or a Strategy"
        )
    name = os.fspath(target)
    if not isinstance(target, str) or _is_file(name):
        return _as_run(_read_yaml(FilePath(path_of(name, "the strategy's file")), name), name)
    # A recipe that is the target itself: the run has its name, also if its file does not give it.
    layer, origin = _read_recipe(name, None, registry)
    return {"name": name, **layer}, origin


def _of_omegaconf(config: DictConfig) -> TreeView:
    """Return a config as plain values; interpolations in a part of a larger config refer to that one's keys.

    Raises:
        ConfigError: an interpolation that leads nowhere.
    """
    try:
        plain: Any = OmegaConf.to_container(config, resolve=config._get_parent() is not None)
    except OmegaConfBaseException as error:
        raise ConfigError(f"mapping: {error.full_key}: {str(error.msg).splitlines()[0]}") from error
    mapping: TreeView = plain
    return mapping


def _read_recipe(name: object, asked_by: Origin | None, registry: Registry) -> tuple[Tree, Origin]:
    prefix = f"{asked_by.label}: recipe: " if asked_by else ""
    if not isinstance(name, str):
        raise ConfigError(f"{prefix}got {name!r}; allowed: a recipe's name, or a file's")
    if _is_file(name):
        return _as_run(_read_yaml(FilePath(name), f"{prefix}{name}"), name)
    try:
        path = registry.recipe_file(name).path
    except ConfigError as error:
        if not prefix:
            raise
        raise type(error)(f"{prefix}{error}") from error
    return _as_run(_read_yaml(path, f"recipe {name}"), f"recipe {name}")


def _read_yaml(path: FilePath, label: str) -> Tree:
    if _waits(path):
        raise ConfigError(f"{label}: cannot read the file: it is not a regular file")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8 text"
        raise ConfigError(f"{label}: cannot read the file: {reason}") from error
    content = _parse_yaml(text, label)
    if not isinstance(content, dict):
        given = "nothing" if content is None else shortened(repr(content))
        raise ConfigError(f"{label}: got {given}; allowed: a mapping, such as strategy: {{gradients: [...]}}")
    return content


def _waits(path: FilePath) -> bool:
    """Return whether reading a file waits for a writer, as with a named pipe."""
    try:
        return stat.S_ISFIFO(path.stat().st_mode)
    except OSError:
        return False


def _parse_yaml(text: str, label: str) -> object:
    try:
        loader = _YamlLoader(text)
        node = loader.get_single_node()
        _check_size(node)
        # deep: a mapping that contains itself through an alias is refused, with its line.
        content = None if node is None else loader.construct_object(node, deep=True)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        raise ConfigError(f"{label}: {where}not valid YAML: {error.problem}") from error
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{label}: not valid YAML: {str(error).splitlines()[0]}") from error
    except RecursionError as error:  # before there is a node
        raise ConfigError(f"{label}: {_TOO_DEEP}") from error
    return _plain(content, label, "")


def _check_size(root: yaml.Node | None) -> None:
    """Refuse values that are nested too deeply, or whose aliases multiply to more than memory holds."""
    sizes: dict[int, int] = {}

    def size(node: yaml.Node, depth: int) -> int:
        if depth > _DEEPEST:
            raise yaml.MarkedYAMLError(problem=_TOO_DEEP, problem_mark=node.start_mark)
        if id(node) not in sizes:
            sizes[id(node)] = 0  # what contains itself is refused later
            children = node.value if isinstance(node, yaml.CollectionNode) else ()
            flat = [child for each in children for child in (each if isinstance(each, tuple) else (each,))]
            sizes[id(node)] = 1 + sum(size(child, depth + 1) for child in flat)
            if sizes[id(node)] > _MOST_VALUES:
                raise yaml.MarkedYAMLError(
                    problem=f"aliases multiply to more than {_MOST_VALUES} values",
                    problem_mark=node.start_mark,
                )
        return sizes[id(node)]

    if root is not None:
        size(root, 0)


def _as_run(layer: Tree, label: str) -> tuple[Tree, Origin]:
    """Put the slots of a strategy that stands alone, and paths into them, below `strategy`."""
    of_slots = [key for key in layer if key.partition(".")[0] in SLOTS]
    if not of_slots:
        return layer, Origin(label)
    if "strategy" in layer:
        raise ConfigError(f"{label}: {of_slots[0]} is given next to strategy: put it under strategy")
    slots = {key: layer[key] for key in SLOTS if key in layer}
    paths = {f"strategy.{key}": layer[key] for key in of_slots if key not in slots}
    others = {key: value for key, value in layer.items() if key not in of_slots}
    return {**others, **({"strategy": slots} if slots else {}), **paths}, Origin(label, bare=True)


def _plain(value: object, label: str, path: str) -> Any:
    """Copy a value of mappings, lists, text, numbers, booleans and null; `path` is its place in errors."""
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str | int) or isinstance(key, bool):
                raise ConfigError(f"{label}: {path or 'root'}: the key {key!r} is not text")
        return {str(key): _plain(v, label, f"{path}.{key}".lstrip(".")) for key, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v, label, f"{path}.{i}".lstrip(".")) for i, v in enumerate(value)]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, str | int | float | None):
        return value
    place = f"{path}: " if path else ""
    raise ConfigError(
        f"{label}: {place}got {value!r}; allowed: mappings, lists, text, numbers, true, false, null"
    )
