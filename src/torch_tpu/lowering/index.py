"""Reading by index."""

from __future__ import annotations
