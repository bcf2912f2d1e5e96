"""What a frontend process is told when it starts."""

from __future__ import annotations

import hashlib
import signal
from functools import cached_property
from pathlib import Path

import msgspec

CHAT_FORMATS = ("auto", "harmony", "jinja")
"""`auto`: Harmony where the vocabulary is Harmony's, else the checkpoint's template."""
ENGINE_FAILED = 70
"""Exit code of a frontend that ended because the engine has failed; sysexits.h calls it EX_SOFTWARE."""

FRONTEND_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
"""What a frontend is told by, see `server`; its parent starts it with them blocked, so that none comes too early."""


def hash_api_key(key: str) -> str:
    """The form in which a key travels and is kept: command lines and configuration files never hold the key itself."""
    return hashlib.sha256(key.encode()).hexdigest()


class FrontendConfig(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """Settings of the HTTP side. The same for every frontend process of a server."""

    model: str
    """Directory of the checkpoint: tokenizer, chat template and end-of-turn ids are read from it."""
    served_names: list[str] = []
    """Names that requests may use for the model; the first is the one in answers. Empty: the directory's name."""
    chat_format: str = "auto"
    """One of `CHAT_FORMATS`."""
    chat_template: str | None = None
    """A jinja file that replaces the checkpoint's template."""
    api_key_hashes: list[str] = []
    """`hash_api_key` of each accepted key; empty lets everybody in. Guards /v1 only."""
    cors_origins: list[str] = []
    """Origins that browsers may call from; empty: no CORS headers."""
    stored_responses: int = 1000
    """Responses that the server keeps for retrieval and `previous_response_id`."""
    drain_timeout_s: float = 30.0
    """After SIGTERM, how long running requests may go on."""

    @cached_property
    def model_path(self) -> Path:
        return Path(self.model)

    @cached_property
    def names(self) -> list[str]:
        return self.served_names or [self.model_path.resolve().name]

    @property
    def name(self) -> str:
        """The name that answers carry."""
        return self.names[0]


class ReplicaNews(msgspec.Struct, frozen=True, kw_only=True):
    """A replica has come or gone; a line of JSON on a frontend's standard input."""

    number: int
    leaders: list[str] = []
    """ZMQ addresses, by data-parallel rank, of one that has loaded the model; empty: it has ended."""
    reason: str = ""
    """Why it ended."""


class LaunchSpec(msgspec.Struct, frozen=True, kw_only=True):
    """The one JSON argument of `python -m rose_dist.frontend`."""

    config: FrontendConfig
    leaders: list[str]
    """ZMQ address of each data-parallel leader's ROUTER socket, by data-parallel rank, of a server that is one job."""
    replicas: int = 0
    """Jobs of a server that is several; `ReplicaNews` on standard input tell of them. 0: it is one job."""
    listen_fd: int
    """An inherited, bound TCP socket."""
    parent_pid: int
    """The process that this one must not outlive."""
    shared: str | None = None
    """A directory for what the frontend processes of one server share: their metrics and stored responses. None if
    this is the only one."""
