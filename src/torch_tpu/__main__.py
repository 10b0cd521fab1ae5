"""python -m torch_tpu doctor"""

from __future__ import annotations

import sys

from .cli import main

sys.exit(main())
