"""What is read from optimised HLO, on texts whose numbers can be counted by hand."""

import re

import pytest

from torch_tpu.aot import hlo

PROGRAM = """HloModule jit_f, is_scheduled=true

%update (p0: bf16[2048,64], p1: bf16[8,64], p2: s32[]) -> bf16[2048,64] {
  %p0 = bf16[2048,64]{1,0:T(8,128)(2,1)} parameter(0)
  %p1 = bf16[8,64]{1,0:T(8,128)(2,1)} parameter(1)
  %p2 = s32[]{:T(128)} parameter(2)
  %zero = s32[]{:T(128)} constant(0)
  ROOT %u = bf16[2048,64]{1,0:T(8,128)(2,1)} dynamic-update-slice(%p0, %p1, %p2, %zero)
}

%rows (q0: bf16[50000,64], q1: s32[8]) -> bf16[8,64] {
  %q0 = bf16[50000,64]{1,0:T(8,128)(2,1)} parameter(0)
  %q1 = s32[8]{0:T(128)} parameter(1)
  ROOT %g = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} gather(%q0, %q1), offset_dims={1}, slice_sizes={1,64}
}

%body (t: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %t = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%t), index=0
  %x = f32[8,128]{1,0:T(8,128)} get-tuple-element(%t), index=1
  %y = f32[8,128]{1,0:T(8,128)} add(%x, %x)
  ROOT %r = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%i, %y)
}

ENTRY %main (a: bf16[2048,64], b: bf16[50000,64], c: s32[8], d: s32[], e: f32[8,128]) -> (bf16[2048,64], f32[8,128]) {
  %a = bf16[2048,64]{1,0:T(8,128)(2,1)} parameter(0)
  %b = bf16[50000,64]{1,0:T(8,128)(2,1)} parameter(1)
  %c = s32[8]{0:T(128)} parameter(2)
  %d = s32[]{:T(128)} parameter(3)
  %e = f32[8,128]{1,0:T(8,128)} parameter(4)
  %taken = bf16[8,64]{1,0:T(8,128)(2,1)S(1)} fusion(%b, %c), kind=kLoop, calls=%rows, CYCLES(100)
  %new = bf16[2048,64]{1,0:T(8,128)(2,1)} fusion(%a, %taken, %d), kind=kLoop, calls=%update, CYCLES(11)
  %begun = (f32[8,128]{1,0:T(8,128)S(1)}, f32[8,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%e)
  %near = f32[8,128]{1,0:T(8,128)S(1)} copy-done(%begun)
  %pair = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) tuple(%d, %e)
  %loop = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) while(%pair), condition=%never, body=%body, TURNS(5)
  %last = f32[8,128]{1,0:T(8,128)} get-tuple-element(%loop), index=1
  ROOT %out = (bf16[2048,64]{1,0:T(8,128)(2,1)}, f32[8,128]{1,0:T(8,128)}) tuple(%new, %last)
}
"""
PROGRAM = re.sub(r"CYCLES\((\d+)\)", r'backend_config={"estimated_cycles":"\1"}', PROGRAM)
PROGRAM = re.sub(r"TURNS\((\d+)\)", r'backend_config={"known_trip_count":{"n":"\1"}}', PROGRAM)


def test_traffic_counts_what_is_taken_and_written():
    module = hlo.Module(PROGRAM)
    row, index, tile = 8 * 64 * 2, 8 * 4, 8 * 128 * 4
    gathered = row + index  # to the chip, so nothing is written
    updated = 4 + row  # in place: rows come from the chip, the position from HBM
    prefetched = tile
    looped = 5 * 2 * tile
    assert module.traffic() == gathered + updated + prefetched + looped


def test_cycles_and_fusions():
    module = hlo.Module(PROGRAM)
    assert module.cycles() == 111
    assert module.fusions() == 2


TEMPORARIES = """ENTRY %main (a: f32[1000,128]) -> f32[8,128] {
  %a = f32[1000,128]{1,0:T(8,128)} parameter(0), metadata={op_name="arrays[0]"}
  %begun = (f32[1000,128]{1,0:T(8,128)S(1)}, f32[1000,128]{1,0:T(8,128)}, u32[]{:S(2)}) copy-start(%a)
  %near = f32[1000,128]{1,0:T(8,128)S(1)} copy-done(%begun)
  %one = f32[1001,100]{1,0:T(8,128)} dot(%near, %a), metadata={op_name="jit(program)/model.layers.0.mlp/dot_general"}
  %two = f32[1001,100]{1,0:T(8,128)} dot(%one, %a), metadata={op_name="jit(program)/model.layers.17.mlp/dot_general"}
  %copied = f32[500,128]{1,0:T(8,128)} copy(%two)
  %near2 = f32[8,128]{1,0:T(8,128)S(1)} add(%one, %two), metadata={op_name="jit(program)/jit(_where)/add"}
  ROOT %out = f32[8,128]{1,0:T(8,128)} add(%near2, %near2), metadata={op_name="jit(program)/model.norm/add"}
}
"""


def test_temporaries_have_the_names_of_modules():
    module = hlo.Module(TEMPORARIES, ["model.embed.weight"])
    assert module.temporaries() == [
        hlo.Temporary("model.layers.*.mlp", "dot_general", "f32", (1001, 100), 1008 * 128 * 4, 2),
        hlo.Temporary("model.layers.*.mlp", "copy", "f32", (500, 128), 504 * 128 * 4, 1)]
    traffic = module.traffic_of_modules()
    assert sum(traffic.values()) == module.traffic()
    assert list(traffic) == ["model.layers.*.mlp", "", "model.embed", "model.norm"]
    assert traffic["model.embed"] == 1000 * 128 * 4 and traffic["model.norm"] == 8 * 128 * 4


@pytest.mark.parametrize("text, nbytes, padded", [
    ("bf16[8,64]{1,0:T(8,128)(2,1)}", 1024, 2048),
    ("bf16[8,64]{0,1:T(8,128)(2,1)}", 1024, 64 * 128 * 2),
    ("f32[3]{0:T(128)}", 12, 512),
    ("pred[7]{0}", 7, 7),
    ("s4[10]{0}", 5, 5),
    ("f8e4m3fn[16]{0}", 16, 16),
    ("s32[]", 4, 4)])
def test_sizes(text, nbytes, padded):
    shape, = hlo.shapes(text)
    assert (shape.nbytes(), shape.padded()) == (nbytes, padded)


@pytest.mark.parametrize("line", [
    "  %sent = (f32[8,128]{1,0}, u32[], token[]) send(%e, %token), channel_id=1",
    "  %away = f32[8,128]{1,0:T(8,128)S(5)} copy(%e)"])
def test_transfers_to_the_host_are_found(line):
    assert not hlo.Module(PROGRAM).host_transfers()
    module = hlo.Module(PROGRAM.replace("  %pair =", f"{line}\n  %pair ="))
    assert len(module.host_transfers()) == 1


def test_what_is_not_hlo_is_an_error():
    with pytest.raises(ValueError, match="HLO is not understood"):
        hlo.Module(PROGRAM.replace("add(%x, %x)", "add(%x, %x"))
