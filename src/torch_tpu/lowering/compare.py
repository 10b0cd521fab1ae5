"""Comparisons, logic and bits."""

from __future__ import annotations
