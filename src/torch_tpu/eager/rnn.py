"""nn.RNN, nn.LSTM and nn.GRU: each layer and direction is one operator, `tpu::rnn_layer`, instead of a few operators
a time step. A packed batch is unpacked into a rectangle with lengths."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F

from . import transforms

Tensor = torch.Tensor

_tpu = torch.library.Library("tpu", "FRAGMENT")
_aten = torch.library.Library("aten", "IMPL")

# weights: input, hidden, their biases, and an LSTM's projection; mode: lstm, gru, tanh or relu. Without c: a size of 0.
_tpu.define("rnn_layer(Tensor input, Tensor h, Tensor? c, Tensor?[] weights, Tensor? lengths, str mode, bool reverse) "
            "-> (Tensor output, Tensor h, Tensor c)")
_tpu.define("rnn_layer_backward(Tensor? grad_output, Tensor? grad_h, Tensor? grad_c, Tensor input, Tensor h, "
            "Tensor? c, Tensor?[] weights, Tensor? lengths, str mode, bool reverse) "
            "-> (Tensor input, Tensor h, Tensor c, Tensor[] weights)")


def _like(tensor: Tensor | None, dtype: Tensor) -> Tensor:
    return dtype.new_empty((0,)) if tensor is None else tensor.new_empty(tensor.shape)


def _meta(input: Tensor, h: Tensor, c: Tensor | None, weights: list[Tensor | None], lengths: Tensor | None, mode: str,
          reverse: bool) -> tuple[Tensor, Tensor, Tensor]:
    return input.new_empty((*input.shape[:2], h.shape[-1])), _like(h, input), _like(c, input)


def _meta_backward(grad_output: Tensor | None, grad_h: Tensor | None, grad_c: Tensor | None, input: Tensor, h: Tensor,
                   c: Tensor | None, weights: list[Tensor | None], lengths: Tensor | None, mode: str,
                   reverse: bool) -> tuple[Tensor, Tensor, Tensor, list[Tensor]]:
    return _like(input, input), _like(h, input), _like(c, input), [_like(w, input) for w in weights]


_tpu.impl("rnn_layer", _meta, "Meta")
_tpu.impl("rnn_layer_backward", _meta_backward, "Meta")


def plain(input: Tensor, h: Tensor, c: Tensor | None, lengths: Tensor | None, mode: str, reverse: bool,
          *weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """The same in PyTorch's own operators, each of which can be differentiated as often as wished."""
    w_ih, w_hh, b_ih, b_hh, w_hr = weights
    assert w_ih is not None and w_hh is not None
    gates = F.linear(input, w_ih, b_ih)
    outputs: list[Tensor] = []
    for t in reversed(range(input.shape[0])) if reverse else range(input.shape[0]):
        hidden, new_c = F.linear(h, w_hh, b_hh), c
        if mode == "lstm":
            assert c is not None
            i, f, g, o = (gates[t] + hidden).chunk(4, -1)
            new_c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            new_h = o.sigmoid() * new_c.tanh()
            if w_hr is not None:
                new_h = F.linear(new_h, w_hr)
        elif mode == "gru":
            (r, z, n), (rh, zh, nh) = gates[t].chunk(3, -1), hidden.chunk(3, -1)
            z = (z + zh).sigmoid()
            n = (n + (r + rh).sigmoid() * nh).tanh()
            new_h = n + z * (h - n)
        else:
            new_h = (gates[t] + hidden).tanh() if mode == "tanh" else (gates[t] + hidden).relu()
        if lengths is None:
            outputs.append(new_h)
            h, c = new_h, new_c
            continue
        inside = (lengths > t).unsqueeze(1)
        outputs.append(torch.where(inside, new_h, 0))
        h = torch.where(inside, new_h, h)
        if c is not None and new_c is not None:
            c = torch.where(inside, new_c, c)
    return torch.stack(outputs[::-1] if reverse else outputs), h, c


