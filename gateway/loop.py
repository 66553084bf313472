"""The gateway's event loop: asyncio's own, woken once for many calls from other threads.

Granian reads sockets in a thread of its own and hands over every WebSocket message with ``call_soon_threadsafe``. For each,
asyncio sends a byte to the pipe that wakes the loop, although one that is still in the pipe does so for all.
"""

from __future__ import annotations

import asyncio


class EventLoop(asyncio.SelectorEventLoop):
    """No call is left behind. ``call_soon_threadsafe`` queues it before it asks for a wake-up, and the loop looks into its
    queue after it has emptied the pipe and taken the mark away: whoever found the mark had queued before that.
    """

    _wake_up_sent = False
    """A byte is on its way to the loop, or about to be."""

    def _write_to_self(self) -> None:
        if not self._wake_up_sent:
            self._wake_up_sent = True
            super()._write_to_self()  # type: ignore[misc]

    def _read_from_self(self) -> None:
        try:
            super()._read_from_self()  # type: ignore[misc]
        finally:  # an interrupt, too, comes this way
            self._wake_up_sent = False
