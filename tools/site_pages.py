"""The site's generated parts: the reference of keys, words to search for, and docstrings as Sphinx reads them.

The reference of keys is the second part of docs/configuration.md.
"""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
import typing
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml
from docutils import nodes

from hocket import errors
from hocket.config.component import describe
from hocket.config.reference import Reference
from hocket.config.settings import DESCRIPTIVE, CheckpointSettings, IslandSettings, RunSettings
from hocket.configured import allowed_by, optional
from hocket.delays import ComputeModel
from hocket.plugin import Kind, default_registry
from hocket.plugin.kinds import kind_of_hint
from hocket.strategy import Strategy
from hocket.strategy.exchange import Exchange
from hocket.transport.network import NetworkModel

if TYPE_CHECKING:
    from sphinx.application import Sphinx

#: The page that holds the reference of keys.
PAGE = Path(__file__).resolve().parents[1] / "docs" / "configuration.md"

#: What a config cannot set.
_SET_BY_OTHERS = {(Exchange, "slot"), (Exchange, "index"), (Strategy, "name"), (Strategy, "phases")}

#: Words that a page is searched by and does not have, or has once.
_SEARCHED_BY = {
    "docs/works_with": "huggingface hf transformers trl trainer peft lora qlora fsdp fsdp2 hsdp deepspeed megatron "
    "accelerate gradient accumulation amp bf16 fp16 autocast compile checkpointing",
    "docs/getting_started": "ddp distributeddataparallel no_sync gradient accumulation distributedsampler",
    "docs/islands": "fsdp fsdp2 hsdp fully_shard tensor parallel sharding",
    "docs/gpu": "cuda nccl gpu",
    "docs/clusters": "slurm kubernetes k8s multinode",
    "packages/transformers/README": "huggingface hf transformers trl peft lora sft accelerate",
    "packages/lightning/README": "pytorch_lightning fabric trainer lora",
    "examples/README": "huggingface accelerate fabric notebook resnet transformer",
}

#: Records that are mappings in a config, with the headings of their tables.
_RECORDS = {
    Exchange: "an exchange",
    CheckpointSettings: "checkpoint",
    IslandSettings: "island",
    NetworkModel: "network",
    ComputeModel: "compute",
}


def attributes(documented: type) -> dict[str, str]:
    """Return what a class's docstring, and those of its bases, say of each attribute, as one line each."""
    said: dict[str, str] = {}
    for base in reversed(documented.__mro__):
        text = inspect.cleandoc(base.__doc__ or "")
        found = re.search(r"^Attributes:\n((?:(?: {4}.*)?\n?)+)", text, re.M)
        entries = textwrap.dedent(found[1]) if found else ""
        for names, meaning in re.findall(r"^(\w+(?:, \w+)*): (.*(?:\n +.*)*)", entries, re.M):
            said |= dict.fromkeys(names.split(", "), " ".join(meaning.split()))
    return said


def configuration() -> Iterator[str]:
    """Yield the reference of a run's file: each key with its type, its default and what it means.

    Raises:
        LookupError: a field that its class's docstring does not explain.
    """
    yield from _section("## The run", RunSettings, but=DESCRIPTIVE)
    yield from _section("## `strategy`", Strategy)
    for record, title in _RECORDS.items():
        yield from _section(f"### {title}" if record is Exchange else f"## `{title}`", record)
    registry = default_registry()
    for word in registry.installed():
        registry.load(word)
    for kind in Kind:
        yield f"## {_plural(kind)}"
        for registration in registry.components():
            if registration.kind is kind:
                component = registry.resolve(kind, registration.name)
                yield from _section(f"### {kind.value} `{registration.name}`", component)
    yield "## What a recipe says of itself"
    yield "More keys of a run's file, with which a recipe describes itself to `hocket plugins` and `hocket recommend`."
    rows = _rows(RunSettings)
    yield _table(rows[key] for key in DESCRIPTIVE)


def with_configuration(page: str) -> str:
    """Return the page with its reference, which begins with the run's keys, as the source has it."""
    parts = list(configuration())
    return page.partition(f"\n{parts[0]}\n")[0] + "\n" + "\n\n".join(parts) + "\n"


def _section(title: str, record: type, but: Collection[str] = ()) -> Iterator[str]:
    yield title
    yield _summary(record)
    rows = [row for key, row in _rows(record).items() if key not in but]
    if rows:
        yield _table(rows)


def _table(rows: Iterable[str]) -> str:
    return "\n".join(["| key | type | default | meaning |", "|---|---|---|---|", *rows])


