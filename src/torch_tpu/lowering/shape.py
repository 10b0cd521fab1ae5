"""Joining, padding, repeating, reordering."""

from __future__ import annotations
