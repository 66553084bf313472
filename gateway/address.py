"""The address to listen on, tried before anything else starts.

Granian shares its port with whoever else asks for it so (SO_REUSEPORT), so a second server on the same port would not be
refused but would get every other request.
"""

from __future__ import annotations

import socket


def usable(host: str, port: int) -> str:
    """The IP address of ``host``. Raises OSError, with a message for people, if it is none of ours or the port is taken."""
    try:
        found = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise OSError(f"{host} is no address: {error.strerror or error}") from None
    family, kind, protocol, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    with socket.socket(family, kind, protocol) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections of an earlier server may linger
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise OSError(f"{error.strerror}") from None
    return str(address[0])


def url(host: str, port: int | str) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
