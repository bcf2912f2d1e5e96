"""The chat page, in a real browser where there is one."""

from __future__ import annotations

from pathlib import Path

import pytest

from rose_dist.frontend.config import FrontendConfig
from rose_dist.frontend.tokenizer import Tokenizer
from tests.browser import BROWSER, Page
from tests.frontend.running import Frontend, running, wait_for
from tests.frontend.stub_engine import StubConfig


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
