"""torch.compile(backend="tpu"): values, mutation, views, options, recompilation."""

from __future__ import annotations

import warnings

import pytest
import torch

from conftest import compare


@pytest.fixture(autouse=True)
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return len(torch.tpu.compiler.stats().graphs)


def test_values_equal_eager():
    def f(x, y):
        z = torch.nn.functional.gelu(x @ y.t()) + x.sum(dim=1, keepdim=True)
        return z.softmax(-1), z.argmax(-1)

    compiled = torch.compile(f, backend="tpu", fullgraph=True)
    x, y = torch.randn(5, 7), torch.randn(4, 7)
    for w, g in zip(f(x, y), compiled(x.to("tpu"), y.to("tpu"))):
        assert g.device.type == "tpu"
        torch.testing.assert_close(g.cpu(), w, rtol=1e-5, atol=1e-6)


def test_default_backend_on_device_tensors_is_tpu():
    before = graphs()
    out = torch.compile(lambda x: x.sin() + 1)(torch.ones(3).to("tpu"))
    assert graphs() == before + 1
    torch.testing.assert_close(out.cpu(), torch.ones(3).sin() + 1)


def test_mutated_input_keeps_its_identity_and_memory():
    def f(cache, value, at):
        cache.index_copy_(1, at, value)
        return cache.sum()

    compiled = torch.compile(f, backend="tpu", fullgraph=True)
    cache = torch.zeros(2, 8, 3).to("tpu")
    pointer = cache.data_ptr()
    for step in range(3):
        total = compiled(cache, torch.full((2, 1, 3), step + 1.0).to("tpu"), torch.tensor([step]).to("tpu"))
    assert cache.data_ptr() == pointer
    assert cache[0, :, 0].tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert total.item() == 2 * 3 * 6
    assert graphs() >= 1


def test_view_input_is_written_through_to_its_base():
    base = torch.zeros(4, 3).to("tpu")

    @torch.compile(backend="tpu", fullgraph=True)
    def f(row):
        row.add_(1)
        return row * 2

    for i in (1, 3):
        f(base[i])
    assert base.cpu().tolist() == [[0] * 3, [1] * 3, [0] * 3, [1] * 3]


def test_offset_of_a_view_is_not_a_new_graph_in_dynamo():
    base = torch.arange(12.0).view(4, 3).to("tpu")
    f = torch.compile(lambda row: row * 2, backend="tpu")
    for i in range(4):
        assert f(base[i]).tolist() == (torch.arange(12.0).view(4, 3)[i] * 2).tolist()


def test_second_call_compiles_nothing():
    f = torch.compile(lambda x: (x * x).sum(), backend="tpu")
    x = torch.ones(9).to("tpu")
    f(x)
    before = torch.tpu.compiler.stats()
    f(x + 1)
    f(x + 2)
    after = torch.tpu.compiler.stats()
    assert len(after.graphs) == len(before.graphs)


def test_dynamic_shapes_stay_right():
    f = torch.compile(lambda x: x.cumsum(0) / x.shape[0], backend="tpu", dynamic=True)
    for n in (3, 5, 8):
        x = torch.arange(float(n))
        torch.testing.assert_close(f(x.to("tpu")).cpu(), x.cumsum(0) / n)


def test_training_step_equals_eager():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.GELU(), torch.nn.LayerNorm(8), torch.nn.Linear(8, 3))
    x, y = torch.randn(4, 6), torch.tensor([0, 2, 1, 1])

    def step(model, x, y):
        model.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x), y)
        loss.backward()
        return loss.detach(), [p.grad for p in model.parameters()]

    want_loss, want = step(model, x, y)
    want = [g.clone() for g in want]
    device_model = torch.compile(model.to("tpu"), backend="tpu", fullgraph=True)
    loss, got = step(device_model, x.to("tpu"), y.to("tpu"))
    torch.testing.assert_close(loss.cpu(), want_loss)
    for g, w in zip(got, want):
        torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-5)


def test_random_operators_differ_from_call_to_call_and_follow_the_seed():
    f = torch.compile(lambda x: torch.nn.functional.dropout(x, 0.5, training=True), backend="tpu")
    x = torch.ones(64).to("tpu")
    torch.manual_seed(5)
    first, second = f(x).cpu(), f(x).cpu()
    torch.manual_seed(5)
    assert torch.equal(f(x).cpu(), first)
    assert not torch.equal(first, second)


def test_unsupported_operator_is_run_between_pieces_and_said():
    x = torch.randn(4, 4)
    f = torch.compile(lambda x: torch.linalg.eigvals(x + 1).abs().sort()[0] * 2, backend="tpu")
    with pytest.warns(RuntimeWarning):
        got = f(x.to("tpu"))
    torch.testing.assert_close(got.cpu(), torch.linalg.eigvals(x + 1).abs().sort()[0] * 2, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kwargs", [{"options": {"no_such_option": 1}}, {"mode": "no-such-mode"},
                                    {"options": {"donate": "yes"}}])
