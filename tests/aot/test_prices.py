"""What slices cost, and pictures of reports; reports are made up, nothing is compiled."""

import pytest

from torch_tpu.aot import plot, prices
from torch_tpu.aot.report import Report

GIB = 2**30


def report(topology, program="decode", fits=True, tokens_s=1000.0):
    made = dict(name=f"Model {program}", topology=topology, fits=fits, problem="" if fits else "it needs 20 GiB",
                hbm=16 * GIB, argument_bytes=10 * GIB, trace_s=1.0, compile_s=1.0, largest=(),
                parts={"weights": 9 * GIB, "keys and values": GIB}, compiler_bytes=0, lacking="" if fits else "HBM")
    if fits:
        made.update(peak_bytes=11 * GIB, flops=1e10, hbm_traffic=10**10, step_s=0.01, tokens_s=tokens_s)
    return Report(**made)


def test_the_cheapest():
    reports = [report("v5e-1", fits=False), report("v5e-4"), report("v6e-1", tokens_s=2000.0)]
    lines = prices.summary(reports, prices.given([""]))
    assert lines[1].split() == ["decode", "v5e-1", "NO", "1.20", "-"]
    assert lines[2].split() == ["decode", "v5e-4", "yes", "4.80", "1.333"]  # 4.8 / 3600 s / 1000 tokens/s * 1e6
    assert lines[4:] == ["\nthe cheapest that fits: v6e-1, 2.70 $ an hour",
                         "the cheapest for decode: v6e-1, 0.375 $ a million tokens"]


def test_prices_of_the_user():
    given = prices.given(["v5e=1,v7x=9", "v6e=2"])
    assert given["v5e"] == 1 and given["v6e"] == 2 and given["v4"] == prices.LIST["v4"]
    assert prices.cost(report("v7x-1"), given).hour == 4.5  # one of a chip's two devices
    assert prices.cost(report("v7x-4"), given).hour == 36
    assert prices.cost(report("v7x-1"), prices.LIST) is None
    for wrong in ("v5e", "v9=1", "v5e=cheap", "v5e=-1", "v5e=nan"):
        with pytest.raises(ValueError, match=r"as in --price v5e=1\.2"):
            prices.given([wrong])


def test_where_nothing_fits_or_has_a_price():
    assert prices.summary([report("v5e-1", fits=False)], prices.LIST)[-1] == "\nnone of these fits"
    lines = prices.summary([report("v7x-1")], prices.LIST)
    assert "no list price" in lines[1] and lines[-1] == "\nnone of these fits, or has a price"


def test_one_slice_must_fit_all_programs():
    reports = [report("v5e-1", "prefill", fits=False), report("v5e-1"), report("v6e-1", "prefill"), report("v6e-1")]
    assert "\nthe cheapest that fits: v6e-1, 2.70 $ an hour" in prices.summary(reports, prices.LIST)


@pytest.mark.parametrize("suffix, begin", [(".svg", b"<?xml"), (".png", b"\x89PNG")])
def test_plot(tmp_path, suffix, begin):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed: pip install 'torch_tpu[plot]'")
    path = plot.need(str(tmp_path / f"report{suffix}"))
    plot.draw([report("v5e-4"), report("v6e-1", "prefill"), report("v5e-1", fits=False)], "a model", path)
    assert path.read_bytes().startswith(begin)
    plot.draw([report("v5e-1", fits=False)], "only what does not fit", path)


def test_wrong_plots(tmp_path, monkeypatch):
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"pip install 'torch_tpu\[plot\]'"):
        plot.need("report.svg")
    monkeypatch.setattr(plot.importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ValueError, match=r"end in \.svg or \.png"):
        plot.need("report.pdf")
    with pytest.raises(ValueError, match="there is no folder"):
        plot.need(str(tmp_path / "none" / "report.svg"))
