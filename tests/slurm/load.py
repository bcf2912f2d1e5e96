"""Clients that ask a server without pause, and what becomes of their requests."""

from __future__ import annotations

import json
import random
import socket
import threading
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx2

CLIENTS = 6
TOKENS = 12
HANGS_SECONDS = 45
PROMPTS = ["The capital of France is", "One, two, three,", "Once upon a time", "A B C D"]
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 2),
]
"""What a client needs to notice that the server's host is gone."""


@dataclass
class Load:
    """Clients that ask until told to stop, and what they got."""

    url: str
    right: dict[str, str]
    """Text by prompt."""
    outcomes: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    last_answer: float = 0.0
    """When the latest of the answered requests was sent."""
    slowest: float = 0.0
    """Seconds of an answer."""
    stopping: bool = False

    def __enter__(self) -> Load:
        self.threads = [threading.Thread(target=self._ask_on, args=(index,), daemon=True) for index in range(CLIENTS)]
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stopping = True
        deadline = time.monotonic() + HANGS_SECONDS
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self.outcomes["hung"] = sum(thread.is_alive() for thread in self.threads)

    def problems(self) -> list[str]:
        found = [f"wrong answers: {self.wrong[:3]}"] if self.wrong else []
        return [*found, "requests that hang"] if self.outcomes["hung"] else found

    def _ask_on(self, index: int) -> None:
        chooser = random.Random(index)
        while not self.stopping:
            prompt = chooser.choice(PROMPTS)
            begun = time.monotonic()
            try:
                text = ask(self.url, prompt)
            except (httpx2.HTTPError, AnswerError) as error:
                self.outcomes["error"] += 1
                partial = error.args[-1] if isinstance(error, AnswerError) else ""
                if not self.right[prompt].startswith(partial):
                    self.wrong.append(f"{prompt!r}: {partial!r}")
                time.sleep(0.2)
            else:
                self.outcomes["answered"] += 1
                self.last_answer = begun
                self.slowest = max(self.slowest, time.monotonic() - begun)
                if text != self.right[prompt]:
                    self.wrong.append(f"{prompt!r}: {text!r}")


class AnswerError(Exception):
    """The stream ended early; the last argument is the text before."""


def ask(url: str, prompt: str) -> str:
    """The whole text of a streamed completion."""
    body = {"model": "demo-model", "prompt": prompt, "max_tokens": TOKENS, "temperature": 0, "stream": True}
    text = ""
    transport = httpx2.HTTPTransport(socket_options=KEEPALIVE)
    with httpx2.Client(transport=transport, timeout=HANGS_SECONDS - 5) as client:
        try:
            with client.stream("POST", f"{url}/completions", json=body | {"ignore_eos": True}) as answer:
                if answer.status_code != 200:
                    raise AnswerError(answer.status_code, "")
                for line in answer.iter_lines():
                    if line == "data: [DONE]":
                        return text
                    if line.startswith("data: "):
                        event = json.loads(line[6:])
                        if "error" in event:
                            raise AnswerError(event["error"]["message"], text)
                        text += "".join(choice["text"] for choice in event["choices"])
        except httpx2.HTTPError as error:
            raise AnswerError(repr(error), text) from error
    raise AnswerError("the stream ended", text)
