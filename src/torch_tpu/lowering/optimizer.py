"""Fused optimizer steps."""

from __future__ import annotations
