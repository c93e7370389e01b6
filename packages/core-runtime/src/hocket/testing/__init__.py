"""Conformance suites: what every component of a kind has to do, as tests to subclass."""

import pkgutil
import sys

if "pytest" in sys.modules:  # ranks that tests start have none
    import pytest

    # Else a failing assertion shows neither of the values that it compares.
    pytest.register_assert_rewrite(
        *(f"{__name__}.{module.name}" for module in pkgutil.iter_modules(__path__))
    )
