"""The chat page, in a real browser where there is one."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.running import Frontend, running, wait_for
from tests.frontend.stub_engine import StubConfig

BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium") or shutil.which("google-chrome")


class Page:
    """A page in headless Chromium, driven through its debugging pipe (file descriptors 3 and 4)."""

    def __init__(self, url: str, profile: Path) -> None:
        to_browser, self._commands = os.pipe()
        self._answers, from_browser = os.pipe()
        options = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --user-data-dir={profile}"
        self._process = subprocess.Popen(
            ["bash", "-c", f"exec {BROWSER} {options} 3<&{to_browser} 4>&{from_browser}"],
            pass_fds=(to_browser, from_browser),
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(from_browser)
        self._buffer = b""
        self._count = 0
        target = self._command("Target.createTarget", url=url)["targetId"]
        self._session = self._command("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def evaluate(self, expression: str) -> Any:
        return self._command("Runtime.evaluate", self._session, expression=expression)["result"].get("value")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._commands)
        os.close(self._answers)

    def _command(self, method: str, session: str | None = None, **parameters: Any) -> Any:
        self._count += 1
        message = {"id": self._count, "method": method, "params": parameters}
        if session is not None:
            message["sessionId"] = session
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self._count:  # events come in between
            pass
        return answer["result"]

    def _receive(self) -> Any:
        while b"\0" not in self._buffer:
            part = os.read(self._answers, 1 << 20)
            assert part, "the browser has ended"
            self._buffer += part
        message, _, self._buffer = self._buffer.partition(b"\0")
        return json.loads(message)


def test_the_page_needs_no_other_host(frontend: Frontend) -> None:
    status, body, headers = frontend.request("GET", "/")
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert b"://" not in body


@pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium-headless-shell")
def test_a_conversation_in_the_browser(config: FrontendConfig, tokenizer: Tokenizer, tmp_path: Path) -> None:
    script = tokenizer.encode_template("<think>\nHm <b>.\n</think>\n\nParis & <i>Rome</i> 🙂.")
    with running(config, [StubConfig(script=script, step_s=0.005)]) as frontend:
        page = Page(f"{frontend.url}/?ask=Capital%3F", tmp_path)
        try:
            wait_for(lambda: " 31 out" in page.evaluate("document.body?.innerHTML ?? ''"), 30)
            turns = page.evaluate("document.getElementById('turns').innerHTML")
            assert '<section class="turn user"><div class="who">user</div><div class="text">Capital?</div>' in turns
            assert '<summary class="">Reasoning</summary><div class="text">Hm &lt;b&gt;.\n</div>' in turns
            assert '<div class="text">Paris &amp; &lt;i&gt;Rome&lt;/i&gt; 🙂.</div>' in turns
            assert '"stream": true' in turns
            assert "tokens/s" in turns
            assert 'class="error"' not in turns
            assert page.evaluate("document.getElementById('model').value") == "tiny-chat"
            page.evaluate("document.getElementById('input').value = 'And?'; document.getElementById('send').click()")
            wait_for(lambda: page.evaluate("document.querySelectorAll('.figures').length") == 2, 30)
            assert page.evaluate("messages.length") == 4
            assert page.evaluate("messages[1].reasoning") == "Hm <b>.\n"
        finally:
            page.close()
