"""`rose serve`: the engine on every rank, and the HTTP frontend beside rank 0."""

from __future__ import annotations

import errno
import logging
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from types import FrameType

import click
import msgspec

from rose_dist.cli.endpoint_file import EndpointFile
from rose_dist.cli.engine_options import EngineOptions, engine_options, joined, load_engine
from rose_dist.errors import RoseError
from rose_dist.frontend.config import ENGINE_FAILED, FrontendConfig, LaunchSpec, hash_api_key

logger = logging.getLogger(__name__)


class FrontendError(RoseError):
    """The frontend could not start, or ended by itself."""


@click.command("serve")
@engine_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--endpoint-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Written with the API's URL once it answers, and removed when it stops.",
)
@click.option("--served-model-name", "names", multiple=True, help="Name in requests; default the folder's.")
@click.option("--chat-format", default="auto", show_default=True)
@click.option("--chat-template", type=click.Path(exists=True, dir_okay=False), help="A jinja file.")
@click.option("--api-key", "keys", multiple=True, envvar="ROSE_API_KEY", help="Accepted keys; none lets everybody in.")
@click.option("--cors-origin", "origins", multiple=True, help="Origins that browsers may call from.")
@click.option(
    "--step-timeout",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    help="Seconds without progress after which a rank counts as stuck, and the job is ended.",
)
@click.option("--drain-timeout", default=30.0, show_default=True, help="Seconds that running requests get at the end.")
def command(
    options: EngineOptions,
    *,
    host: str,
    port: int,
    endpoint_file: Path | None,
    names: tuple[str, ...],
    chat_format: str,
    chat_template: str | None,
    keys: tuple[str, ...],
    origins: tuple[str, ...],
    step_timeout: float,
    drain_timeout: float,
) -> None:
    """Serve MODEL, a checkpoint folder, behind an OpenAI-compatible API.

    Alone it runs on one rank; `rose launch -n 2 -- serve MODEL` starts two.
    """
    frontend = FrontendConfig(
        model=str(options.model),
        served_names=list(names),
        chat_format=chat_format,
        chat_template=chat_template,
        api_key_hashes=[hash_api_key(key) for key in keys],
        cors_origins=list(origins),
        drain_timeout_s=drain_timeout,
    )
    _run_rank(options, frontend, host, port, endpoint_file, step_timeout)


def _run_rank(
    options: EngineOptions,
    frontend: FrontendConfig,
    host: str,
    port: int,
    endpoint_file: Path | None,
    step_timeout: float,
) -> None:
    import zmq  # noqa: PLC0415

    from rose_dist.comm.addresses import outward_address, reachable_address  # noqa: PLC0415
    from rose_dist.engine.doorbell import Doorbell  # noqa: PLC0415
    from rose_dist.engine.loop import serve  # noqa: PLC0415
    from rose_dist.engine.mailbox import Mailbox  # noqa: PLC0415

    with joined(options) as (world, groups, config):
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = reachable_address(world.hosts)
        with world.stage("connect the ranks", options.join_timeout):
            mailbox = Mailbox(context, address) if groups.tp.rank == 0 else None
            bell = Doorbell(context, address, groups.lockstep)
            leaders = world.group.all_gather_objects(mailbox and mailbox.address)
        child = endpoint = None
        if world.rank == 0:
            child = FrontendProcess(frontend, [leader for leader in leaders if leader], listen(host, port))
            if endpoint_file is not None:
                reached = outward_address() if host == "0.0.0.0" else host
                endpoint = EndpointFile(endpoint_file, f"http://{reached}:{child.port}")
            world.warn_on_failure(child.pid)
        _drain_on_signals(child, endpoint)
        engine = load_engine(world, groups, config)

        def check() -> None:
            world.progress()
            if child is not None:
                child.check()

        with world.stage("serve", stall=step_timeout):
            serve(engine, bell, mailbox, check)
        if child is not None:
            child.wait()
        if endpoint is not None:
            endpoint.remove()
        context.destroy(linger=0)


def listen(host: str, port: int) -> socket.socket:
    """A listening TCP socket.

    Raises:
        FrontendError: the port is in use, or not this user's to take.
    """
    try:
        return socket.create_server((host, port), backlog=2048)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise FrontendError(
                f"port {port} on {host} is in use by another process; choose another with --port, or 0 for a free one"
            ) from None
        raise FrontendError(f"can't listen on {host}:{port}: {error.strerror or error}") from None


class FrontendProcess:
    """The HTTP side, in a process of its own so that it does not share the engine's interpreter."""

    def __init__(self, config: FrontendConfig, leaders: list[str], listener: socket.socket) -> None:
        spec = LaunchSpec(config=config, leaders=leaders, listen_fd=listener.fileno(), parent_pid=os.getpid())
        arguments = [sys.executable, "-m", "rose_dist.frontend", msgspec.json.encode(spec).decode()]
        # A session of its own: mpirun hands signals to each rank's whole process group, and this rank starts the drain.
        self._process = subprocess.Popen(arguments, pass_fds=[listener.fileno()], start_new_session=True)
        self.pid = self._process.pid
        host, self.port = listener.getsockname()[:2]
        logger.info("listening on http://%s:%d; /health says when the model is loaded", host, self.port)
        listener.close()
        self._draining = False

    def drain(self) -> None:
        """Let it finish what runs and then stop the engine."""
        self._draining = True
        self._process.send_signal(signal.SIGTERM)

    def check(self) -> None:
        """Raises `FrontendError` if the process has ended on its own."""
        code = self._process.poll()
        if code == ENGINE_FAILED:
            return  # the guard, which told it, has told why and is about to end this rank
        if code is not None and not (self._draining and code == 0):
            raise FrontendError(f"the frontend process ended by itself with exit code {code}; see its log above")

    def wait(self) -> None:
        """For its end, after a drain."""
        code = self._process.wait()
        if code:
            raise FrontendError(f"the frontend process ended with exit code {code}; see its log above")


def _drain_on_signals(child: FrontendProcess | None, endpoint: EndpointFile | None) -> None:
    """SIGUSR1 (from `rose launch`), SIGTERM and SIGINT mean: finish and leave.

    Rank 0's frontend then ends the engine on every rank; the other ranks only must not die before.
    """

    def drain(number: int, frame: FrameType | None) -> None:
        logger.info("%s: draining", signal.Signals(number).name)
        if endpoint is not None:
            endpoint.remove()
        if child is not None:
            child.drain()

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)
