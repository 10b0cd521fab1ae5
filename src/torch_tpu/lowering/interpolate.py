"""Resampling of images and signals."""

from __future__ import annotations
