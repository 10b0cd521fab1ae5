"""Integer and narrow-float matrix products."""

from __future__ import annotations
