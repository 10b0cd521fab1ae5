"""Dynamo leaves JAX's code alone where a graph breaks and the device's kernels run (nn.LSTM breaks every graph)."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("no_fallback")


def test_frames_of_jax_are_not_traced():
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    lstm = torch.nn.LSTM(7, 11).to("tpu")  # sizes of no other test: its programs are traced here

    def run(x):
        y, _ = lstm(x * 2)
        return (y + 1).sum()

    x = torch.randn(3, 2, 7, device="tpu")
    torch.testing.assert_close(torch.compile(run, backend="tpu")(x), run(x))
    reasons = list(counters["graph_break"])
    assert any("LSTM" in reason for reason in reasons), "the graph is no longer broken: the test shows nothing"
    assert not [reason for reason in reasons if "nb_type" in reason or "nb_method" in reason or "jaxlib" in reason]
