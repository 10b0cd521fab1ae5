"""torch.tpu.compile_step: values against CPU PyTorch, what compiles again and what does not, memory, errors."""

from __future__ import annotations

import copy
import gc
import io
import warnings

import pytest
import torch
import torch.nn.functional as F

from torch_tpu.runtime.errors import CaptureError

nn = torch.nn
pytestmark = pytest.mark.usefixtures("no_fallback")


class Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x):
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(batch, length, width))


class Gpt(nn.Module):
    def __init__(self, words: int = 17, width: int = 16, depth: int = 2, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        self.position = nn.Parameter(torch.randn(12, width) * 0.1)
        self.blocks = nn.ModuleList(
            nn.Sequential(Attention(width, 2), nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.GELU(),
                          nn.Dropout(dropout), nn.Linear(2 * width, width)) for _ in range(depth))
        self.head = nn.Linear(width, words, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids):
        x = self.embedding(ids) + self.position[:ids.shape[1]]
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def conv_net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
                         nn.Linear(6 * 16, 5))


def small() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def batches(kind: str, count: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    if kind == "gpt":
        ids = [torch.randint(0, 17, (2, 11), generator=generator) for _ in range(count)]
        return [(i[:, :-1].contiguous(), i[:, 1:].contiguous()) for i in ids]
    shape, classes = ((4, 3, 8, 8), 5) if kind == "conv" else ((4, 6), 3)
    return [(torch.randn(shape, generator=generator), torch.randint(0, classes, (4,), generator=generator))
            for _ in range(count)]


MODELS = {"gpt": Gpt, "conv": conv_net, "small": small}


def model_of(kind: str, device: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[kind]().to(device)


def train(kind: str, device: str, make, *, compiled: bool = False, steps: int = 20, clip: float | None = None,
          schedule=None, wrap=None, before=None):
    """Losses, the model and the step after some steps."""
    model = model_of(kind, device)
    optimizer = make(model.parameters())
    scheduler = schedule(optimizer) if schedule else None

    def step(x, y):
        logits = model(x)
        loss = F.cross_entropy(logits.flatten(0, -2), y.flatten())
        loss.backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    run = torch.tpu.compile_step(step) if compiled else step
    losses = []
    for x, y in batches(kind, steps):
        losses.append(run(x.to(device), y.to(device)).item())
        if scheduler is not None:
            scheduler.step()
    return losses, model, optimizer, run


def close(got: nn.Module, want: nn.Module, rtol: float = 2e-4, atol: float = 2e-5) -> None:
    for (name, w), g in zip(want.state_dict().items(), got.state_dict().values()):
        torch.testing.assert_close(g.cpu(), w.cpu(), rtol=rtol, atol=atol, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("kind", ["gpt", "conv"])
def test_twenty_steps_equal_cpu_and_eager(kind):
    def make(p):
        return torch.optim.AdamW(p, lr=2e-3, eps=1e-4)

    want, on_cpu, *_ = train(kind, "cpu", make, clip=1.0)
    eager, on_tpu, *_ = train(kind, "tpu", make, clip=1.0)
    got, model, _, step = train(kind, "tpu", make, compiled=True, clip=1.0)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-5)
    close(model, on_cpu)
    close(model, on_tpu)
    assert (step.compiles, step.captures) == (1, 2)  # the second capture finds the optimizer's state


OPTIMIZERS = {
    "adamw foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4),
    "adamw fused": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, fused=True),
    "adamw one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, eps=1e-4, foreach=False),
    "adam amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, eps=1e-4, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
    "sgd momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=1e-2),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, lr_decay=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-2, momentum=0.5, centered=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-2),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-2),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-2),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_follow_a_schedule_without_compiling_again(name):
    def schedule(optimizer):
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)

    want, on_cpu, *_ = train("small", "cpu", OPTIMIZERS[name], steps=7, schedule=schedule)
    got, model, _, step = train("small", "tpu", OPTIMIZERS[name], compiled=True, steps=7, schedule=schedule)
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    close(model, on_cpu)
    assert step.compiles <= 2 and step.captures <= 3, (step.compiles, step.captures)


def test_tensor_learning_rate():
    losses = []
    for device in ("cpu", "tpu"):
        model = model_of("small", device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1, device=device), eps=1e-4,
                                      foreach=device == "tpu", capturable=device == "tpu")

        def step(x, y, model=model, optimizer=optimizer):
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = torch.tpu.compile_step(step) if device == "tpu" else step
        values = []
        for x, y in batches("small", 5):
            values.append(run(x.to(device), y.to(device)).item())
            optimizer.param_groups[0]["lr"].mul_(0.5)
        losses.append(values)
    torch.testing.assert_close(losses[1], losses[0], rtol=1e-4, atol=1e-5)
    assert run.compiles == 1


