"""The most memory that a block of code held: copied from the old mixedfp.compare."""

import ctypes
import gc
from threading import Event, Thread

import torch


class PeakMemory:
    """Measure in a `with` block the most memory allocated above what was allocated before.

    `bytes` is that after the block: an int, or None where it cannot be known (a C library or a
    device without a counter).
    """

    def __init__(
        self,
        device: str | torch.device = "cpu",  # where the tensors will be
        every: float = 0.02,  # s from one look at a CPU's to the next; a look takes up to 1 ms
    ):
        self.device, self.every = torch.device(device), every
        self.bytes: int | None = None

    def __enter__(self) -> "PeakMemory":
        """Start from what is held now."""
        gc.collect()
        self.before = self._reset()
        return self

    def __exit__(self, *exc) -> None:
        """Set `bytes`."""
        if self.before is not None:
            self.bytes = max(0, self._peak() - self.before)

    def _reset(self) -> int | None:
        """Forget the peak so far; return what is held now, None if that is not known."""
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
        """Note the most that was seen, until the block ends."""
        while not self.ended.wait(self.every):
            self.most = max(self.most, _allocated() or 0)

    def _peak(self) -> int:
        """Return the most that was held since `_reset`."""
        if self.device.type == "cuda":
            return torch.cuda.max_memory_allocated(self.device)
        self.ended.set()
        self.looks.join()
        return max(self.most, _allocated() or 0)


class _HeapInfo(ctypes.Structure):
    """`struct mallinfo2`, see man 3 mallinfo: bytes, and numbers of blocks."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks",
        "fordblks", "keepcost")]


def _allocated() -> int | None:
    """Return the bytes that this process has from `malloc`, None without glibc's counters."""
    try:
        ask = ctypes.CDLL("libc.so.6").mallinfo2
    except (OSError, AttributeError):
        return None
    ask.restype = _HeapInfo
    info = ask()
    return info.uordblks + info.hblkhd  # small ones in heaps, large ones mapped by themselves