class Layer(torch.autograd.Function):
    """One layer in one direction: tensors first (weights may be None), then what is no tensor."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, h: Tensor, c: Tensor | None, lengths: Tensor | None, mode: str, reverse: bool,
                *weights: Tensor | None) -> Any:
        ctx.save_for_backward(input, h, c, lengths, *weights)
        ctx.mode, ctx.reverse = mode, reverse
        ctx.set_materialize_grads(False)
        with torch._C._AutoDispatchBelowAutograd():
            return torch.ops.tpu.rnn_layer(input, h, c, list(weights), lengths, mode, reverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        input, h, c, lengths, *weights = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: the gradients are to be differentiated too
            return _differentiable_backward(ctx, grads)
        dx, dh, dc, dw = torch.ops.tpu.rnn_layer_backward(
            grads[0], grads[1], None if c is None else grads[2], input, h, c, weights, lengths, ctx.mode, ctx.reverse)
        return (dx, dh, None if c is None else dc, None, None, None,
                *(None if w is None else g for w, g in zip(weights, dw)))


def _differentiable_backward(ctx: Any, grads: tuple[Tensor | None, ...]) -> Any:
    input, h, c, lengths, *weights = ctx.saved_tensors
    outputs = plain(input, h, c, lengths, ctx.mode, ctx.reverse, *weights)
    arguments = (input, h, c, None, None, None, *weights)
    wanted = [a for a, needed in zip(arguments, ctx.needs_input_grad) if needed and a is not None]
    given = [(o, g) for o, g in zip(outputs, grads) if o is not None and g is not None]
    found = iter(torch.autograd.grad([o for o, _ in given], wanted, [g for _, g in given], create_graph=True,
                                     allow_unused=True) if given else [None] * len(wanted))
    return tuple(next(found) if needed and a is not None else None
                 for a, needed in zip(arguments, ctx.needs_input_grad))


def _check(input: Tensor, h: Tensor, weights: list[Tensor | None]) -> None:
    w_ih = weights[0]
    assert w_ih is not None
    if input.shape[-1] != w_ih.shape[1]:
        raise RuntimeError(f"input.size(-1) must be equal to input_size. Expected {w_ih.shape[1]}, got "
                           f"{input.shape[-1]}")
    if h.shape[0] != input.shape[1]:
        raise RuntimeError(f"Expected hidden size for a batch of {input.shape[1]}, got {list(h.shape)}")


def _stack(mode: str, input: Tensor, h: Tensor, c: Tensor | None, params: list[Tensor], has_biases: bool,
           num_layers: int, dropout: float, train: bool, bidirectional: bool,
           lengths: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """All layers over input (T, B, I); states are (layers * directions, B, H)."""
    directions = 2 if bidirectional else 1
    projected = mode == "lstm" and len(params) == num_layers * directions * (5 if has_biases else 3)
    each = (4 if has_biases else 2) + projected
    if len(params) != each * num_layers * directions:
        raise RuntimeError(f"got an incorrect number of RNN parameters ({len(params)})")
    last_h: list[Tensor] = []
    last_c: list[Tensor] = []
    for layer in range(num_layers):
        outputs = []
        for direction in range(directions):
            at = layer * directions + direction
            given = params[at * each:(at + 1) * each]
            weights: list[Tensor | None] = [*given[:2], *(given[2:4] if has_biases else (None, None)),
                                            given[-1] if projected else None]
            _check(input, h[at], weights)
            start = None if c is None else c[at]
            run: Any = plain if transforms.active(input, h, c, *params) else Layer.apply
            out, h_n, c_n = run(input, h[at], start, lengths, mode, direction == 1, *weights)
            outputs.append(out)
            last_h.append(h_n)
            last_c.append(c_n)
        input = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout > 0 and train and layer < num_layers - 1:
            input = F.dropout(input, dropout)
    return input, torch.stack(last_h), None if c is None else torch.stack(last_c)


def _unpack(data: Tensor, batch_sizes: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A packed sequence as a rectangle (T, B, I), the lengths, and the flat positions that pack it again."""
    sizes = batch_sizes.tolist()
    starts = [0, *itertools.accumulate(sizes)][:-1]
    batch = sizes[0]
    ranks = torch.arange(batch)
    index = (torch.tensor(starts).unsqueeze(1) + ranks).clamp(max=data.shape[0] - 1)
    lengths = (batch_sizes.unsqueeze(1) > ranks).sum(0)
    flat = torch.cat([t * batch + ranks[:n] for t, n in enumerate(sizes)])
    return (data[index.to(data.device)], lengths.to(data.device), flat.to(data.device), batch_sizes)


def _input(mode: str, input: Tensor, h: Tensor, c: Tensor | None, params: list[Tensor], has_biases: bool,
           num_layers: int, dropout: float, train: bool, bidirectional: bool, batch_first: bool) -> tuple[Any, ...]:
    x = input.transpose(0, 1) if batch_first else input
    out, h, c = _stack(mode, x, h, c, params, has_biases, num_layers, dropout, train, bidirectional, None)
    return out.transpose(0, 1) if batch_first else out, h, c


def _data(mode: str, data: Tensor, batch_sizes: Tensor, h: Tensor, c: Tensor | None, params: list[Tensor],
          has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool) -> tuple[Any, ...]:
    x, lengths, flat, _ = _unpack(data, batch_sizes)
    out, h, c = _stack(mode, x, h, c, params, has_biases, num_layers, dropout, train, bidirectional, lengths)
    return out.reshape(-1, out.shape[-1])[flat], h, c


def _lstm_input(input: Tensor, hx: list[Tensor], params: list[Tensor], *rest: Any) -> Any:
    return _input("lstm", input, hx[0], hx[1], params, *rest)


def _lstm_data(data: Tensor, batch_sizes: Tensor, hx: list[Tensor], params: list[Tensor], *rest: Any) -> Any:
    return _data("lstm", data, batch_sizes, hx[0], hx[1], params, *rest)


def _enter(name: str, mode: str) -> None:
    def by_input(input: Tensor, hx: Tensor, params: list[Tensor], *rest: Any) -> Any:
        return _input(mode, input, hx, None, params, *rest)[:2]

    def by_data(data: Tensor, batch_sizes: Tensor, hx: Tensor, params: list[Tensor], *rest: Any) -> Any:
        return _data(mode, data, batch_sizes, hx, None, params, *rest)[:2]

    for key in ("AutogradPrivateUse1", "PrivateUse1"):
        _aten.impl(f"{name}.input", _lstm_input if mode == "lstm" else by_input, key)
        _aten.impl(f"{name}.data", _lstm_data if mode == "lstm" else by_data, key)


for _name, _mode in (("lstm", "lstm"), ("gru", "gru"), ("rnn_tanh", "tanh"), ("rnn_relu", "relu")):
    _enter(_name, _mode)
