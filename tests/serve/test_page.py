"""The chat page before a real model that reasons, calls tools and answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.browser import BROWSER, Page
from tests.frontend.running import wait_for
from tests.serve import script
from tests.serve.server import Server

pytestmark = [
    pytest.mark.mpi(2),
    pytest.mark.skipif(BROWSER is None, reason="no Chromium: apt-get install chromium-headless-shell"),
]

WATCH = """
lengths = new Set();
new MutationObserver(() => lengths.add($("turns").textContent.length)).observe($("turns"),
    { childList: true, subtree: true, characterData: true });
"""


def test_a_tool_loop_on_the_page(scripted: Path, tmp_path: Path) -> None:
    with Server(scripted, 2, folder=tmp_path) as server:
        page = Page(server.url, tmp_path / "profile")
        try:
            wait_for(lambda: page.evaluate("document.getElementById('model').value") == "scripted-model", 60)
            run_the_loop(page)
            page.screenshot(tmp_path / "page.png")  # for people
        finally:
            page.close()


def run_the_loop(page: Page) -> None:
    tools = [
        {
            "type": "function",
            "function": {"name": tool.name, "description": tool.description, "parameters": tool.parameters},
        }
        for tool in script.TOOLS
    ]
    page.evaluate(WATCH)
    page.evaluate(f"$('fields').value = {json.dumps(json.dumps({'tools': tools, 'temperature': 0}))}")
    page.evaluate(f"messages.push({json.dumps({'role': 'system', 'content': script.instructions(555)})})")
    page.evaluate(f"$('input').value = {json.dumps(script.REQUEST)}; $('send').click()")
    for number, call in enumerate(script.CALLS):
        wait_for(lambda number=number: page.evaluate("document.querySelectorAll('.result').length") == number + 1, 60)
        card = f"document.querySelectorAll('.call')[{number}]"
        assert page.evaluate(f"{card}.querySelector('summary').textContent") == f"calls {call.name}"
        assert page.evaluate(f"{card}.querySelector('pre').textContent") == call.arguments
        page.evaluate(f"{card}.querySelector('.result').value = {json.dumps(call.result)}")
        page.evaluate(f"{card}.querySelector('.result').dispatchEvent(new KeyboardEvent('keydown', {{key: 'Enter'}}))")
    wait_for(lambda: page.evaluate("document.querySelectorAll('.figures').length") == len(script.CALLS) + 1, 60)
    texts = page.evaluate("[...document.querySelectorAll('.assistant > .text')].map(e => e.textContent).join('|')")
    assert texts == script.ANSWER
    folds = "[...document.querySelectorAll('details.reasoning')]"
    reasoning = page.evaluate(f"{folds}.map(e => e.lastChild.textContent).join('|')")
    assert reasoning == "|".join([*(call.reasoning for call in script.CALLS), script.CONCLUSION])
    assert page.evaluate(f"{folds}.every(e => !e.open)")
    assert page.evaluate("lengths.size") > 60, "the text comes piece by piece"
    assert page.evaluate("[...document.querySelectorAll('.figures')].every(e => / tokens\\/s$/.test(e.textContent))")
    sent = json.loads(page.evaluate("[...document.querySelectorAll('.request pre')].at(-1).textContent"))
    assert (sent["stream"], sent["temperature"], len(sent["tools"])) == (True, 0, 3)
    roles = [message["role"] for message in sent["messages"]]
    assert roles == ["system", "user", *["assistant", "tool"] * 3]
    assert page.evaluate("document.querySelector('.error')") is None
