"""`rose serve`: the engine on every rank, and the HTTP frontend beside rank 0."""

from __future__ import annotations

import logging
import signal
import threading
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType

import click

from rose_dist.cli.announcement import announce
from rose_dist.cli.endpoint_file import EndpointFile
from rose_dist.cli.engine_options import EngineOptions, engine_options
from rose_dist.cli.engine_start import joined, load_engine
from rose_dist.cli.frontends import Frontends, listen
from rose_dist.cli.serving_options import ServingOptions, serving_options

logger = logging.getLogger(__name__)


@click.command("serve")
@engine_options
@serving_options
def command(options: EngineOptions, *, serving: ServingOptions) -> None:
    """Serve MODEL, a checkpoint folder, behind an OpenAI-compatible API.

    Alone it runs on one rank; `rose launch -n 2 -- serve MODEL` starts two.
    """
    import zmq  # noqa: PLC0415

    from rose_dist.comm.addresses import outward_address, reachable_address  # noqa: PLC0415
    from rose_dist.engine.doorbell import Doorbell  # noqa: PLC0415
    from rose_dist.engine.loop import serve  # noqa: PLC0415
    from rose_dist.engine.mailbox import Mailbox  # noqa: PLC0415

    # Not by click: `rose launch` parses this command too, and may stand where the ranks' files are not.
    template = serving.chat_template
    if template is not None and not Path(template).is_file():
        raise click.BadParameter(f"there is no file {template!r} on this host", param_hint="--chat-template")
    with joined(options) as (world, groups, config), ExitStack() as stack:
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        address = reachable_address(world.hosts)
        with world.stage("connect the ranks", options.join_timeout):
            # A replica's frontends are beside `rose launch`, which may run on another host.
            inbox = outward_address() if serving.announce == "outside" else address
            mailbox = Mailbox(context, inbox) if groups.tp.rank == 0 else None
            bell = Doorbell(context, address, groups.lockstep)
            leaders = [leader for leader in world.group.all_gather_objects(mailbox and mailbox.address) if leader]
        children = endpoint = None
        if world.rank == 0 and serving.announce is None:
            listeners = listen(serving.host, serving.port, serving.frontends)
            children = Frontends(serving.frontend(options.model), listeners, leaders)
            if serving.endpoint_file is not None:
                endpoint = EndpointFile(serving.endpoint_file, children.url)
                stack.callback(endpoint.remove)
            for process in children.pids:
                world.warn_on_failure(process)
        loaded = threading.Event()
        _drain_on_signals(children, endpoint, at_once=lambda: world.size == 1 and not loaded.is_set())
        engine = load_engine(world, groups, config)
        loaded.set()
        if serving.announce is not None:
            world.group.barrier()
            if world.rank == 0:
                announce(leaders)

        def check() -> None:
            world.progress()
            if children is not None:
                children.check()

        with world.stage("serve", stall=serving.step_timeout):
            serve(engine, bell, mailbox, check)
        if children is not None:
            children.wait()
        context.destroy(linger=0)


def _drain_on_signals(children: Frontends | None, endpoint: EndpointFile | None, at_once: Callable[[], bool]) -> None:
    """SIGUSR1 (from `rose launch`), SIGTERM and SIGINT mean: finish and leave.

    The frontends then end the engine on every rank; the ranks only must not die before.

    Args:
        at_once: whether this rank may leave as it stands: it is alone, and has nothing to finish.
    """

    leaving = False

    def drain(number: int, frame: FrameType | None) -> None:
        nonlocal leaving
        logger.info("%s: draining", signal.Signals(number).name)
        if endpoint is not None:
            endpoint.remove()
        if children is not None:
            children.drain()
        if at_once() and not leaving:
            leaving = True  # a further signal must neither wait within this one's wait, nor raise while the rank leaves
            if children is not None:
                children.wait()
            raise SystemExit(0)

    for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT):
        signal.signal(number, drain)
