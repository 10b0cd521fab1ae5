"""Pooling and its gradients."""

from __future__ import annotations
