"""What torch.compile(backend="tpu", mode=..., options=...) accepts."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from ..lowering import context
from ..runtime.errors import CompileOptionError

# All mean the same program here, since XLA chooses and fuses by itself and a launch is cheap; code that was written for
# other devices runs.
MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")


@dataclass(frozen=True)
class Options:
    """Options of one compiled function.

    Attributes:
        donate: mutated inputs (a static KV cache, parameters under an optimizer) are updated in place. Default True.
        xla: XLA options of this program, for example {"xla_cpu_enable_fast_math": True}.
        name: a name for logs and statistics.
        precision: of float32 matrix products and convolutions in this function, in place of what
            torch.set_float32_matmul_precision says: "highest", "high" or "medium".
        bucketing: a size that varies (`dynamic=True`, mark_dynamic) is rounded up, to the next power of two (True) or
            to the next of these sizes, where no row of a result depends on another row; `torch.tpu.explain()` and
            TORCH_TPU_LOGS=compile say where it is not. Default: a program for each size.
    """

    donate: bool = True
    xla: dict[str, Any] = field(default_factory=dict)
    name: str = ""
    precision: str = ""
    bucketing: bool | tuple[int, ...] = False


def parse(mode: str | None, options: dict[str, Any] | None) -> Options:
    """Raises CompileOptionError for anything unknown."""
    if mode is not None and mode not in MODES:
        raise CompileOptionError(f"mode={mode!r} is not known to the tpu backend; choose one of {', '.join(MODES)}")
    known = {f.name: f.type for f in fields(Options)}
    given = dict(options or {})
    for name in given:
        if name not in known:
            raise CompileOptionError(f"option {name!r} is not known to the tpu backend; it takes {', '.join(known)}")
    checks = {"donate": bool, "xla": dict, "name": str, "precision": str}
    given["bucketing"] = _buckets(given.get("bucketing", False))
    for name, value in given.items():
        if name == "bucketing":
            continue
        if not isinstance(value, checks[name]):
            raise CompileOptionError(f"option {name!r} must be a {checks[name].__name__}, not {type(value).__name__}")
    if given.get("precision", "") not in ("", *context.PRECISIONS):
        raise CompileOptionError(f"option 'precision' is {given['precision']!r}; it is one of "
                                 f"{', '.join(context.PRECISIONS)}")
    return Options(**given)


def _buckets(value: Any) -> bool | tuple[int, ...]:
    if isinstance(value, bool):
        return value
    if isinstance(value, list | tuple) and value and all(type(n) is int and n > 0 for n in value):
        return tuple(sorted(value))
    raise CompileOptionError(f"option 'bucketing' is {value!r}; it is True (powers of two), False, or a list of sizes")
