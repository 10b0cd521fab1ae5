"""Recurrent layers, cells and CTC against the CPU, with the gradients of every parameter."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from conftest import compare


def _compare_module(module, fn, *args):
    def run(*inputs):
        here = copy.deepcopy(module).to(inputs[0].device)
        outputs = fn(here, *inputs)
        sum(o.pow(2).sum() for o in outputs).backward()
        return [o.detach() for o in outputs] + [p.grad for p in here.parameters()]

    compare(run, *args, rtol=1e-3, atol=1e-4)


def _flat(out):
    result, state = out
    return [result, *(state if isinstance(state, tuple) else (state,))]


LAYERS = [(nn.LSTM, {}), (nn.LSTM, {"num_layers": 2, "bidirectional": True}), (nn.LSTM, {"bias": False}),
          (nn.GRU, {}), (nn.GRU, {"num_layers": 2, "bidirectional": True}), (nn.RNN, {}),
          (nn.RNN, {"nonlinearity": "relu", "bidirectional": True})]


@pytest.mark.parametrize(("kind", "settings"), LAYERS)
def test_layers(kind, settings, no_fallback):
    module = kind(4, 6, batch_first=True, **settings)
    _compare_module(module, lambda m, x: _flat(m(x)), torch.randn(3, 5, 4))


@pytest.mark.parametrize(("kind", "settings"), LAYERS)
def test_packed(kind, settings, no_fallback):
    def fn(module, x):
        packed = pack_padded_sequence(x, torch.tensor([2, 5, 3]), batch_first=True, enforce_sorted=False)
        out, *state = _flat(module(packed))
        return [pad_packed_sequence(out, batch_first=True)[0], *state]

    _compare_module(kind(4, 6, batch_first=True, **settings), fn, torch.randn(3, 5, 4))


@pytest.mark.parametrize("kind", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
def test_cells(kind, no_fallback):
    def fn(module, x, h):
        out = module(x, (h, h) if kind is nn.LSTMCell else h)
        return out if isinstance(out, tuple) else (out,)

    _compare_module(kind(4, 6), fn, torch.randn(3, 4), torch.randn(3, 6))


@pytest.mark.parametrize("flat", [True, False])
def test_ctc_loss(flat, no_fallback):
    lengths, sizes = torch.tensor([8, 6]), torch.tensor([3, 2])
    targets = torch.randint(1, 5, (5,) if flat else (2, 4))

    def fn(x, targets):
        x = x.requires_grad_()
        loss = F.ctc_loss(x.log_softmax(-1), targets, lengths.to(x.device), sizes.to(x.device), reduction="none")
        return loss.detach(), torch.autograd.grad(loss.sum(), x)[0]

    compare(fn, torch.randn(8, 2, 5), targets, rtol=1e-4, atol=1e-5)
