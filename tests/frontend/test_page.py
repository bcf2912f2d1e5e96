"""The chat page, in a real browser where there is one."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.tokenizer import Tokenizer
from tests.frontend.running import Frontend, running
from tests.frontend.stub_engine import StubConfig

BROWSER = shutil.which("chromium-headless-shell") or shutil.which("chromium") or shutil.which("google-chrome")


def test_the_page_needs_no_other_host(frontend: Frontend) -> None:
    status, body, headers = frontend.request("GET", "/")
    assert status == 200
    assert headers["content-type"] == "text/html; charset=utf-8"
    assert b"://" not in body


def visit(url: str) -> str:
    """The page's DOM once its scripts have come to rest."""
    browser = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=20000", "--dump-dom"]
    return subprocess.run([*browser, url], capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium-headless-shell")
def test_a_conversation_in_the_browser(config: FrontendConfig, tokenizer: Tokenizer) -> None:
    script = tokenizer.encode_template("<think>\nHm <b>.\n</think>\n\nParis & <i>Rome</i> 🙂.")
    with running(config, [StubConfig(script=script)]) as frontend:
        page = visit(f"{frontend.url}/?ask=Capital%3F")
    assert ">tiny-chat</option>" in page
    assert '<section class="turn user"><div class="who">user</div><div class="text">Capital?</div></section>' in page
    assert '<summary class="">Reasoning</summary><div class="text">Hm &lt;b&gt;.\n</div>' in page
    assert '<div class="text">Paris &amp; &lt;i&gt;Rome&lt;/i&gt; 🙂.</div>' in page
    assert " 31 out" in page
    assert '"stream": true' in page
    assert 'class="error"' not in page
