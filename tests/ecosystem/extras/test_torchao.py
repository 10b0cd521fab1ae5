"""torchao's weights of eight bits on the chip, against the CPU."""

import copy
import warnings

import pytest
import torch
from torch import nn

quantization = pytest.importorskip("torchao.quantization")


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Int8DynamicActivationInt8WeightConfig",
                                    "Float8WeightOnlyConfig"])
def test_linear_layers(config):
    torch.manual_seed(0)
    cpu = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 64)).bfloat16().eval()
    x = torch.randn(4, 128).bfloat16()
    tpu = copy.deepcopy(cpu).to("tpu")
    quantization.quantize_(cpu, getattr(quantization, config)())
    quantization.quantize_(tpu, getattr(quantization, config)())
    with torch.no_grad(), warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*is cut into.*")  # an operator of torchao's without a lowering
        for run in (tpu, torch.compile(tpu, backend="tpu")):
            torch.testing.assert_close(run(x.to("tpu")).cpu(), cpu(x), rtol=2e-2, atol=1e-2)