def _rows(record: type) -> dict[str, str]:
    """Return a table's row for each key."""
    rows = {}
    hints, said = typing.get_type_hints(record), attributes(record)
    for field in dataclasses.fields(record):
        if not field.init or (record, field.name) in _SET_BY_OTHERS:
            continue
        if field.name not in said:
            raise LookupError(
                f"{record.__module__}.{record.__qualname__}: its docstring's Attributes lack {field.name}"
            )
        cells = (f"`{field.name}`", _type(hints[field.name]), _default(field), said[field.name])
        rows[field.name] = f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    return rows


def _summary(documented: type) -> str:
    return " ".join(inspect.cleandoc(documented.__doc__ or "").partition("\n\n")[0].split())


def _type(hint: object) -> str:
    """Return what a field takes, in words, with links to what is described further down."""
    inner, nullable = optional(hint)
    words = _links(inner) or allowed_by(inner)
    return f"{words}, or null" if nullable else words


def _links(hint: Any) -> str:
    kind = kind_of_hint(hint)
    if kind is not None:
        return f"[{_one(kind)}](#{_plural(kind).lower().replace(' ', '-')})"
    if hint is Reference:
        return "a name, or a mapping with `name` and arguments"
    if typing.get_origin(hint) is tuple:
        of = typing.get_args(hint)[0]
        return f"a list; each item is {_links(of)}" if _links(of) else "a list"
    if hint in _RECORDS:
        return f"a mapping: [{_RECORDS[hint]}](#{_RECORDS[hint].replace(' ', '-')})"
    return ""


def _default(field: dataclasses.Field[Any]) -> str:
    if field.default is not dataclasses.MISSING:
        value = field.default
    elif field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    else:
        return "required"
    plain = value.plain() if isinstance(value, Reference) else describe(value)
    text = yaml.safe_dump(plain, default_flow_style=True, width=10**6, sort_keys=False)
    return f"`{text.removesuffix(chr(10)).removesuffix('...').strip()}`"


def _one(kind: Kind) -> str:
    irregular = {Kind.OUTER: "an outer optimizer", Kind.SAMPLES: "a sample exchange", Kind.DELAYS: "delays"}
    return irregular.get(kind, f"{'an' if kind.value[0] in 'aeiou' else 'a'} {kind.value}")


def _plural(kind: Kind) -> str:
    word = kind.value.capitalize()
    irregular = {Kind.TOPOLOGY: "Topologies", Kind.OUTER: "Outer optimizers"}
    return irregular.get(kind, word if word.endswith("s") else f"{word}s")


def in_rest(lines: list[str]) -> list[str]:
    """Return a docstring's lines as reStructuredText: `names` as literals, and code where it is indented."""
    text = re.sub(r"(?<!`)`([^`]+)`(?!`)", r"``\1``\\ ", "\n".join(lines))
    text = re.sub(r"\|(?=\w+\|)", r"\\|", text)  # a norm, and no substitution
    marked = text.splitlines()
    for place in range(2, len(marked)):
        above, blank, line = marked[place - 2 : place + 1]
        deeper = len(line) - len(line.lstrip()) >= 4 + len(above) - len(above.lstrip())
        if (
            line.strip()
            and not blank.strip()
            and above.strip()
            and deeper
            and not above.lstrip().startswith(".. ")
        ):
            marked[place - 2] = re.sub(r"::?$", "", above) + "::"
    return marked


def _prepare(app: Sphinx, what: str, name: str, thing: Any, options: Any, lines: list[str]) -> None:
    # An error's name leads to its explanation.
    linked = (re.sub(r"^( +)([A-Z]\w+):", _linked_error, line) for line in lines)
    lines[:] = in_rest([*linked])


def _linked_error(found: re.Match[str]) -> str:
    return f"{found[1]}~hocket.errors.{found[2]}:" if hasattr(errors, found[2]) else found[0]


def _add_searched_words(app: Sphinx, doctree: nodes.document) -> None:
    """Give a page the words that readers search for it by."""
    words = _SEARCHED_BY.get(app.env.docname, "").split()
    if words:
        doctree.append(nodes.meta(name="keywords", content=", ".join(words)))


def _show_commands(app: Sphinx, context: Any, lines: list[str]) -> None:
    """Show what a command's help has as lines of a shell as such."""

    def shown(found: re.Match[str]) -> str:
        return ".. code-block:: sh\n\n" + found[0].replace("| ", "   ")

    lines[:] = re.sub(r"(?:^\| .*\n?)+", shown, "\n".join(lines), flags=re.M).split("\n")


def setup(app: Sphinx) -> dict[str, Any]:
    """Register how docstrings and help texts are shown, and by what words pages are found."""
    # Before napoleon, which indents what it makes of sections.
    app.connect("autodoc-process-docstring", _prepare, priority=100)
    app.connect("sphinx-click-process-description", _show_commands)
    app.connect("doctree-read", _add_searched_words)
    return {"parallel_read_safe": True}


if __name__ == "__main__":
    PAGE.write_text(with_configuration(PAGE.read_text()))
