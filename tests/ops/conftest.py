"""Operators are tested on the device: integers that the host knows would be computed on the CPU, the oracle itself."""

import pytest

from torch_tpu.eager import bookkeeping


@pytest.fixture(autouse=True)
def integers_on_the_device():
    before = bookkeeping.set(False)
    yield
    bookkeeping.set(before)