def test_memory_is_updated_in_place():
    """No second copy of parameters and optimizer state: all of them are taken over by the program's outputs."""
    _, model, optimizer, step = train("gpt", "tpu", lambda p: torch.optim.AdamW(p, lr=1e-3), compiled=True, steps=4)
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    state = sum(t.numel() * t.element_size() for s in optimizer.state.values() for t in s.values())
    memory = step.memory()
    assert state > 2 * parameters
    assert memory.alias_size_in_bytes >= parameters + state
    # Outside of what is updated in place: the batch in, the loss out (and XLA's table of outputs).
    assert memory.argument_size_in_bytes - memory.alias_size_in_bytes < 1024
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 4096


def test_parameters_stay_ordinary():
    model = model_of("small", "tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step = torch.tpu.compile_step(model, optimizer=optimizer, loss=F.cross_entropy)
    pointers = [p.data_ptr() for p in model.parameters()]
    identities = [id(p) for p in model.parameters()]
    (x, y), = batches("small", 1)
    seen = []
    for _ in range(3):
        step(x, y)  # CPU tensors are moved
        seen.append(model[0].weight.detach().cpu().clone())
    assert not torch.equal(seen[1], seen[2])
    assert [p.data_ptr() for p in model.parameters()] == pointers
    assert [id(p) for p in model.parameters()] == identities
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu")
    assert torch.equal(loaded["model"]["0.weight"], seen[2])
    assert loaded["optimizer"]["state"][0]["step"].item() == 3
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    assert torch.equal(model[0].weight.detach().cpu(), seen[2])
    step(x, y)
    assert optimizer.state_dict()["state"][0]["step"].item() == 4
    assert step.compiles == 1


def test_first_call_updates_once():
    model = model_of("small", "tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    reference = copy.deepcopy(model).cpu()
    (x, y), = batches("small", 1)
    torch.tpu.compile_step(model, optimizer=optimizer, loss=F.cross_entropy)(x.to("tpu"), y.to("tpu"))
    F.cross_entropy(reference(x), y).backward()
    with torch.no_grad():
        for p in reference.parameters():
            p -= 0.5 * p.grad
    close(model, reference)


def test_another_shape_compiles_again_and_says_so():
    model = model_of("small", "tpu")
    step = torch.tpu.compile_step(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss=F.cross_entropy)
    x, y = torch.randn(4, 6), torch.zeros(4, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step(x, y)
        step(x, y)
    with pytest.warns(RuntimeWarning, match=r"compiled again.*\[2, 6\].*\[4, 6\]"):
        step(x[:2], y[:2])
    assert step.compiles == 2
    step(x, y)
    step(x[:2], y[:2])
    assert step.compiles == 2


def test_train_and_eval_are_two_programs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).to("tpu")
    step = torch.tpu.compile_step(lambda x: model(x).sum())
    x = torch.randn(8, 4).to("tpu")
    step(x)
    assert model[1].num_batches_tracked.item() == 1
    model.eval()
    with pytest.warns(RuntimeWarning, match="training changed"):
        got = step(x)
    torch.testing.assert_close(got, model(x).sum().detach())
    assert model[1].num_batches_tracked.item() == 1
    assert not got.requires_grad


def test_dropout_draws_what_eager_mode_draws():
    def losses(compiled):
        torch.manual_seed(0)
        model = Gpt(dropout=0.3).to("tpu")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

        def step(x, y):
            loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = torch.tpu.compile_step(step) if compiled else step
        (x, y), = batches("gpt", 1)
        x, y = x.to("tpu"), y.to("tpu")
        torch.manual_seed(7)
        return [run(x, y).item() for _ in range(4)], torch.tpu.get_rng_state()

    (want, want_state), (got, state) = losses(False), losses(True)
    assert len(set(got)) == 4
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)
    assert torch.equal(state, want_state)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_replays_dropout(reentrant):
    from torch.utils.checkpoint import checkpoint

    def run(compiled, save_memory):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(5, 5), nn.Dropout(0.5), nn.Tanh(), nn.Linear(5, 5)).to("tpu")

        def step(x):
            x.requires_grad_()
            y = checkpoint(model, x, use_reentrant=reentrant) if save_memory else model(x)
            y.square().sum().backward()
            return [p.grad for p in model.parameters()]

        step_ = torch.tpu.compile_step(step) if compiled else step
        torch.manual_seed(3)
        return [g.cpu() for g in step_(torch.ones(3, 5, device="tpu"))]

    want = run(False, False)
    for got in (run(False, True), run(True, True), run(True, False)):
        torch.testing.assert_close(got, want)


