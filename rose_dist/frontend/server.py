"""A frontend process: uvicorn on a bound socket, the leaders behind it, and an orderly end."""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import uvicorn
import uvloop

from rose_dist.frontend.api.app import build_app
from rose_dist.frontend.api.service import Service
from rose_dist.frontend.config import ENGINE_FAILED, FRONTEND_SIGNALS, LaunchSpec, ReplicaNews
from rose_dist.frontend.connection import Connection
from rose_dist.frontend.engine_client import EngineClient
from rose_dist.frontend.errors import EngineError, UnavailableError
from rose_dist.frontend.formats.choose import choose_format, load_codec
from rose_dist.frontend.metrics import Metrics

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1
_PUBLISH_S = 0.5
_SAME_SIGNAL_S = 2
"""A stop signal comes several times at once: Slurm sends it to all processes of a job, and rank 0 hands it on."""
_GRACE_S = 2
"""How long cancelled streams get to tell their clients."""


def die_with_parent(parent_pid: int) -> None:
    """Let the kernel send this process SIGUSR1, `the engine has failed`, when its parent ends, however it ends.

    The kernel watches the thread that started this process, so the parent must do that from a thread that lives as
    long as itself.
    """
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGUSR1)
    if os.getppid() != parent_pid:  # it ended before the line above
        sys.exit(f"The process {parent_pid} that started this frontend is gone")


def serve(spec: LaunchSpec) -> None:
    """Serve until SIGTERM or SIGINT, then drain, tell every leader to shut down, and return.

    Raises:
        TokenizerError, FormatError: the checkpoint's files can't be used.
    """
    config = spec.config
    shared = Path(spec.shared) if spec.shared is not None else None
    tokenizer = load_codec(config.model_path)
    chat_format = choose_format(config.chat_format, tokenizer, template_path=config.chat_template)
    client = EngineClient(spec.leaders, spec.replicas)
    metrics = Metrics(config.name, client, shared)
    service = Service(config, tokenizer, chat_format, client, metrics, shared)
    gc.collect()
    gc.freeze()  # what lives as long as the process
    gc.set_threshold(5_000, 20, 50)  # the default costs a tenth of the time; more makes each collection a longer pause
    uvloop.run(_serve(service, socket.socket(fileno=spec.listen_fd), news=spec.replicas > 0))


class _Server(uvicorn.Server):
    """Uvicorn without its signal handlers: a drain is more than closing connections."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _serve(service: Service, listen_socket: socket.socket, *, news: bool) -> None:
    server = _Server(
        uvicorn.Config(
            build_app(service),
            http=Connection,
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            proxy_headers=False,
            server_header=False,
            timeout_graceful_shutdown=_GRACE_S,
        )
    )
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, _on_signal, service, stop)
    loop.add_signal_handler(signal.SIGUSR1, _on_engine_failure, service, stop)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FRONTEND_SIGNALS)
    service.client.open()
    if news:
        loop.add_reader(0, _NewsReader(service.client).read)
    serving = asyncio.create_task(server.serve(sockets=[listen_socket]))
    stopping = asyncio.create_task(stop.wait())
    publishing = asyncio.create_task(_publish(service.metrics))
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    if stop.is_set():
        await _drain(service)
    service.client.close(shutdown=not service.failed)
    server.should_exit = True
    stopping.cancel()
    publishing.cancel()
    service.metrics.publish()
    await serving
    if service.failed:
        sys.exit(ENGINE_FAILED)


async def _publish(metrics: Metrics) -> None:
    while True:
        metrics.publish()
        await asyncio.sleep(_PUBLISH_S)


class _NewsReader:
    """Takes `ReplicaNews` from standard input."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._pending = b""
        self._decoder = msgspec.json.Decoder(ReplicaNews)

    def read(self) -> None:
        received = os.read(0, 65536)
        if not received:
            asyncio.get_running_loop().remove_reader(0)
        *lines, self._pending = (self._pending + received).split(b"\n")
        for line in lines:
            news = self._decoder.decode(line)
            if news.leaders:
                self._client.attach(news.number, news.leaders)
            else:
                self._client.detach(news.number, news.reason)


def _on_signal(service: Service, stop: asyncio.Event) -> None:
    now = time.monotonic()
    if service.draining_since is not None:
        if now - service.draining_since < _SAME_SIGNAL_S:
            return
        logger.warning("A second signal: running requests are given up")
        service.client.abort_all(UnavailableError("The server is shutting down"))
        return
    logger.info("Draining: %d requests are running", service.active)
    service.draining_since = now
    stop.set()


def _on_engine_failure(service: Service, stop: asyncio.Event) -> None:
    """From the engine's guard, which ends this process two seconds later, or because rank 0 is gone."""
    if service.failed:
        return
    logger.error("The engine has failed: %d requests are given up", service.active)
    service.failed = True
    service.client.abort_all(EngineError("The engine has failed"))
    stop.set()


async def _drain(service: Service) -> None:
    deadline = time.monotonic() + service.config.drain_timeout_s
    while service.active and time.monotonic() < deadline and not service.failed:
        await asyncio.sleep(0.02)
    if not service.active:
        return
    if not service.failed:
        logger.warning("%d requests are still running after the drain's time limit and are cancelled", service.active)
        service.client.abort_all(UnavailableError("The server is shutting down"))
    deadline = time.monotonic() + _GRACE_S
    while service.active and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
