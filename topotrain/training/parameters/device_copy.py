"""Copies between a device and the host, concurrent with the device's work.

All copies of a copier happen one after another, so an event recorded after a copy covers all earlier copies, in both
directions.

The device copies concurrently only from and to memory with pages that cannot move (pinned memory). The flat buffers are
pinned in place. Small buffers, and those that the driver refuses to pin, get a pinned *bounce* buffer.
"""

from collections.abc import Iterable
from contextlib import suppress
from typing import Protocol

import torch

WORTH_PINNING = 1 << 20  # bytes; the driver pins whole pages, and smaller buffers share pages with others
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every GPU of the process

Pair = tuple[torch.Tensor, torch.Tensor]


class ImmediateEvent:
    """The event of a copier that copies at once."""

    def query(self) -> bool:
        """Return True."""
        return True

    def synchronize(self) -> None:
        """Return at once."""


CopyEvent = ImmediateEvent | torch.cuda.Event
"""A point in a copier's work. `query` returns whether it was reached, and `synchronize` waits for it."""


class DeviceCopier(Protocol):
    """Copies of one device.

    `place` is always host memory that `reaches` allowed, or a `bounce` buffer.
    """

    def copy_to_host(self, source: torch.Tensor, place: torch.Tensor) -> None:
        """Copy from the device; `place` is filled when a later `mark` is reached.

        `source` may be freed at once.
        """
        ...

    def copy_to_device(self, pairs: Iterable[Pair]) -> None:
        """Copy each (target on the device, place).

        The places must not change until `settle` returns.
        """
        ...

    def mark(self) -> CopyEvent:
        """Return an event for the end of all copies so far."""
        ...

    def settle(self) -> None:
        """Wait until the places of the last `copy_to_device` may be written again."""
        ...

    def reaches(self, view: torch.Tensor) -> bool:
        """Return whether copies from and to this memory run concurrently."""
        ...

    def bounce(self, view: torch.Tensor) -> torch.Tensor:
        """Return pinned memory with the shape and strides of `view`."""
        ...

    def close(self) -> None:
        """Finish all copies and release resources."""
        ...


class ImmediateCopier:
    """Copies at once: for parameters on the CPU beside others on a GPU."""

    def copy_to_host(self, source: torch.Tensor, place: torch.Tensor) -> None:
        """Copy at once."""
        place.copy_(source)

    def copy_to_device(self, pairs: Iterable[Pair]) -> None:
        """Copy at once."""
        for target, place in pairs:
            target.copy_(place)

    def mark(self) -> CopyEvent:
        """Return an event that is reached."""
        return ImmediateEvent()

    def settle(self) -> None:
        """Return at once."""

    def reaches(self, view: torch.Tensor) -> bool:
        """Return True: all memory is alike."""
        return True

    def bounce(self, view: torch.Tensor) -> torch.Tensor:
        """Return ordinary memory."""
        return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype)

    def close(self) -> None:
        """Do nothing."""


class PinningDriver:
    """The GPU driver's functions that pin host memory."""

    def pin(self, address: int, nbytes: int) -> bool:
        """Return whether it could pin this memory."""
        if int(torch.cuda.cudart().cudaHostRegister(address, nbytes, _PORTABLE)) == 0:  # type: ignore[no-untyped-call]
            return True
        # Clears the driver's error, which the next kernel of the script would report otherwise.
        with suppress(RuntimeError):
            torch.zeros(1, device="cuda")
        return False

    def unpin(self, address: int) -> None:
        """Unpin memory that was pinned."""
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


class PinnedStorages:
    """Pinned host memory of the process. Whole storages are pinned, each once."""

    def __init__(self, driver: PinningDriver) -> None:
        self._driver = driver
        # Keeps each storage: once it is freed, another one could have its address and pass for pinned.
        self._known: dict[int, tuple[bool, torch.UntypedStorage]] = {}

    def pinned(self, view: torch.Tensor) -> bool:
        """Return whether the memory is pinned. The first call tries to pin it."""
        storage = view.untyped_storage()
        address = storage.data_ptr()
        if address not in self._known:
            worked = storage.nbytes() >= WORTH_PINNING and self._driver.pin(address, storage.nbytes())
            self._known[address] = worked, storage
        return self._known[address][0]

    def close(self) -> None:
        """Unpin everything."""
        for address, (worked, _) in self._known.items():
            if worked:
                self._driver.unpin(address)
        self._known.clear()


class CudaCopier:
    """The copies of one NVIDIA GPU, on a stream of their own."""

    def __init__(self, device: torch.device, pins: PinnedStorages) -> None:
        self._device, self._pins = device, pins
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._read: torch.cuda.Event | None = None  # the end of the last `copy_to_device`

    def copy_to_host(self, source: torch.Tensor, place: torch.Tensor) -> None:
        """Copy after the present work of the device's current stream."""
        # The gradient is complete when the work that the device has queued so far is done.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            matching = source
            if source.stride() != place.stride() or source.dtype != place.dtype:
                # torch would copy through a second buffer and read that buffer before it is filled.
                matching = torch.empty_strided(place.shape, place.stride(), dtype=place.dtype, device=self._device)
                matching.copy_(source)
            place.copy_(matching, non_blocking=True)
        # The allocator would otherwise give the memory away when the script drops it, while the copy still runs.
        source.record_stream(self._stream)

    def copy_to_device(self, pairs: Iterable[Pair]) -> None:
        """Copy before later work of the current stream."""
        current = torch.cuda.current_stream(self._device)
        # Kernels that are queued already still read the old values.
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            for target, place in pairs:
                target.copy_(place, non_blocking=True)
        # Later work of the device reads the new values. The host does not wait.
        current.wait_stream(self._stream)
        self._read = self._event()

    def mark(self) -> CopyEvent:
        """Return an event for the end of the stream's present work."""
        return self._event()

    def _event(self) -> torch.cuda.Event:
        # blocking: the waiting thread sleeps, and leaves its core to the servers.
        event = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def settle(self) -> None:
        """Wait for the last copies to the device."""
        if self._read is not None:
            self._read.synchronize()

    def reaches(self, view: torch.Tensor) -> bool:
        """Return whether the memory is pinned."""
        with torch.cuda.device(self._device):  # else the driver would set up the first GPU for it
            return self._pins.pinned(view)

    def bounce(self, view: torch.Tensor) -> torch.Tensor:
        """Return pinned memory that torch manages."""
        with torch.cuda.device(self._device):
            return torch.empty_strided(view.shape, view.stride(), dtype=view.dtype, pin_memory=True)

    def close(self) -> None:
        """Wait for all copies, then unpin."""
        # In this order: the device may still read or write pinned memory.
        self._stream.synchronize()
        self._pins.close()


def copiers_for(devices: Iterable[torch.device]) -> dict[torch.device, DeviceCopier]:
    """Return a copier for each device. CPU parameters are copied directly."""
    pins = PinnedStorages(PinningDriver())
    return {d: CudaCopier(d, pins) if d.type == "cuda" else ImmediateCopier() for d in dict.fromkeys(devices)}
