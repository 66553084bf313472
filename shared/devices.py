"""What hardware there is, as far as a look at the file system tells."""

from __future__ import annotations

from pathlib import Path


def nvidia_there() -> bool:
    """Whether the kernel shows an NVIDIA card. Importing torch to ask costs a second and 200 MB."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/dxg").exists()
