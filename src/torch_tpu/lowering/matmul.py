"""Matrix products."""

from __future__ import annotations
