"""torch.UntypedStorage on the device. PyTorch (2.13) allocates, copies and reads a storage's bytes in C++, at an
address that means nothing here (it ends the process); these methods work on the storage's buffer instead, and leave the
storages of other devices to PyTorch's own.

Without JAX until a device storage is used.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

_Base = torch._C.StorageBase
_Storage = torch.UntypedStorage


def _new(cls: type, *args: Any, **kwargs: Any) -> Any:
    device = kwargs.get("device")
    if device is None or torch.device(device).type != "tpu":
        return _Base.__new__(cls, *args, **kwargs)
    from ..runtime import chips

    chips.check(torch.device(device))
    content = args[0] if args else kwargs.get("size", 0)
    if isinstance(content, int):
        if content < 0:
            raise RuntimeError(f"Storage size must not be negative, got {content}")
        return torch.empty(content, dtype=torch.uint8, device="tpu").untyped_storage()
    return torch.tensor(content, dtype=torch.uint8, device="tpu").untyped_storage()


def _held(storage: Any) -> Any:
    held = getattr(storage, "_tpu_buffer", None)
    if held is None:
        raise RuntimeError("this tpu storage has no device memory behind it (it was made outside torch_tpu)")
    return held


def _bytes(storage: Any) -> torch.Tensor:
    """A uint8 tensor over the storage."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _host_bytes(storage: Any) -> torch.Tensor:
    """The storage's bytes, as a uint8 CPU tensor that may be the storage's own while it was not uploaded."""
    from ..runtime import transfer

    held = _held(storage)
    if held.mirror is not None:
        return held.mirror[:held.nbytes()]
    if held._host is not None:
        return held._host[:held.nbytes()]
    if not held.nbytes():
        return torch.empty(0, dtype=torch.uint8)
    if not held.written():
        return torch.zeros(held.nbytes(), dtype=torch.uint8)
    host = transfer.to_host(held.array()).reshape(-1)
    if host.is_complex():
        host = torch.view_as_real(host).reshape(-1)
    return host.view(torch.uint8)[:held.nbytes()]


def _copy(target: Any, source: Any, non_blocking: bool | None = None) -> Any:
    """copy_ where at least one of the two is on the device."""
    source = getattr(source, "_untyped_storage", source)
    if target.nbytes() != source.nbytes():
        raise RuntimeError(
            f"size does not match, self was {target.nbytes()} bytes but src was {source.nbytes()} bytes")
    if not target.nbytes():
        return target
    here, there = target.device.type == "tpu", source.device.type == "tpu"
    if here and there:
        if _held(target) is not _held(source):
            if _held(source).written():
                _held(target).share(_held(source))
            else:
                _held(target).load(torch.zeros(target.nbytes(), dtype=torch.uint8))
    elif here:
        host = torch.zeros(_held(target).capacity(), dtype=torch.uint8)
        host[:source.nbytes()] = _bytes(source).cpu()
        _held(target).load(host)
    else:
        _bytes(target).copy_(_host_bytes(source))
    return target


def _clone(storage: Any) -> Any:
    return _copy(_new(type(storage), storage.nbytes(), device=storage.device), storage)


def _cpu(storage: Any) -> Any:
    made = _Storage(storage.nbytes())
    return _copy(made, storage)


def _to(storage: Any, *, device: Any, non_blocking: bool = False) -> Any:
    device = torch.device(device)
    if device.type == "cpu":
        return _cpu(storage)
    if device.type == "tpu":
        return storage
    return _native["to"](_cpu(storage), device=device, non_blocking=non_blocking)


def _get(storage: Any, index: Any) -> Any:
    if isinstance(index, slice):
        raise NotImplementedError("a slice of a tpu storage cannot share its memory; slice a tensor over it, or "
                                  "storage.cpu()")
    return _cpu(storage)[index]


def _set(storage: Any, index: Any, value: int) -> None:
    _bytes(storage)[index] = value


def _fill(storage: Any, value: int) -> Any:
    _bytes(storage).fill_(value)
    return storage


def _resize(storage: Any, size: int) -> Any:
    _held(storage).resize(size)
    return storage


def _iterate(storage: Any) -> Iterator[int]:
    return iter(_host_bytes(storage).tolist())


def _tolist(storage: Any) -> list[int]:
    return _host_bytes(storage).tolist()


def _repr(storage: Any) -> str:
    return repr(_cpu(storage)).replace("device=cpu", f"device={storage.device}")


def _byteswap(storage: Any, size: int) -> None:
    host = _cpu(storage)
    host._byteswap(size)
    _copy(storage, host)


def _write_file(storage: Any, *args: Any) -> Any:
    return _cpu(storage)._write_file(*args)


def _set_from_file(storage: Any, *args: Any) -> Any:
    host = _Storage(storage.nbytes())
    host._set_from_file(*args)
    return _copy(storage, host)


def _share(storage: Any, *args: Any, **kwargs: Any) -> Any:
    raise RuntimeError("a tpu tensor cannot be sent to another process: send tensor.cpu(), and move it to the device "
                       "there")


def _nbytes(storage: Any) -> int:
    held = getattr(storage, "_tpu_buffer", None)
    return _native["nbytes"](storage) if held is None or held._size is None else held._size


_METHODS: dict[str, Callable[..., Any]] = {
    "clone": _clone, "cpu": _cpu, "to": _to, "nbytes": _nbytes, "size": _nbytes, "__len__": _nbytes,
    "__getitem__": _get, "__setitem__": _set, "fill_": _fill, "resize_": _resize, "__iter__": _iterate,
    "tolist": _tolist, "__repr__": _repr, "_byteswap": _byteswap, "_write_file": _write_file,
    "_set_from_file": _set_from_file, "_share_fd_cpu_": _share, "_share_filename_cpu_": _share,
    "new": lambda storage: _new(type(storage), 0, device=storage.device),
    "is_pinned": lambda storage, device=None: False,
}
_native: dict[str, Callable[..., Any]] = {}


def _route(name: str, ours: Callable[..., Any]) -> None:
    theirs = _native[name] = getattr(_Storage, name)

    @functools.wraps(theirs, updated=())
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.device.type == "tpu":
            return ours(self, *args, **kwargs)
        return theirs(self, *args, **kwargs)

    setattr(_Storage, name, method)


def install() -> None:
    _Storage.__new__ = staticmethod(_new)  # type: ignore[method-assign,assignment]
    for name, ours in _METHODS.items():
        _route(name, ours)
    theirs = _native["copy_"] = _Storage.copy_

    @functools.wraps(theirs, updated=())
    def copy_(self: Any, source: Any, non_blocking: bool | None = None) -> Any:
        if self.device.type == "tpu" or source.device.type == "tpu":
            return _copy(self, source, non_blocking)
        return theirs(self, source, non_blocking)

    _Storage.copy_ = copy_  # type: ignore[method-assign,assignment]
