"""Everything that is decided about the device, in one place: where, in what precision, with how many threads and slots."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from shared.cores import format_cores
from shared.devices import nvidia_there
from shared.errors import ModelLoadFailed, OutOfMemory
from shared.journal import log
from worker.cores import cores_near, pin, usable_cores
from worker.engines.base import EngineBroken

_CUDA_THREADS = 2
"""Beside a GPU the CPU only launches; more threads take time from the decoding of files."""
_CUDA_WORK = 2_100 * 1024**2
"""Bytes for activations, logits, CUDA graphs and what the allocator keeps, beside weights, slots and the encoder's convolutions."""
_CUDA_CHUNK = 4_500 * 1024
"""Bytes that a second of sound takes in the convolutions, at the published widths in bf16. Measured with both, with 0.6B and 1.7B: 1.7 to
1.8 GB in use with groups of 64 s and 2.6 GB with 256 s."""
_CHUNKS, _CHUNKS_ON_SMALL = 256, 64
_SMALL_CARD = 24 * 1024**3
"""Bytes below which memory is worth more as slots than as larger groups of the encoder."""
_CUDA_SHARE = 0.85
"""Of the memory that is free at the start, where no bound is given: other programs use the card too."""


MORE_MEMORY = (
    "Stop other programs on the card, raise NAPSCRIBE_GPU_MEMORY_MB if it is set, or set it to less than what they leave, "
    "or choose the 0.6B model."
)


@dataclass(frozen=True, slots=True)
class Device:
    where: torch.device
    dtype: torch.dtype
    threads: int

    @property
    def cuda(self) -> bool:
        return self.where.type == "cuda"


def set_up(where: str = "", *, dtype: torch.dtype | None = None, threads: int = 0, near_gpu: bool = False) -> Device:
    """Choose and configure. ``where``: ``cuda``, ``cuda:1``, ``cpu`` or empty for the best there is. ``near_gpu`` keeps the whole
    process to the cores on the card's NUMA node; what it allocates from now on lies there, too.

    Raises ModelLoadFailed where CUDA is asked for and is not there.
    """
    device = torch.device(where or ("cuda" if torch.cuda.is_available() else "cpu"))
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ModelLoadFailed(
            "CUDA was asked for, but torch sees no GPU.",
            hint="Check nvidia-smi and that the container was started with --gpus all; or leave the device out.",
        )
    if not where and device.type == "cpu" and nvidia_there():
        log(
            "there is an NVIDIA card, and torch cannot use it: the model runs on the CPU",
            level="warning",
            hint="Compare the driver (nvidia-smi) with torch's CUDA version; in a container, start it with --gpus all.",
        )
    if dtype is None:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if near_gpu and device.type == "cuda":
        _stay_near(device)
    cores = usable_cores()
    chosen = Device(device, dtype, threads or (min(cores, _CUDA_THREADS) if device.type == "cuda" else cores))
    if device.type == "cuda":
        # The convolutions see as many batch sizes as there are seconds in a group; searching for the best kernel at each
        # new one would stall a live step, and the heuristic choice is close.
        torch.backends.cudnn.benchmark = False
        torch.backends.cuda.enable_cudnn_sdp(False)
        torch.backends.cuda.matmul.allow_tf32 = dtype is not torch.float32
        torch.backends.cudnn.allow_tf32 = dtype is not torch.float32
    claim_threads(chosen)
    return chosen


def _stay_near(device: torch.device) -> None:
    card: Any = torch.cuda.get_device_properties(device)
    try:
        address = f"{card.pci_domain_id:04x}:{card.pci_bus_id:02x}:{card.pci_device_id:02x}.0"
    except AttributeError:  # an older torch does not tell, and nobody needs to fail for that
        address = ""
    cores = cores_near(address) & os.sched_getaffinity(0)
    if cores:
        pin(cores)
    log("cores near the GPU", card=address, cores=format_cores(cores) or "unknown")


def claim_threads(device: Device) -> None:
    """Set torch's threads to ours again: some libraries set them to one when they are imported."""
    if torch.get_num_threads() != device.threads:
        torch.set_num_threads(device.threads)


def encoder_chunks(device: Device, bound_mb: int) -> int | None:
    """Seconds that the encoder takes at once on this card, or of ``bound_mb`` of it; None: its own choice."""
    if not device.cuda:
        return None
    room = bound_mb * 1024**2 or torch.cuda.mem_get_info(device.where)[0]
    return _CHUNKS if room >= _SMALL_CARD else _CHUNKS_ON_SMALL


def bound_memory(device: Device, bound_mb: int) -> None:
    """From now on this process takes no more than ``bound_mb`` of the card, 0 for all: torch gives cached blocks back first, and
    fails where that is not enough. CUDA's own context comes on top."""
    if device.cuda:
        number = torch.cuda.current_device() if device.where.index is None else device.where.index
        total = torch.cuda.mem_get_info(number)[1]
        torch.cuda.set_per_process_memory_fraction(min(1.0, bound_mb * 1024**2 / total) if bound_mb else 1.0, number)


def free_bytes(device: Device, *, bound_mb: int, held: int, share: float = 1.0, chunks: int | None = None) -> int:
    """Bytes left for slots: of ``bound_mb`` if that is given, less the ``held`` bytes of weights and whatever else this process
    has on the device; else of what is free. ``share`` of it: another model comes after. ``chunks``: see ``encoder_chunks``."""
    work = _CUDA_WORK + (chunks or _CHUNKS) * _CUDA_CHUNK if device.cuda else 0
    if bound_mb:
        left = bound_mb * 1024**2 - max(held, held_bytes(device)) - work
        return int(left * share)
    if device.cuda:
        free, _total = torch.cuda.mem_get_info(device.where)
        return int(free * _CUDA_SHARE * share) - work
    return 2 * 1024**3


@contextmanager
def typed_out_of_memory(what: str) -> Iterator[None]:
    """Turns torch's own error into ours."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise OutOfMemory(
            f"The device ran out of memory while {what}.",
            hint=MORE_MEMORY,
        ) from error


def require_alive(device: Device, error: BaseException) -> None:
    """Raises EngineBroken, from ``error``, if CUDA takes no work any more: after some errors (a bad access in a kernel, a card
    that fell off the bus, an uncorrectable memory error) every call of this process fails, and another process is needed."""
    if not device.cuda:
        return
    try:
        torch.ones(1, device=device.where).item()
    except torch.OutOfMemoryError:
        return
    except RuntimeError:
        raise EngineBroken(f"{device.where} takes no work any more: {error!r}") from error


@contextmanager
def watched(device: Device) -> Iterator[None]:
    """What fails inside because CUDA takes no work any more raises EngineBroken."""
    try:
        yield
    except RuntimeError as error:
        require_alive(device, error)
        raise


def release_cached(device: Device) -> None:
    """After running out of memory only: give cached blocks back, so that a smaller attempt can succeed."""
    if device.cuda:
        torch.cuda.empty_cache()


def held_bytes(device: Device) -> int:
    """Bytes that torch holds on the accelerator; 0 on the CPU."""
    return torch.cuda.memory_reserved(device.where) if device.cuda else 0
