"""torch.tpu"""

from __future__ import annotations
from . import chips


def is_available() -> bool:
    return True


def is_initialized() -> bool:
    return True


def device_count() -> int:
    return chips.count()


def current_device() -> int:
    return 0


def set_device(device) -> None:
    pass


def _is_in_bad_fork() -> bool:
    return False


def _lazy_init() -> None:
    pass


def manual_seed_all(seed: int) -> None:
    pass