def test_wrong_option_is_an_error_that_names_it(kwargs):
    f = torch.compile(lambda x: x + 1, backend="tpu", **kwargs)
    with pytest.raises(Exception, match="CompileOptionError"):
        f(torch.ones(2).to("tpu"))
    assert (torch.ones(2).to("tpu") + 1).tolist() == [2, 2]


@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune"])
def test_modes_are_accepted(mode):
    f = torch.compile(lambda x: x + 1, backend="tpu", mode=mode)
    assert f(torch.ones(2).to("tpu")).tolist() == [2, 2]


def test_cpu_graphs_are_untouched():
    f = torch.compile(lambda x: x + 1, backend="eager")
    assert f(torch.ones(2)).device.type == "cpu"


def test_chain_of_views_equals_eager():
    def f(x):
        a = x.view(2, 3, 4).permute(2, 0, 1)[1:, :, ::2]
        b = x.reshape(4, 6).t().unsqueeze(1).expand(6, 2, 4)
        return a.contiguous(), b.flatten(1), torch.cat([a.flatten(), x[3:5]]), x.as_strided((3, 2), (2, 5), 1)

    compare(lambda x: torch.compile(f, backend="tpu" if x.device.type == "tpu" else "eager")(x), torch.arange(24.0))


def test_cpu_tensor_that_a_graph_mutates_is_written_back():
    step = torch.zeros(())

    def f(x, step):
        step.add_(1)
        return x * step

    compiled = torch.compile(f, backend="tpu")
    for expected in (1, 2, 3):
        assert compiled(torch.ones(2).to("tpu"), step).tolist() == [expected] * 2
        assert step.item() == expected


def test_outputs_that_are_windows_on_another_output_alias_it():
    def f(x):
        y = x * 2
        return y, y.t(), y[0], x.view(-1)

    x = torch.arange(6.0).view(2, 3).to("tpu")
    y, transposed, row, flat = torch.compile(f, backend="tpu")(x)
    y[0, 1] = -1
    flat[5] = 9
    assert transposed[1, 0].item() == -1 and row[1].item() == -1
    assert x[1, 2].item() == 9


def test_compiled_optimizer_step_equals_eager():
    torch.manual_seed(0)
    start = torch.nn.Linear(4, 3)
    x = torch.randn(5, 4)
    weights = []
    for device in ("cpu", "tpu"):
        model = torch.nn.Linear(4, 3)
        model.load_state_dict(start.state_dict())
        model.to(device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.02, device=device))

        def step(batch, model=model, optimizer=optimizer):
            loss = model(batch).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        run = torch.compile(step, backend="tpu") if device == "tpu" else step
        for _ in range(4):
            run(x.to(device))
        weights.append(model.weight.detach().cpu())
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-4, atol=1e-5)


def test_numbers_that_change_are_inputs_of_one_graph():
    """Dynamo passes a float that changed as a 0-d tensor, converted by an operator of `prims`."""
    compiled = torch.compile(lambda x, scale: (x * scale).sum(-1), backend="tpu")
    x = torch.randn(3, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)
        for scale in (2.0, 0.5, 3.25):
            torch.testing.assert_close(compiled(x.to("tpu"), scale).cpu(), (x * scale).sum(-1))


def test_checkpointing_replays_the_dropout_inside_compiled_graphs():
    from torch import nn
    from torch.utils.checkpoint import checkpoint

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 8))
                                        for _ in range(2))

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return x

    torch.manual_seed(0)
    model = Model().to("tpu")
    x = torch.randn(4, 8).to("tpu")

    def step(fn):
        torch.manual_seed(5)
        model.zero_grad()
        y = fn(x)
        y.square().sum().backward()
        return [y.detach().cpu(), *(p.grad.cpu() for p in model.parameters())]

    eager = step(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", RuntimeWarning)  # a graph that is cut says so
        compiled = torch.compile(model, backend="tpu")
        for _ in range(2):
            for a, b in zip(step(compiled), eager):
                torch.testing.assert_close(a, b)


def test_precision_of_one_function(tmp_path):
    x = torch.randn(8, 8, device="tpu")
    texts = {}
    for name in ("highest", "medium"):
        torch._dynamo.reset()
        torch.tpu.compiler.dump(tmp_path / name)
        try:
            torch.compile(lambda x: x @ x, backend="tpu", options={"precision": name})(x)
        finally:
            torch.tpu.compiler.dump(None)
        texts[name] = next((tmp_path / name).glob("*.stablehlo.mlir")).read_text()
    assert "precision = [HIGHEST, HIGHEST]" in texts["highest"] and "HIGHEST" not in texts["medium"]
    assert torch.get_float32_matmul_precision() == "highest"
    with pytest.raises(Exception, match="'precision' is 'low'; it is one of highest, high, medium"):
        torch.compile(lambda x: x + 1, backend="tpu", options={"precision": "low"})(x)
