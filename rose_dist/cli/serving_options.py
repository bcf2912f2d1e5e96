"""The options of `rose serve` about the HTTP side, and what they come to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from rose_dist.frontend.config import CHAT_FORMATS, FrontendConfig, hash_api_key

Command = TypeVar("Command", bound=Callable[..., Any])


@dataclass(frozen=True)
class ServingOptions:
    """The options as given."""

    host: str
    port: int
    frontends: int
    endpoint_file: Path | None
    names: tuple[str, ...]
    chat_format: str
    chat_template: str | None
    keys: tuple[str, ...]
    origins: tuple[str, ...]
    step_timeout: float
    drain_timeout: float
    announce: str | None
    """Set on the ranks of a replica: from where its leaders are to be reached, `here` or `outside`."""

    def frontend(self, model: Path) -> FrontendConfig:
        return FrontendConfig(
            model=str(model),
            served_names=list(self.names),
            chat_format=self.chat_format,
            chat_template=self.chat_template,
            api_key_hashes=[hash_api_key(key) for key in self.keys],
            cors_origins=list(self.origins),
            drain_timeout_s=self.drain_timeout,
        )


_OPTIONS = (
    click.option("--host", default="127.0.0.1", show_default=True, help="IPv4 address, or a name, to listen on."),
    click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one."),
    click.option(
        "--frontends", type=click.IntRange(min=1), default=1, show_default=True, help="HTTP processes on the port."
    ),
    click.option(
        "--endpoint-file",
        type=click.Path(dir_okay=False, path_type=Path),
        help="Written with the API's URL once it answers, and removed when it stops.",
    ),
    click.option("--served-model-name", "names", multiple=True, help="Name in requests; default the folder's."),
    click.option(
        "--chat-format",
        type=click.Choice(CHAT_FORMATS),
        default="auto",
        show_default=True,
        help="auto: harmony where the vocabulary is Harmony's, else the checkpoint's template.",
    ),
    click.option("--chat-template", type=click.Path(dir_okay=False), help="A jinja file."),
    click.option(
        "--api-key", "keys", multiple=True, envvar="ROSE_API_KEY", help="Accepted keys; none lets everybody in."
    ),
    click.option("--cors-origin", "origins", multiple=True, help="Origins that browsers may call from."),
    click.option(
        "--step-timeout",
        type=click.FloatRange(min=1),
        default=300.0,
        show_default=True,
        help="Seconds without progress after which a rank counts as stuck, and the job is ended.",
    ),
    click.option(
        "--drain-timeout",
        type=click.FloatRange(min=0),
        default=30.0,
        show_default=True,
        help="Seconds that running requests get at the end.",
    ),
    click.option("--announce", type=click.Choice(["here", "outside"]), hidden=True),
)


def serving_options(function: Command) -> Command:
    """Give a command the options of `ServingOptions`, as its argument `serving`."""

    @wraps(function)
    def wrapped(*arguments: Any, **options: Any) -> Any:
        own = {name: options.pop(name) for name in ServingOptions.__dataclass_fields__}
        return function(*arguments, serving=ServingOptions(**own), **options)

    for option in reversed(_OPTIONS):
        wrapped = option(wrapped)
    return wrapped  # type: ignore[return-value]
