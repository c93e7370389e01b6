"""Lightning's packages under either of their names: `lightning.pytorch` may be installed as `pytorch_lightning`."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any

from hocket.errors import UserError

_ALONE = {"pytorch": "pytorch_lightning", "fabric": "lightning_fabric"}


def lightning(module: str) -> Any:
    """Return a module of Lightning's, from the distribution that this script uses.

    Args:
        module: its name within the distribution, for instance `fabric.strategies`.

    Raises:
        UserError: Lightning is not installed.
    """
    part, _, rest = module.partition(".")
    names = [f"lightning.{part}", _ALONE[part]]
    if _ALONE[part] in sys.modules and "lightning" not in sys.modules:
        names.reverse()
    for name in names:
        try:
            return import_module(f"{name}.{rest}" if rest else name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):
                raise
    raise UserError(
        f"hocket-lightning needs {' or '.join(names)}, but neither is installed: pip install lightning"
    )
