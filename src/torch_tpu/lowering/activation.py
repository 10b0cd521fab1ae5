"""Activation functions and their gradients."""

from __future__ import annotations
