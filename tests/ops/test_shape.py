"""Joining, padding, rearranging."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from conftest import compare, compare_grad

pytestmark = pytest.mark.usefixtures("no_fallback")


def values(*shape, dtype=torch.float32):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3).to(dtype)


def test_joining_promotes_and_skips_empties():
    i, f, b, h = torch.ones(2, 3, dtype=torch.long), values(2, 2), torch.ones(2, 1, dtype=torch.bool), \
        values(2, 2, dtype=torch.bfloat16)
    compare(lambda i, f, b, h: (torch.cat([i, f], 1), torch.cat([b, i], -1), torch.cat([h, f]), torch.cat([i, h], 1),
                                torch.cat([torch.empty(0, device=f.device), f]), torch.stack([f, h], -1)), i, f, b, h)
    compare(lambda f: (torch.block_diag(f, f[0], f[0, 0]), torch.hstack([f, f]), torch.vstack([f, f]),
                       torch.column_stack([f, f[0]])), f)
    with pytest.raises(RuntimeError, match="Sizes of tensors must match"):
        torch.cat([f.to("tpu"), torch.zeros(2, 3, device="tpu")])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_rearranging(dtype):
    x = values(2, 4, 6, dtype=dtype)
    compare(lambda x: (x.repeat(2, 1, 3, 1), x.tile(2), x.repeat(1, 0, 1), x.roll(2), x.roll((1, -2), (0, 2)),
                       x.flip(0, -1), x.rot90(1, (1, 2)), x.rot90(3, (0, 2))), x)
    compare(lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x, 2), F.channel_shuffle(x, 2)),
            values(1, 4, 2, 6, dtype=dtype))
    compare(lambda x: [torch.diag_embed(x, o, 0, -1) for o in (0, 2, -1)], x)


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
def test_padding(mode):
    x = values(2, 3, 6, 7)
    for pad in ((2, 1), (2, 1, 0, 3), (1, 2, 3, 1, 2, 2)):
        if mode == "constant" or 2 * (x.dim() - len(pad) // 2) > 2:
            y = x if mode == "constant" or len(pad) != 2 else x[0]
            compare(lambda y, p=pad: F.pad(y, p, mode=mode), y[None] if len(pad) == 6 and mode != "constant" else y)
    compare_grad(lambda x: F.pad(x, (2, 1, 1, 2), mode=mode) ** 2, x)


def test_negative_padding_crops():
    compare(lambda x: (F.pad(x, (-1, 2, 1, -2), value=4), F.pad(x, (-1, 2, 1, -2), mode="reflect")), values(2, 3, 6, 7))


def test_patches():
    x = values(2, 3, 6, 7)
    uneven = {"kernel_size": (2, 3), "dilation": (1, 2), "padding": (1, 2), "stride": (2, 1)}
    for options in ({"kernel_size": 2}, uneven):
        compare(lambda x, o=options: F.unfold(x, **o), x)
    compare_grad(lambda x: F.fold(F.unfold(x, 3, padding=1), (6, 7), 3, padding=1) ** 2, x)


def test_pieces_of_composites():
    compare(lambda x: (torch.meshgrid(x[0], x[:, 0], indexing="ij"), torch.combinations(x[0], 2),
                       torch.kron(x, x), torch.cartesian_prod(x[0], x[1]), x.trace(), x.diag()), values(3, 4))


def test_strides_are_the_cpus():
    def run(x):
        y = torch.arange(24.0, device=x.device).view(4, 3, 2).transpose(1, 2)
        return (x + 1, x.clone(), x.contiguous(), x + y, y + x, x.to(torch.int64), x[1:] + 1, x[:, :, ::2] * 2,
                x.clamp(1), torch.empty_like(x).fill_(1), torch.where(x > 3, x, y), x[:, :1].expand(4, 3, 3).clone())

    x = torch.arange(24.0).view(2, 3, 4).permute(2, 0, 1)
    for w, g in zip(run(x), run(x.to("tpu"))):
        assert g.stride() == w.stride()


@pytest.mark.parametrize("form", [torch.channels_last, torch.channels_last_3d])
def test_memory_formats(form):
    shape = (2, 3, 4, 5) if form == torch.channels_last else (2, 3, 2, 4, 5)

    def run(x):
        y = x.contiguous(memory_format=form)
        y[:, 1] = 2
        return (y, y.clone(), y.clone(memory_format=torch.contiguous_format), y.contiguous(), y + 1,
                y.to(torch.bfloat16), torch.zeros_like(y), y.relu(), y * x, y.sum(1), y[:, 1:] + 1)

    x = values(*shape)
    for w, g in zip(run(x.clone()), run(x.to("tpu"))):
        assert g.stride() == w.stride()
        torch.testing.assert_close(g.cpu(), w)
