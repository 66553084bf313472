"""The web console in a real browser, headless Chromium over its own protocol: drop a file, talk, see text, latency and state.

Skipped where there is no Chromium.
"""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
from websockets.asyncio.client import ClientConnection, connect

from tests.server import ROOT, Server, serving
from tests.speech import DATA, clip, silence, transcripts, wav, word_errors

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
SPOKEN = "librivox-0930"
PATIENCE_SECONDS = 45.0

needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium")


@pytest.fixture(scope="module")
def keyed() -> Iterator[Server]:
    with serving(api_keys="secret") as running:
        yield running


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket = socket
        self._numbers = count(1)
        self.complaints: list[str] = []
        """Everything that the browser found wrong: uncaught errors, violations of the page's policy."""

    async def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        await self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message: dict[str, Any] = json.loads(await self._socket.recv())
            if message.get("method") == "Runtime.exceptionThrown":
                self.complaints.append(str(message["params"]["exceptionDetails"]))
            if message.get("method") == "Log.entryAdded" and message["params"]["entry"]["level"] == "error":
                self.complaints.append(str(message["params"]["entry"]))
            if message.get("id") == number:
                assert "error" not in message, message
                result: dict[str, Any] = message["result"]
                return result

    async def value(self, expression: str) -> Any:
        answer = await self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Poll the browser until the expression is true."""
        async with asyncio.timeout(PATIENCE_SECONDS):
            while not (value := await self.value(expression)):
                await asyncio.sleep(0.05)
        return value

    async def click(self, element: str) -> None:
        await self.call(
            "Runtime.evaluate", expression=f"document.getElementById('{element}').click()", userGesture=True
        )

    async def text(self) -> str:
        return str(await self.value("[...document.querySelectorAll('#text span')].map(e => e.textContent).join(' ')"))

    async def notes(self) -> str:
        return str(await self.value("[...document.querySelectorAll('#text small')].map(e => e.textContent).join(' ')"))


@asynccontextmanager
async def browsing(server: Server, speech: Path) -> AsyncIterator[Page]:
    """The console in a browser whose microphone says ``speech`` once."""
    assert CHROMIUM is not None
    with tempfile.TemporaryDirectory(prefix="napscribe-browser-", ignore_cleanup_errors=True) as profile:
        browser = await asyncio.create_subprocess_exec(
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-dev-shm-usage",
            "--no-first-run",
            "--remote-debugging-port=0",
            f"--user-data-dir={profile}",
            "--use-fake-ui-for-media-stream",
            "--use-fake-device-for-media-stream",
            f"--use-file-for-fake-audio-capture={speech}%noloop",
            "about:blank",
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            async with connect(await _tab(Path(profile)), max_size=None) as socket:
                page = Page(socket)
                for domain in ("Page", "Runtime", "Log"):
                    await page.call(f"{domain}.enable")
                await page.call("Page.navigate", url=f"{server.url}/")
                await page.until("document.readyState === 'complete' && document.getElementById('talk') !== null")
                yield page
        finally:
            browser.terminate()
            await browser.wait()


async def _tab(profile: Path) -> str:
    """The debugger's address of the first tab."""
    port_file = profile / "DevToolsActivePort"
    async with asyncio.timeout(PATIENCE_SECONDS), httpx.AsyncClient() as client:
        while not (port_file.exists() and port_file.read_text().strip()):
            await asyncio.sleep(0.05)
        port = port_file.read_text().split()[0]
        while True:
            tabs = (await client.get(f"http://127.0.0.1:{port}/json")).json()
            pages = [tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page"]
            if pages:
                return str(pages[0])
            await asyncio.sleep(0.05)


@pytest.fixture
def microphone(tmp_path: Path) -> Path:
    """One second of silence, a sentence, and silence to end it."""
    path = tmp_path / "speech.wav"
    path.write_bytes(wav(np.concatenate([silence(1.0), clip(SPOKEN), silence(4.0)])))
    return path


def heard(text: str, name: str = SPOKEN) -> bool:
    return word_errors(transcripts()[name], text) <= 2


# ---------------------------------------------------------------- without a browser


def test_the_page_is_open_and_what_it_does_is_not(keyed: Server) -> None:
    for path, kind in (("/", "text/html"), ("/console.js", "text/javascript")):
        answer = keyed.http.get(path)
        assert answer.status_code == 200
        assert answer.headers["content-type"].startswith(kind)
        assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert keyed.http.get("/api/ps").status_code == 401


def test_the_page_asks_nothing_of_the_world() -> None:
    """No address in it but its own: it works without the internet and tells nobody."""
    for name in ("index.html", "console.js"):
        page = (ROOT / "gateway" / "console" / name).read_text()
        addresses = set(re.findall(r"//[\w-]+\.[\w.-]+", page))
        assert addresses <= {"//www.w3.org"}, "an XML namespace is a name, any other is a request"


# ---------------------------------------------------------------- with one


@needs_browser
async def test_drop_a_recording_and_talk(keyed: Server, microphone: Path) -> None:
    async with browsing(keyed, microphone) as page:
        assert await page.until("document.getElementById('state').textContent.includes('key')")
        await page.value(
            "(() => { const k = document.getElementById('key'); k.value = 'secret';"
            " k.dispatchEvent(new Event('change')); })()"
        )
        assert await page.until("document.getElementById('state').textContent.includes('asleep')")
        page.complaints.clear()  # the 401 of the first look, which is the point of the key
        await drop(page, DATA / "librivox-0880.wav")
        assert await page.until("document.getElementById('status').textContent === 'done'")
        assert heard(await page.text(), "librivox-0880")
        assert "all after" in await page.notes()
        assert await page.until("document.getElementById('state').textContent.includes('ready')")
        await page.click("clear")
        await talk(page)
        assert page.complaints == []
    assert "secret" not in keyed.log()


async def drop(page: Page, path: Path) -> None:
    """As a hand does: over the page, and let go."""
    data = {"items": [], "files": [str(path)], "dragOperationsMask": 1}
    for kind in ("dragEnter", "dragOver", "drop"):
        await page.call("Input.dispatchDragEvent", type=kind, x=200, y=200, data=data)


async def talk(page: Page) -> None:
    await page.click("talk")
    await page.until("document.querySelector('#text .partial') !== null")
    await page.until("document.querySelector('#text span:not(.partial)') !== null")
    assert heard(await page.text())
    assert "ms after the last sound" in await page.notes()
    await page.click("stop")
    assert await page.until("document.getElementById('status').textContent === 'done'")
    assert await page.value("document.getElementById('error').textContent") == ""


@needs_browser
async def test_a_wrong_key_and_a_file_that_is_none_are_told(keyed: Server, microphone: Path, tmp_path: Path) -> None:
    async with browsing(keyed, microphone) as page:
        await page.value("document.getElementById('key').value = 'wrong'")
        await page.click("talk")
        assert "key" in await page.until("document.getElementById('error').textContent")
        await page.until("!document.getElementById('talk').disabled")
        await page.value("document.getElementById('key').value = 'secret'")
        rubbish = tmp_path / "rubbish.wav"
        rubbish.write_bytes(b"no sound at all " * 1000)
        await drop(page, rubbish)
        await page.until("document.getElementById('status').textContent === 'failed'")
        assert "audio" in await page.value("document.getElementById('error').textContent")
