"""Connects PyTorch's dispatcher with the table. Until the device is used, one catch-all is all there is; its first
call loads JAX and the lowerings, and registers every operator directly."""

from __future__ import annotations

import threading
from typing import Any

import torch

_library: torch.library.Library | None = None
_catch_all: torch.library.Library | None = None
_others: dict[str, torch.library.Library] = {}
_lock = threading.RLock()
_loaded = False


def install() -> None:
    """Registers the catch-all, and the few operators that must not wait for it. Cheap; loads nothing."""
    global _library, _catch_all
    _library = torch.library.Library("aten", "IMPL")
    _catch_all = torch.library.Library("_", "IMPL")
    _catch_all.fallback(_dispatch, "PrivateUse1")


def _dispatch(op: Any, *args: Any, **kwargs: Any) -> Any:
    """An operator without a kernel of its own."""
    if not _loaded:
        load()
        found = _kernel(op)
        if found is not None:
            return found(*args, **kwargs)
    from . import fallback

    return fallback.run(op, args, kwargs)


def load() -> None:
    """Loads JAX, the lowerings and the kernels, and registers them (once)."""
    global _loaded
    if _loaded:
        return
    with _lock:
        if _loaded:
            return
        from .. import lowering
        from ..runtime import client, config

        config.check()
        from . import (  # noqa: F401  (they register)
            attention,
            autocast,
            copy,
            creation,
            ctc,
            data_dependent,
            foreach,
            grouped_matmul,
            int4_matmul,
            layouts,
            linalg,
            norm,
            random,
            ranges,
            rnn,
            transformer,
            unique,
        )

        client.get()
        lowering.load()
        _register()
        _loaded = True


def loaded() -> bool:
    return _loaded


def _takes_kernel(name: str) -> bool:
    """Whether a kernel of ours may stand under this overload. A composite must not get one: its own autograd formula
    would be lost. (Overloads of TorchScript are no dispatcher operators at all.)"""
    try:
        return not torch._C._dispatch_has_kernel_for_dispatch_key(name, "CompositeImplicitAutograd")
    except RuntimeError:
        return False


def _register() -> None:
    from ..lowering.table import TABLE
    from . import conjugate, plan
    from .kernels import KERNELS

    assert _library is not None
    done: set[str] = set()
    for name, fn in KERNELS.items():
        _implement(name, fn)
        done.add(name)
    packets: dict[tuple[str, str], None] = {}
    for name, entry in TABLE.items():
        if entry.users:
            continue
        namespace, packet, _ = name.split(".")
        stem = packet.removesuffix("_functional")
        for candidate in (packet, packet + "_", stem, stem + "_"):
            packets[(namespace, candidate)] = None
    for namespace, packet_name in packets:
        found = getattr(getattr(torch.ops, namespace), packet_name, None)
        if found is None:
            continue
        for which in found.overloads():
            op = getattr(found, which)
            name = str(op)
            if name in done or not _takes_kernel(_qualified(op)):
                continue
            made = plan.make(op)
            if made is not None:
                fn = _planned(made)
                _implement(name, conjugate.resolving(made, fn) if conjugate.sees_flags(_qualified(op)) else fn)
                done.add(name)


def _planned(made: Any) -> Any:
    from . import bounds, execute, quick, random

    look = bounds.guard(made.op)
    if made.entry.random:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            return execute.run(made, args, kwargs, random.next_key(kwargs.get("generator")))
    else:
        def plain(*args: Any, **kwargs: Any) -> Any:
            return execute.run(made, args, kwargs)

        kernel = quick.kernel(made, execute.run) or plain
    if look is not None:
        unguarded = kernel

        def kernel(*args: Any, **kwargs: Any) -> Any:
            look(args, kwargs)
            return unguarded(*args, **kwargs)
    if not any(a.name == "device" for a in made.op._schema.arguments):
        return kernel
    from . import bookkeeping, creation

    def placed(*args: Any, **kwargs: Any) -> Any:
        device = kwargs.get("device")
        if device is not None and device.type != "tpu":
            return creation.elsewhere(made.op, args, kwargs)
        creation.check_index(device)
        if kwargs.get("pin_memory"):
            raise RuntimeError("Only dense CPU tensors can be pinned")
        if free and bookkeeping.on():
            result = bookkeeping.factory(made.op, args, kwargs)
            if result is not NotImplemented:
                return result
        return kernel(*args, **kwargs)

    free = not made.entry.random and not made.writes and not any(kind.startswith("tensor") for _, kind in made.params)
    return placed


def _kernel(op: Any) -> Any:
    from . import plan
    from .kernels import KERNELS

    found = KERNELS.get(str(op))
    if found is not None:
        return found
    made = plan.make(op)
    return None if made is None else _planned(made)


def kernel(op: Any) -> Any:
    """The device's kernel of an overload that the table reaches; starts the device."""
    load()
    found = _kernel(op)
    if found is None:
        raise ValueError(f"{op} has no lowering")
    return found


def _qualified(op: Any) -> str:
    return op._schema.name + ("." + op._schema.overload_name if op._schema.overload_name else "")


def _implement(name: str, fn: Any) -> None:
    assert _library is not None
    namespace, packet, which = name.split(".")
    library = _library if namespace == "aten" else _others.get(namespace)
    if library is None:
        library = _others[namespace] = torch.library.Library(namespace, "IMPL")
    library.impl(packet if which == "default" else f"{packet}.{which}", fn, "PrivateUse1")
