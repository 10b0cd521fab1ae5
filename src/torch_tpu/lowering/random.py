"""Samplers over JAX's counter-based generator."""

from __future__ import annotations
