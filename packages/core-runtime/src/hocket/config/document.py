"""A configuration being merged: a tree of plain values, and the source of each."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import InterpolationKeyError, OmegaConfBaseException

from hocket.errors import ConfigError, allowed_words, suggest
from hocket.plain import Tree, TreeView

#: The least similarity, 0 to 1, at which an unknown key counts as misspelt and is not looked for elsewhere.
_SLIP = 0.8

#: The way from the root to a value: keys of mappings and indices of lists.
Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Origin:
    """The source of a value.

    Attributes:
        label: the source's name in errors: a file, `recipe sgd`, `override 'epochs=3'`, `mapping`.
        bare: True if the source holds a strategy alone, so that its keys lack the leading `strategy`.
    """

    label: str
    bare: bool = False


class Document:
    """Layers of configuration, merged in the order in which they are laid.

    A mapping changes the keys that it has and leaves the others; everything else replaces what was below it.
    Two refinements serve components: a mapping with a `name` replaces, as fields of another component mean
    nothing to it, and one without, over a component given by its name alone, adds fields to that.
    """

    def __init__(self, origin: Origin) -> None:
        """Make an empty document; `origin` answers for what no layer has."""
        self.tree: Tree = {}
        self._origins: dict[Path, Origin] = {(): origin}

    @property
    def root(self) -> Location:
        """The place of the whole tree."""
        return Location(self, (), self.tree)

    def lay(self, layer: TreeView, origin: Origin) -> None:
        """Lay a mapping of plain values over the tree; a root key with dots is a path, as for `assign`.

        Raises:
            ConfigError: a path that leads nowhere, as in `assign`.
        """
        self._origins[()] = origin
        for key, value in layer.items():
            self.assign(key.split("."), value, origin)

    def assign(self, keys: Sequence[str], value: object, origin: Origin) -> None:
        """Lay one value over the tree at a path whose list indices are written as text.

        Raises:
            ConfigError: the path leads through a list without such an index, or through what has no keys.
        """
        node: Any = self.tree
        path: Path = ()
        for depth, text in enumerate(keys):
            key: Any = text
            if isinstance(node, list):
                key = self._index(node, text, path, origin)
            path = (*path, key)
            below = node[key] if isinstance(node, list) else node.get(key)
            if depth == len(keys) - 1:
                node[key] = self._merged(below, value, path, origin)
            elif below is None:
                node[key] = {}
                self._origins[path] = origin
            elif isinstance(below, str):
                node[key] = self._named(below, path, origin)
            elif not isinstance(below, dict | list):
                given = Location(self, path, below).given
                raise ConfigError(
                    f"{origin.label}: {_written(path, origin)} is {given}, which cannot have keys"
                )
            node = node[key]

    def copy(self) -> Document:
        """Return a document of its own with the same content."""
        other = Document(self._origins[()])
        other.tree = copy.deepcopy(self.tree)
        other._origins = dict(self._origins)
        return other

    def origin_of(self, path: Path) -> Origin:
        """Return the source of the value at `path`, or else of the nearest mapping or list around it."""
        for length in range(len(path), 0, -1):
            if path[:length] in self._origins:
                return self._origins[path[:length]]
        return self._origins[()]

    def remove(self, path: Path) -> None:
        """Take a key out of a mapping.

        Args:
            path: the path of an existing key.
        """
        node: Any = self.tree
        for key in path[:-1]:
            node = node[key]
        self._forget(node.pop(path[-1]), path)

    def interpolate(self) -> None:
        """Replace `${key}` by the value at that key and `${oc.env:NAME}` by the environment's.

        Raises:
            ConfigError: a reference that leads nowhere or is malformed, or a value left mandatory (`???`).
        """
        if _is_resolved(self.tree):
            return
        try:
            config = OmegaConf.create(self.tree)
            tree: Any = OmegaConf.to_container(config, resolve=True, throw_on_missing=True)
        except OmegaConfBaseException as error:
            where = self.root
            for key in (error.full_key or "").replace("[", ".").replace("]", "").split("."):
                where = where.child(int(key) if key.isdecimal() else key)
            problem = str(error.msg or error).partition("\n")[0]
            if isinstance(error, InterpolationKeyError):
                # Such as a group of another size in hierarchical_sgd, whose leaders are those of the group.
                problem += (
                    "; a mapping with a `name` replaces the whole earlier one: to keep its other keys, set single "
                    "keys, such as a.b=4"
                )
            raise where.error(f"got {where.given}: {problem}") from error
        self.tree = tree

    def _merged(self, below: object, above: object, path: Path, origin: Origin) -> object:
        if isinstance(above, Mapping) and "name" not in above:
            if isinstance(below, str):
                below = self._named(below, path, origin)
            if isinstance(below, Mapping):
                changed = {k: self._merged(below.get(k), v, (*path, k), origin) for k, v in above.items()}
                return {**below, **changed}
        self._forget(below, path)
        self._origins[path] = origin
        return copy.deepcopy(above)

    def _forget(self, value: object, path: Path) -> None:
        """Forget where a value, and all in it, came from, without a look at all other origins."""
        self._origins.pop(path, None)
        if isinstance(value, dict | list):
            for key, below in value.items() if isinstance(value, dict) else enumerate(value):
                self._forget(below, (*path, key))

    def _named(self, name: str, path: Path, origin: Origin) -> Tree:
        """Return a component given by its name alone as a mapping that can take fields."""
        self._origins[(*path, "name")] = self.origin_of(path)
        self._origins[path] = origin
        return {"name": name}

    @staticmethod
    def _index(node: list[object], key: str, path: Path, origin: Origin) -> int:
        if key.isdecimal() and int(key) < len(node):
            return int(key)
        what = "exchange" if len(path) == 2 and path[0] == "strategy" else "item"
        numbers = f", numbered 0 to {len(node) - 1}" if node else ""
        plural = "" if len(node) == 1 else "s"
        name = _written(path, origin)
        raise ConfigError(f"{origin.label}: {name}.{key}: {name} has {len(node)} {what}{plural}{numbers}")


@dataclass(frozen=True)
class Location:
    """A place in a document, with its value; None where there is none."""

    document: Document
    path: Path
    value: Any

    @property
    def source(self) -> str:
        """The name, in errors, of the source of this place's value."""
        return self.document.origin_of(self.path).label

    @property
    def key(self) -> str:
        """The path to this place, as its source writes it."""
        return _written(self.path, self.document.origin_of(self.path))

    @property
    def written(self) -> str:
        """The source and the key of this place, as errors begin with them."""
        return f"{self.source}: {self.key}" if self.key else self.source

    @property
    def given(self) -> str:
        """The value, as YAML writes it."""
        words = {None: "null", True: "true", False: "false"}
        return words[self.value] if self.value is None or isinstance(self.value, bool) else repr(self.value)

    def child(self, key: str | int) -> Location:
        """Return the place of a key or index below this one."""
        value = self.value
        if isinstance(value, Mapping):
            value = value.get(key)
        elif isinstance(value, list) and isinstance(key, int) and key < len(value):
            value = value[key]
        else:
            value = None
        return Location(self.document, (*self.path, key), value)

    def error(
        self, problem: str, allowed: str = "", guess: str = "", kind: type[ConfigError] = ConfigError
    ) -> ConfigError:
        """Return an error that names the source and the key of this place."""
        ending = allowed_words(allowed, guess) if allowed else ""
        return kind(f"{self.written}: {problem}{ending}")

    def wrap(self, error: ConfigError) -> ConfigError:
        """Return `error`, of its own type, with the source and the key of this place before its message."""
        return self.error(str(error), kind=type(error))

    def check_keys(self, allowed: Sequence[str]) -> None:
        """Refuse a mapping's first key that is not allowed, suggesting one that is.

        Raises:
            ConfigError: an unknown key.
        """
        for key in self.value:
            if key not in allowed:
                child = self.child(key)
                error = child.error("unknown key", ", ".join(allowed) or "none", suggest(str(key), allowed))
                if not get_close_matches(str(key), allowed, cutoff=_SLIP):
                    error.unknown = child.path
                raise error


def _is_resolved(tree: object) -> bool:
    """Return whether a tree holds plain values alone, none of which refers to another or is to be given yet."""
    if isinstance(tree, dict):
        return all(isinstance(key, str | int) and _is_resolved(value) for key, value in tree.items())
    if isinstance(tree, list):
        return all(map(_is_resolved, tree))
    if isinstance(tree, str):
        return "${" not in tree and tree != "???"
    return tree is None or type(tree) in (bool, int, float)


def _written(path: Path, origin: Origin) -> str:
    """Return a path as its source writes it."""
    if origin.bare and path[:1] == ("strategy",):
        path = path[1:]
    return ".".join(map(str, path))
