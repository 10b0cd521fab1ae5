"""Embedding tables."""

from __future__ import annotations