def test_gradient_accumulation():
    results = []
    for device in ("cpu", "tpu"):
        model = model_of("small", device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, eps=1e-4)

        def step(x, y, update, model=model, optimizer=optimizer):
            loss = F.cross_entropy(model(x), y) / 3
            loss.backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
            return loss

        run = torch.tpu.compile_step(step) if device == "tpu" else step
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)
            for number, (x, y) in enumerate(batches("small", 13)):
                run(x.to(device), y.to(device), number % 3 == 2)
        results.append((model, [p.grad for p in model.parameters()]))
    (want, wanted), (got, gotten) = results
    close(got, want)
    for w, g in zip(wanted, gotten):  # one step after the last update
        torch.testing.assert_close(g.cpu(), w, rtol=1e-4, atol=1e-6)
    assert run.compiles == 3  # first micro-batch, further ones, the update


def test_gradients_stay_for_the_user_to_read():
    model = model_of("small", "tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)

    @torch.tpu.compile_step
    def step(x, y):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss

    for x, y in batches("small", 4):
        step(x.to("tpu"), y.to("tpu"))
        got = [p.grad.cpu() for p in model.parameters()]
        want = torch.autograd.grad(F.cross_entropy(model(x.to("tpu")), y.to("tpu")), list(model.parameters()))
        torch.testing.assert_close(got, [g.cpu() for g in want], rtol=1e-5, atol=1e-6)
    assert step.compiles == 1


def test_autocast():
    def make(device, compiled):
        model = model_of("gpt", device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step(x, y):
            with torch.autocast(device, torch.bfloat16):
                loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        run = torch.tpu.compile_step(step) if compiled else step
        return [run(x.to(device), y.to(device)).item() for x, y in batches("gpt", 6)]

    want, got = make("cpu", False), make("tpu", True)
    torch.testing.assert_close(got, want, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(got, make("tpu", False), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("fused", [False, True])
def test_grad_scaler_skips_steps_that_overflow(fused):
    results = []
    for compiled in (False, True):
        model = model_of("small", "tpu")
        optimizer = torch.optim.Adam(model.parameters(), lr=0.05, eps=1e-4, fused=fused)
        scaler = torch.amp.GradScaler("tpu", init_scale=2.0**10, growth_interval=2)

        def step(x, y, model=model, optimizer=optimizer, scaler=scaler):
            loss = F.cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            return loss

        run = torch.tpu.compile_step(step) if compiled else step
        scales = []
        for number, (x, y) in enumerate(batches("small", 8)):
            if number in (3, 4):
                x = x * float("inf")
            run(x.to("tpu"), y.to("tpu"))
            scales.append(scaler.get_scale())
        results.append((scales, model, [s["step"].item() for s in optimizer.state.values()]))
    (want, eager, count), (got, model, counted) = results
    assert got == want and len(set(got)) > 2
    assert counted == count == [6.0] * 4
    close(model, eager)
    assert run.compiles == 1


def test_hooks_run_and_their_effect_is_in_the_program():
    results = []
    for device in ("cpu", "tpu"):
        model = model_of("small", device)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0].weight.register_hook(lambda g: g * 2)

        def clamp(p):
            p.grad.clamp_(-0.05, 0.05)

        for p in model.parameters():
            p.register_post_accumulate_grad_hook(clamp)

        def step(x, y, model=model, optimizer=optimizer):
            F.cross_entropy(model(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()

        run = torch.tpu.compile_step(step) if device == "tpu" else step
        for x, y in batches("small", 3):
            assert run(x.to(device), y.to(device)) is None
        results.append(model)
    close(results[1], results[0])


def test_float_argument_is_an_input_and_an_integer_is_not():
    model = model_of("small", "tpu")
    calls = []

    @torch.tpu.compile_step
    def step(x, factor, times):
        calls.append(times)
        return (model(x) * factor).sum() * times

    x = torch.ones(2, 6, device="tpu")
    base = model(x).sum().item()
    for factor in (0.5, 0.25, 2.0):
        assert step(x, factor, 1).item() == pytest.approx(base * factor, rel=1e-5)
    assert calls == [1]
    with pytest.warns(RuntimeWarning, match="argument 2 is 3, before it was 1"):
        assert step(x, 1.0, 3).item() == pytest.approx(base * 3, rel=1e-5)


def test_closed_over_variable_that_changes():
    weight = torch.ones(3, device="tpu")
    scale = 2

    def step(x):
        return (x * weight * scale).sum()

    run = torch.tpu.compile_step(step)
    x = torch.ones(3, device="tpu")
    assert run(x).item() == 6
    weight.mul_(2)
    assert run(x).item() == 12
    scale = 3
    with pytest.warns(RuntimeWarning, match="variable of the step's function"):
        assert run(x).item() == 18
    weight = torch.zeros(3, device="tpu")
    assert run(x).item() == 0


def test_cpu_batch_moved_inside():
    model = model_of("small", "tpu")

    @torch.tpu.compile_step
    def step(x):
        return model(x[:, :6].to("tpu")).sum()

    for seed in range(3):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(seed))
        torch.testing.assert_close(step(x), model(x[:, :6].to("tpu")).sum().detach())
    assert step.captures == 1


def test_attribute_that_the_step_sets_is_fresh():
    model = model_of("small", "tpu")

    @torch.tpu.compile_step
    def step(x):
        model.seen = x * 2
        return model(x).sum()

    for value in range(5):
        step(torch.full((2, 6), float(value), device="tpu"))
        assert model.seen.tolist() == [[2.0 * value] * 6] * 2
    assert step.compiles == 1 and step.captures == 2


def test_returned_structures_and_windows():
    table = torch.arange(6.0, device="tpu")

    @torch.tpu.compile_step
    def step(x):
        y = x * 2
        table.add_(1)
        return {"y": y, "row": y[0], "column": y.t()[1], "table": table, "note": "text", "same": (x, 3)}

    for _ in range(2):
        x = torch.arange(4.0).view(2, 2).to("tpu")
        out = step(x)
        assert out["row"].tolist() == [0, 2] and out["column"].tolist() == [2, 6] and out["note"] == "text"
        out["y"][0, 1] = -1
        assert out["row"].tolist() == [0, -1]
        assert out["same"][0].data_ptr() == x.data_ptr() and out["table"].data_ptr() == table.data_ptr()
    assert table.tolist() == [2, 3, 4, 5, 6, 7]


def _branch(x):
    return x * 2 if x.sum() > 0 else x


def _item(x):
    return x * 2 if x.sum().item() > 0 else x


def _to_cpu(x):
    return x.cpu() + 1


def _float(x):
    return x * float(x.sum())


def _mask(x):
    return x[x > 0]


def _nonzero(x):
    return x.nonzero()


def _host_random(x):
    return x + torch.rand(3).to("tpu")


def _print(x):
    print(f"{x}")
    return x


def _host_state(x):
    COUNT.add_(1)
    return x * COUNT.to("tpu")


def _no_lowering(x):
    return torch.linalg.eigvals(x.view(1, 3).expand(3, 3)).real


COUNT = torch.zeros(())


@pytest.mark.parametrize("step", [_branch, _item, _to_cpu, _float, _mask, _nonzero, _host_random, _print, _host_state,
                                  _no_lowering])
def test_what_cannot_be_captured_is_an_error_that_says_where(step):
    run = torch.tpu.compile_step(step)
    with pytest.raises(CaptureError) as caught:
        run(torch.ones(3, device="tpu"))
    assert "test_compile_step.py" in str(caught.value) or "Python number" in str(caught.value)
    assert COUNT.item() == 0


def test_failed_capture_leaves_everything_as_it_was():
    model = model_of("small", "tpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    reference = copy.deepcopy(model)
    state = torch.tpu.get_rng_state()

    @torch.tpu.compile_step
    def step(x):
        loss = F.dropout(model(x), 0.5).sum()
        loss.backward()
        optimizer.step()
        model.note = loss
        if loss > 0:
            return loss
        return -loss

    with pytest.raises(CaptureError):
        step(torch.ones(2, 6, device="tpu"))
    close(model, reference, 0, 0)
    assert all(p.grad is None for p in model.parameters())
    assert not optimizer.state and optimizer.param_groups[0]["lr"] == 0.1
    assert torch.equal(torch.tpu.get_rng_state(), state)
    with pytest.raises(RuntimeError):  # never a wrong number
        model.note.item()


def test_scheduler_inside_the_step_is_an_error():
    model = model_of("small", "tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)

    @torch.tpu.compile_step
    def step(x):
        model(x).sum().backward()
        optimizer.step()
        scheduler.step()

    with pytest.raises(CaptureError, match="scheduler"):
        step(torch.ones(2, 6, device="tpu"))


def test_changed_setting_of_the_optimizer_is_seen():
    model = model_of("small", "tpu")
    reference = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, reference)]
    step = torch.tpu.compile_step(model, optimizer=optimizers[0], loss=F.cross_entropy)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for number, (x, y) in enumerate(batches("small", 6)):
            if number == 4:
                for optimizer in optimizers:
                    optimizer.param_groups[0]["momentum"] = 0.1
            step(x.to("tpu"), y.to("tpu"))
            F.cross_entropy(reference(x.to("tpu")), y.to("tpu")).backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
    close(model, reference)


def test_frozen_and_replaced_parameters():
    model = model_of("small", "tpu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.tpu.compile_step(model, optimizer=optimizer, loss=F.cross_entropy)
    (x, y), = batches("small", 1)
    step(x, y)
    model[0].weight.requires_grad_(False)
    kept = model[0].weight.detach().cpu().clone()
    with pytest.warns(RuntimeWarning, match="requires_grad"):
        step(x, y)
    assert torch.equal(model[0].weight.detach().cpu(), kept)
    model[2] = nn.Linear(8, 3).to("tpu")
    before = model[2].weight.detach().cpu().clone()
    reference = copy.deepcopy(model).cpu()
    with pytest.warns(RuntimeWarning, match=r"Sequential\.2"):
        loss = step(x, y)
    torch.testing.assert_close(loss.cpu(), F.cross_entropy(reference(x), y).detach())
    assert torch.equal(model[2].weight.detach().cpu(), before)  # not the optimizer's


def test_the_capture_keeps_nothing_alive():
    model = model_of("gpt", "tpu")
    step = torch.tpu.compile_step(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
                                  loss=lambda o, y: F.cross_entropy(o.flatten(0, 1), y.flatten()))
    (x, y), = batches("gpt", 1)
    step(x, y)
    gc.collect()
    before = torch.tpu.memory_allocated()
    for _ in range(3):
        step(x, y)
    gc.collect()
    assert torch.tpu.memory_allocated() <= before


def test_wrong_use():
    model = model_of("small", "tpu")
    with pytest.raises(TypeError, match="optimizer"):
        torch.tpu.compile_step(model)
    with pytest.raises(TypeError):
        torch.tpu.compile_step(3)
    with pytest.raises(RuntimeError, match="has not run"):
        torch.tpu.compile_step(lambda x: x).memory()


def test_compiled_forward_and_loss_and_compiled_optimizer_step():
    """The parts, each compiled by torch.compile, with a learning rate that changes as a tensor."""
    torch._dynamo.reset()
    weights = []
    for device in ("cpu", "tpu"):
        model = model_of("small", device)
        rate = torch.tensor(0.05, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate, eps=1e-4, capturable=device == "tpu",
                                      foreach=device == "tpu")

        def forward(x, y, model=model):
            return F.cross_entropy(model(x), y)

        update = optimizer.step
        if device == "tpu":
            forward, update = torch.compile(forward), torch.compile(optimizer.step)
        for number, (x, y) in enumerate(batches("small", 5)):
            forward(x.to(device), y.to(device)).backward()
            update()
            optimizer.zero_grad()
            rate.mul_(0.8)
            if number == 2:
                made = len(torch.tpu.compiler.stats().graphs)
        weights.append(model)
    assert len(torch.tpu.compiler.stats().graphs) == made
    close(weights[1], weights[0])
    torch._dynamo.reset()


def test_errors_of_factorisations_and_assertions_are_raised_after_the_step():
    @torch.tpu.compile_step
    def step(a):
        torch._assert_async((a < 100).all(), "too large")
        return torch.linalg.inv(a).sum()

    for scale in (1.0, 2.0):
        assert step(torch.eye(3).to("tpu") * scale).item() == pytest.approx(3 / scale)
    with pytest.raises(torch.linalg.LinAlgError, match="singular"):
        step(torch.zeros(3, 3, device="tpu"))
    with pytest.raises(RuntimeError, match="too large"):
        step(torch.eye(3, device="tpu") * 200)


def test_compiled_model_inside_a_compiled_step():
    torch._dynamo.reset()
    model = model_of("small", "tpu")
    reference = copy.deepcopy(model)
    inner = torch.compile(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = torch.tpu.compile_step(inner, optimizer=optimizer, loss=F.cross_entropy)
    other = torch.optim.SGD(reference.parameters(), lr=0.1)
    for x, y in batches("small", 3):
        step(x, y)
        F.cross_entropy(reference(x.to("tpu")), y.to("tpu")).backward()
        other.step()
        other.zero_grad()
    close(model, reference)


def test_method_as_a_step():
    class Trainer:
        def __init__(self) -> None:
            self.model = model_of("small", "tpu")

        @torch.tpu.compile_step
        def evaluate(self, x):
            with torch.no_grad():
                return self.model(x)

    trainer = Trainer()
    x = torch.ones(2, 6, device="tpu")
    torch.testing.assert_close(trainer.evaluate(x), trainer.model(x).detach())
    torch.testing.assert_close(trainer.evaluate(x * 2), trainer.model(x * 2).detach())


def test_second_optimizer_and_several_losses():
    """A generator and a discriminator, as in a GAN, in one step."""
    results = []
    for device in ("cpu", "tpu"):
        torch.manual_seed(0)
        first, second = nn.Linear(4, 4).to(device), nn.Linear(4, 1).to(device)
        one = torch.optim.Adam(first.parameters(), lr=0.01, eps=1e-4)
        two = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9)

        def step(x, first=first, second=second, one=one, two=two):
            two.zero_grad()
            loss = F.softplus(second(first(x).detach())).mean() + F.softplus(-second(x)).mean()
            loss.backward()
            two.step()
            one.zero_grad()
            other = F.softplus(-second(first(x))).mean()
            other.backward()
            one.step()
            return loss, other

        run = torch.tpu.compile_step(step) if device == "tpu" else step
        generator = torch.Generator().manual_seed(1)
        values = [[v.item() for v in run(torch.randn(8, 4, generator=generator).to(device))] for _ in range(5)]
        results.append((values, first, second))
    torch.testing.assert_close(results[1][0], results[0][0], rtol=1e-4, atol=1e-5)
    close(results[1][1], results[0][1])
    close(results[1][2], results[0][2])


def test_number_in_a_module_that_changes():
    model = nn.Sequential(nn.Linear(6, 50), nn.Dropout(0.0)).to("tpu")
    step = torch.tpu.compile_step(lambda x: model(x))
    x = torch.ones(2, 6, device="tpu")
    assert (step(x) != 0).all()
    model[1].p = 1.0
    with pytest.warns(RuntimeWarning, match=r"Dropout\.p changed"):
        assert (step(x) == 0).all()


def test_random_numbers_of_the_host_are_an_error():
    import random

    @torch.tpu.compile_step
    def step(x):
        return x * random.random()

    with pytest.raises(CaptureError, match="random numbers on the host"):
        step(torch.ones(2, device="tpu"))


def test_module_that_counts_its_calls_is_never_stale():
    class Counting(nn.Module):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x):
            self.calls += 1
            return x * self.calls

    model = Counting()
    step = torch.tpu.compile_step(lambda x: model(x))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert [step(torch.ones((), device="tpu")).item() for _ in range(4)] == [1, 2, 3, 4]


def test_generator_of_the_users():
    def numbers(compiled):
        generator = torch.Generator(device="tpu").manual_seed(3)

        def step(x):
            a = torch.rand(3, generator=generator, device="tpu")
            b = x.bernoulli(0.5)
            return a, b, torch.rand(3, generator=generator, device="tpu"), torch.randn(3, device="tpu")

        run = torch.tpu.compile_step(step) if compiled else step
        torch.manual_seed(1)
        x = torch.ones(5, device="tpu")
        return [[t.cpu() for t in run(x)] for _ in range(3)]

    for want, got in zip(numbers(False), numbers(True)):
        torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)


def test_model_that_leaves_the_device_and_comes_back():
    model = model_of("small", "tpu")
    step = torch.tpu.compile_step(lambda x: model(x))
    x = torch.ones(2, 6, device="tpu")
    want = step(x).cpu()
    model.to("cpu")
    with pytest.raises(RuntimeError, match="same device"):
        step(x)
    model.to("tpu")
    torch.testing.assert_close(step(x).cpu(), want)
    assert step.compiles == 1


def test_statistics_name_the_cause():
    step = torch.tpu.compile_step(lambda x: x * 2, name="doubling")
    step(torch.ones(2, device="tpu"))
    with pytest.warns(RuntimeWarning):
        step(torch.ones(3, device="tpu"))
    first, second = [g for g in torch.tpu.compiler.stats().graphs if g.name == "doubling"]
    assert first.cause == "first call" and "[3]" in second.cause and "[2]" in second.cause
