"""View operators, for compiled graphs (eager tensors share storage instead)."""

from __future__ import annotations
