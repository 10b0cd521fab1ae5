"""The wheel of torchvision on PyPI is built for torch with CUDA. Beside a CPU torch its operators are missing, and
it does not import. The libraries tested here import it and use none of them: import this module before them."""

from __future__ import annotations

import importlib.util

import torch

if importlib.util.find_spec("torchvision") is not None and torch.version.cuda is None:
    for _name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{_name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
