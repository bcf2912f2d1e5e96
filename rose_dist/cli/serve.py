"""`rose serve`: the engine on every rank, and the HTTP frontend beside rank 0."""

from __future__ import annotations

import logging
import signal
from pathlib import Path
from types import FrameType

import click

from rose_dist.cli.endpoint_file import EndpointFile
from rose_dist.cli.engine_options import EngineOptions, engine_options, joined, load_engine
from rose_dist.cli.frontends import Frontends, listen
from rose_dist.frontend.config import FrontendConfig, hash_api_key

logger = logging.getLogger(__name__)


@click.command("serve")
@engine_options
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option(
    "--frontends", type=click.IntRange(min=1), default=1, show_default=True, help="HTTP processes on the port."
)
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
    frontends: int,
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
    _run_rank(options, frontend, host, port, frontends, endpoint_file, step_timeout)


def _run_rank(
    options: EngineOptions,
    frontend: FrontendConfig,
    host: str,
    port: int,
    frontends: int,
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
        children = endpoint = None
        if world.rank == 0:
            children = Frontends(frontend, [leader for leader in leaders if leader], listen(host, port, frontends))
            if endpoint_file is not None:
                reached = outward_address() if host == "0.0.0.0" else host
                endpoint = EndpointFile(endpoint_file, f"http://{reached}:{children.port}")
            for process in children.pids:
                world.warn_on_failure(process)
        _drain_on_signals(children, endpoint)
        engine = load_engine(world, groups, config)

        def check() -> None:
            world.progress()
            if children is not None:
                children.check()

        with world.stage("serve", stall=step_timeout):
            serve(engine, bell, mailbox, check)
        if children is not None:
            children.wait()
        if endpoint is not None:
            endpoint.remove()
        context.destroy(linger=0)


def _drain_on_signals(children: Frontends | None, endpoint: EndpointFile | None) -> None:
    """SIGUSR1 (from `rose launch`), SIGTERM and SIGINT mean: finish and leave.

    Rank 0's frontends then end the engine on every rank; the other ranks only must not die before.
    """

    def drain(number: int, frame: FrameType | None) -> None:
        logger.info("%s: draining", signal.Signals(number).name)
        if endpoint is not None:
            endpoint.remove()
        if children is not None:
            children.drain()

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)
