"""Scaled dot product attention, whole."""

from __future__ import annotations
