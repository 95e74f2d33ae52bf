"""The forwarding distribution of the checkout, as if it was installed."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tests.support.sources import ROOT

FORWARDS = ROOT / "compat" / "tensorflowonspark"


@pytest.fixture
def forwarding(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Make `import tensorflowonspark` work, and forget it afterwards."""
    monkeypatch.syspath_prepend(str(FORWARDS))
    yield
    for name in [each for each in sys.modules if each.partition(".")[0] == "tensorflowonspark"]:
        del sys.modules[name]
