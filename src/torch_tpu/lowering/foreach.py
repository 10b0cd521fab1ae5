"""Operators over lists of tensors."""

from __future__ import annotations
