"""Sorting, searching, counting."""

from __future__ import annotations
