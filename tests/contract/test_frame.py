"""What stands around the code names things in it: settings, targets, the health check of the image."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import threading

import pytest

from shared.settings import TABLE
from tests.server import ROOT, free_port, serving

FRAME = ("README.md", "Makefile", ".ci/run", *(f"docker/{path.name}" for path in (ROOT / "docker").iterdir()))
HEALTHCHECK = ROOT / "docker" / "healthcheck"


@pytest.mark.parametrize("name", FRAME)
def test_every_setting_that_is_named_exists(name: str) -> None:
    """An image with an old name in it would not start."""
    named = set(re.findall(r"NAPSCRIBE_[A-Z_]*[A-Z]", (ROOT / name).read_text()))
    assert named <= {setting.name for setting in TABLE}


@pytest.mark.parametrize("name", ["README.md", ".ci/run", "docs/benchmarks.md", "docs/architecture.md"])
def test_every_target_that_is_named_exists(name: str) -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    text = (ROOT / name).read_text()
    named = {
        word
        for line in re.findall(r"(?:^|`)make ((?:[a-z]+ ?)+)(?:$|`|  )", text, re.MULTILINE)
        for word in line.split()
    }
    assert named <= targets, named - targets


@pytest.mark.parametrize("name", ["README.md", "docs/architecture.md", "docs/benchmarks.md", "CHANGELOG.md"])
def test_every_file_that_is_linked_exists(name: str) -> None:
    linked = re.findall(r"\]\(([^)#:]+)\)", (ROOT / name).read_text())
    assert [link for link in linked if not ((ROOT / name).parent / link).exists()] == []


def check_health(port: int) -> int:
    environment = {**os.environ, "NAPSCRIBE_PORT": str(port)}
    return subprocess.run([HEALTHCHECK], env=environment, capture_output=True, check=False, timeout=20).returncode


def test_the_health_check_of_the_image_sees_a_server_and_wakes_no_worker() -> None:
    with serving(script=True) as server:
        assert check_health(server.port) == 0
        assert server.worker["generation"] == 0
    assert check_health(server.port) == 1


def test_the_health_check_of_the_image_sees_a_refusal() -> None:
    """Something listens there and says no."""
    port = free_port()
    with socket.create_server(("127.0.0.1", port)) as listener:

        def refuse() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.recv(1000)
                connection.sendall(b"HTTP/1.1 503 Service Unavailable\r\n\r\n")

        thread = threading.Thread(target=refuse)
        thread.start()
        assert check_health(port) == 1
        thread.join()
