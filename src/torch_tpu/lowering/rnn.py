"""Recurrent cells and layers."""

from __future__ import annotations
