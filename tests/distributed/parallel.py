"""What the scripts of parallel training share: a small GPT, its training in one process on the CPU, and checks that
run one after another in the same processes."""

import copy
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

RANK, WORLD = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
WIDTH, TOKENS = 16, 31
Check = Callable[[], None]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        # No bias on the keys: its gradient is zero but for rounding, which Adam makes large.
        self.norm1, self.qkv = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out, self.norm2 = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        heads = (t.view(batch, length, 2, -1).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True).transpose(1, 2).reshape(batch, length, width)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(TOKENS, WIDTH), nn.Parameter(torch.randn(8, WIDTH) / 50)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, ids: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        x = self.tokens(ids) + self.places[:ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        x = self.head(self.norm(x))
        return x if targets is None else F.cross_entropy(x.flatten(0, 1).float(), targets.flatten())


torch.manual_seed(0)
BASE = GPT()
BATCHES = [torch.randint(0, TOKENS, (8, 9)) for _ in range(20)]


def adam(parameters: Any, **settings: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, 1e-2, **settings)


def fresh() -> GPT:
    return copy.deepcopy(BASE).to("tpu")


@functools.cache
def reference(steps: int, clip: float | None = None) -> tuple[GPT, list[float]]:
    """The model and the losses after training in one process."""
    model = copy.deepcopy(BASE)
    optimizer = adam(model.parameters())
    losses = []
    for batch in BATCHES[:steps]:
        loss = model(batch[:, :-1], batch[:, 1:])
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return model, losses


def share(batch: torch.Tensor, parts: int = WORLD, part: int = RANK) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's inputs and targets."""
    mine = batch.chunk(parts)[part].to("tpu")
    return mine[:, :-1], mine[:, 1:]


def train(model: nn.Module, steps: int, clip: float | None = None, optimizer: Any = adam, parts: int = WORLD,
          part: int = RANK) -> list[float]:
    """The losses of training on this rank's shares."""
    made = optimizer(model.parameters())
    losses = []
    for batch in BATCHES[:steps]:
        loss = model(*share(batch, parts, part))
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        made.step()
        made.zero_grad()
        losses.append(loss.item())
    return losses


def close(got: Any, want: torch.Tensor, what: str = "", atol: float = 1e-4, rtol: float = 1e-3) -> None:
    got = got.full_tensor() if hasattr(got, "full_tensor") else got
    torch.testing.assert_close(got.detach().cpu(), want.detach().cpu(), rtol=rtol, atol=atol,
                               msg=lambda text: f"rank {RANK} {what}: {text}")


def as_one_process(model: nn.Module, steps: int, clip: float | None = None, atol: float = 1e-4) -> None:
    for (name, got), want in zip(model.named_parameters(), reference(steps, clip)[0].parameters(), strict=True):
        close(got, want, name, atol)


def same_gradients(model: nn.Module, one: nn.Module) -> None:
    for (name, got), want in zip(model.named_parameters(), one.parameters(), strict=True):
        close(got.grad, want.grad, name)


def run(*checks: Check) -> None:
    """Runs the checks; the name of each and its seconds are printed."""
    dist.init_process_group()
    for check in checks:
        begin = time.perf_counter()
        check()
        if RANK == 0:
            print(f"{check.__name__} {time.perf_counter() - begin:.1f} s", flush=True)
    dist.destroy_process_group()
