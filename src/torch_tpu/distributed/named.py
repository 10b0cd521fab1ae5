"""What torch.distributed (2.13) asks of a process group besides collectives. Its C++ class answers from backends that a
Python group does not have, so each is answered here."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed

_Base: Any = torch.distributed.ProcessGroup  # torch's stubs lack half of its methods


class NamedGroup(_Base):
    """A process group with a name."""

    def __init__(self, rank: int, size: int, name: str) -> None:
        super().__init__(rank, size)
        self._name, self._description = name, ""

    def getBackendName(self) -> str:
        return "tpu_dist"

    def name(self) -> str:
        return "tpu_dist"

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._description

    def setGroupDesc(self, description: str) -> None:
        self._description = description

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._description

    _set_group_name = setGroupName
    _set_group_desc = setGroupDesc

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu"), torch.device("tpu")]
