"""Modules beside the tests are found here: with --import-mode=importlib they are not by themselves."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
