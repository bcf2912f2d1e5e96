"""The file that tells other machines where a server's API is."""

from __future__ import annotations

import os
import threading
import urllib.request
from contextlib import suppress
from pathlib import Path

from rose_dist.errors import RoseError

_ASK_SECONDS = 0.2


class EndpointFile:
    """Holds the API's URL, one line, from when it first is ready to answer until `remove`."""

    def __init__(self, path: Path, url: str) -> None:
        """`url` without /v1; /health is asked below it. Raises `RoseError` if there is no folder for the file."""
        if not path.parent.is_dir():
            raise RoseError(f"--endpoint-file {path}: there is no folder {path.parent}; make it, or name another")
        self._path = path
        self._url = url
        self._line = f"{url}/v1\n"
        self._removed = threading.Event()
        self._lock = threading.RLock()  # a signal handler may call `remove` while the main thread does
        threading.Thread(target=self._write_when_ready, name="endpoint file", daemon=True).start()

    def _write_when_ready(self) -> None:
        while not self._removed.wait(_ASK_SECONDS):
            with suppress(OSError), urllib.request.urlopen(f"{self._url}/health", timeout=5):
                break
        new = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        with self._lock:
            if not self._removed.is_set():
                new.write_text(self._line)
                new.replace(self._path)

    def remove(self) -> None:
        """Now, and for good, unless another server has written it since; safe to call again."""
        self._removed.set()
        with self._lock, suppress(FileNotFoundError):
            if self._path.read_text() == self._line:
                self._path.unlink()
