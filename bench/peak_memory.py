"""The peak memory of a block of code; copied from the old mixedfp.compare."""

import ctypes
import gc
from threading import Event, Thread

import torch


class PeakMemory:
    """Measure the peak memory of a `with` block, above the memory allocated before it.

    `bytes` is set after the block: an int, or None if unknown (a C library or device without a
    counter).
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",  # of the tensors
        every: float = 0.02,  # s between samples on a CPU; a sample takes up to 1 ms
    ):
        self.device, self.every = torch.device(device), every
        self.bytes: int | None = None

    def __enter__(self) -> "PeakMemory":
        """Start from the memory allocated now."""
        gc.collect()
        self.before = self._reset()
        return self

    def __exit__(self, *exc) -> None:
        """Set `bytes`."""
        if self.before is not None:
            self.bytes = max(0, self._peak() - self.before)

    def _reset(self) -> int | None:
        """Reset the peak; return the bytes allocated now, None if unknown."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)
            return torch.cuda.memory_allocated(self.device)
        now = _allocated() if self.device.type == "cpu" else None
        if now is not None:
            self.most, self.ended = now, Event()
            self.looks = Thread(target=self._look, daemon=True)
            self.looks.start()
        return now

    def _look(self) -> None:
        """Sample the peak until the block ends."""
        while not self.ended.wait(self.every):
            self.most = max(self.most, _allocated() or 0)

    def _peak(self) -> int:
        """Return the peak since `_reset`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        self.ended.set()
        self.looks.join()
        return max(self.most, _allocated() or 0)


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo2`, see man 3 mallinfo: byte and block counts."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]


def _allocated() -> int | None:
    """Return the bytes that this process got from `malloc`, None without glibc's counters."""
    try:
        ask = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    ask.restype = _HeapInfo
    info = ask()
    return info.uordblks + info.hblkhd  # small blocks in heaps, large ones mapped individually


