"""One real server for all clients, with the embedded model."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.server import Server, serving


@pytest.fixture(scope="package")
def server() -> Iterator[Server]:
    with serving() as running:
        yield running
