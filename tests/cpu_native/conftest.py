"""What runs under an emulator takes minutes: those tests are marked slow."""

from __future__ import annotations

import emulator
import pytest


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if parameters.get("isa") in emulator.ISAS:
            item.add_marker(pytest.mark.slow)
            item.add_marker(pytest.mark.timeout(1500))  # the first of them compiles the program
