"""What torch asks of each process group: names, devices, and what it can do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

_ProcessGroup: Any = dist.ProcessGroup  # its types differ between versions of torch


class Named(_ProcessGroup):  # type: ignore[misc]
    """The part of a process group that begins no operations."""

    def __init__(self) -> None:
        super().__init__(0, 1)
        self._name, self._description = "", ""

    def getBackendName(self) -> str:  # noqa: N802
        """Give the name of the backend."""
        return "rejoin"

    # What newer versions of torch ask of a backend behind a group, they ask of this one.
    supports_reconfigure = True
    supports_coalescing = supports_splitting = supports_time_estimate = False

    def _get_backend(self, device: torch.device) -> Named:
        return self

    get_backend = _get_backend

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cpu")] + ([torch.device("cuda")] if torch.cuda.is_available() else [])

    def setGroupName(self, name: str) -> None:  # noqa: N802
        """Set what torch calls the group."""
        self._name = name

    def getGroupName(self) -> str:  # noqa: N802
        """Give what torch calls the group."""
        return self._name

    def setGroupDesc(self, description: str) -> None:  # noqa: N802
        """Set what the group is for."""
        self._description = description

    def getGroupDesc(self) -> str:  # noqa: N802
        """Give what the group is for."""
        return self._description

    def _start_coalescing(self, device: torch.device) -> None:
        raise ValueError(
            "the backend 'rejoin' begins each operation where it is called: give _coalescing_manager() no device"
        )
