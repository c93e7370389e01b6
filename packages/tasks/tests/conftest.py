"""What holds for all tests of the package."""

from __future__ import annotations

import sys
from pathlib import Path

# With --import-mode=importlib the modules beside the tests are not found by themselves.
sys.path.insert(0, str(Path(__file__).parent))
