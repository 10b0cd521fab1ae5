"""Streams and events. XLA runs a chip's programs in the order in which they were launched, so every stream is the same
queue: waiting for one another costs nothing, and synchronising waits for the chip.

`torch.Stream` and `torch.Event` become classes that make ours for tpu and PyTorch's own for every other device: the
C++ ones (torch 2.13) cannot synchronise a Python backend.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import torch

from ..runtime import chips, client

_NativeStream = torch.Stream
_NativeEvent = torch.Event
_DEVICE_TYPE = 20  # c10::DeviceType::PrivateUse1
_ids = itertools.count(1)


class Stream(_NativeStream):
    """A queue of work on tpu:0.

    Args:
        device: None, 0, "tpu", or torch.device("tpu").
        priority: accepted, without effect.
    """

    def __new__(cls, device: chips.Device = None, priority: int = 0, *, stream_id: int | None = None) -> Stream:
        chips.check(device)
        number = next(_ids) if stream_id is None else stream_id
        return super().__new__(cls, stream_id=number, device_index=0, device_type=_DEVICE_TYPE)

    def synchronize(self) -> None:
        """Waits for everything launched so far."""
        client.synchronize()

    def query(self) -> bool:
        """Whether everything launched so far is done."""
        return client.idle()

    def wait_event(self, event: torch.Event) -> None:
        """Later work follows the event's: it does anyway."""

    def wait_stream(self, stream: torch.Stream) -> None:
        """Later work follows that of the other stream: it does anyway."""

    def record_event(self, event: Event | None = None) -> Event:  # type: ignore[override]
        event = Event() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> Stream:
        _stack().append(self)
        return self

    def __exit__(self, *_: object) -> None:
        _stack().pop()

    def __repr__(self) -> str:
        return f"torch.tpu.Stream(device=tpu:0, id={self.stream_id})"


class Event(_NativeEvent):
    """A point in the chip's work.

    Args:
        enable_timing: `record` waits for the work before it and notes the host's clock, so `elapsed_time` is exact.
        blocking, interprocess: accepted, without effect.
    """

    _timing: bool
    _recorded: bool
    _time: float

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        made = super().__new__(cls, device="tpu", enable_timing=enable_timing)
        made._timing = enable_timing
        made._recorded = False
        made._time = 0.0
        return made

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return torch.device("tpu", 0)

    def record(self, stream: torch.Stream | None = None) -> None:
        if self._timing:
            client.synchronize()
            self._time = time.perf_counter()
        self._recorded = True

    def wait(self, stream: torch.Stream | None = None) -> None:
        """Later work follows this event: it does anyway."""

    def query(self) -> bool:
        return not self._recorded or self._timing or client.idle()

    def synchronize(self) -> None:
        if self._recorded and not self._timing:
            client.synchronize()

    def elapsed_time(self, end_event: Event) -> float:  # type: ignore[override]
        """Milliseconds from this event to `end_event`."""
        if not (self._timing and end_event._timing):
            raise ValueError("Both events must be created with argument 'enable_timing=True'.")
        if not (self._recorded and end_event._recorded):
            raise ValueError("Both events must be recorded before calculating elapsed time.")
        return (end_event._time - self._time) * 1e3

    def __repr__(self) -> str:
        return f"torch.tpu.Event(device=tpu:0, recorded={self._recorded})"


class _Current(threading.local):
    def __init__(self) -> None:
        self.stack: list[torch.Stream] = [default_stream()]


def default_stream(device: chips.Device = None) -> Stream:
    """The queue of work that is used where no stream is named."""
    chips.check(device)
    return Stream(stream_id=0)


_current: _Current | None = None


def _stack() -> list[torch.Stream]:
    global _current
    if _current is None:
        _current = _Current()
    return _current.stack


def current_stream(device: chips.Device = None) -> torch.Stream:
    """The stream selected by `with stream(s)` or `set_stream(s)` in this thread."""
    chips.check(device)
    return _stack()[-1]


def set_stream(stream: torch.Stream | None) -> None:
    """Selects a stream for this thread; None changes nothing."""
    if stream is not None:
        chips.check(stream.device)
        _stack()[-1] = stream


class stream:
    """Context manager that selects a stream; None selects nothing."""

    def __init__(self, stream: torch.Stream | None) -> None:
        self.stream = stream

    def __enter__(self) -> torch.Stream | None:
        if self.stream is not None:
            _stack().append(self.stream)
        return self.stream

    def __exit__(self, *_: object) -> None:
        if self.stream is not None:
            _stack().pop()


def _is_tpu(device: Any) -> bool:
    if device is None:
        return torch.accelerator.current_accelerator() == torch.device("tpu")
    return torch.device(device).type == "tpu"


class _Factory(type(_NativeStream)):  # type: ignore[misc]
    """Decides by the device which class is made; every stream is an instance of torch.Stream, and so for events."""

    native: type
    front: str

    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, cls.native) if cls._is_front() else super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, cls.native) if cls._is_front() else super().__subclasscheck__(subclass)

    def _is_front(cls) -> bool:
        return "native" in cls.__dict__


class _StreamFactory(_Factory):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls._is_front():
            return super().__call__(*args, **kwargs)
        if "device_type" in kwargs:
            if kwargs["device_type"] == _DEVICE_TYPE:
                chips.check(kwargs.get("device_index"))
                return Stream(stream_id=kwargs.get("stream_id", 0))
        elif len(args) < 3:
            device = args[0] if args else kwargs.get("device")
            if _is_tpu(device):
                return Stream(device)
        return _NativeStream(*args, **kwargs)


class _EventFactory(_Factory):
    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not cls._is_front():
            return super().__call__(*args, **kwargs)
        if len(args) < 2:
            device = args[0] if args else kwargs.get("device")
            if _is_tpu(device):
                chips.check(device)
                return Event(**{k: v for k, v in kwargs.items() if k != "device"})
        return _NativeEvent(*args, **kwargs)


class AnyStream(_NativeStream, metaclass=_StreamFactory):
    __doc__ = _NativeStream.__doc__
    __module__ = "torch"
    __qualname__ = "Stream"
    native = _NativeStream


class AnyEvent(_NativeEvent, metaclass=_EventFactory):
    __doc__ = _NativeEvent.__doc__
    __module__ = "torch"
    __qualname__ = "Event"
    native = _NativeEvent


def install() -> None:
    torch.Stream = AnyStream  # type: ignore[misc,assignment]
    torch.Event = AnyEvent  # type: ignore[misc,assignment]
