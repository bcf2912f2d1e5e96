"""Responses kept for retrieval and for `previous_response_id`; bounded, and shared by the frontends of a server."""

from __future__ import annotations

import sqlite3
import time
from pathlib import Path

import msgspec

from rose_dist.frontend.errors import BadRequestError, NotFoundError
from rose_dist.frontend.formats.base import Message
from rose_dist.frontend.schema.response_object import ResponseObject

_SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY,
    used INTEGER NOT NULL,
    running INTEGER NOT NULL,
    background INTEGER NOT NULL,
    cancelled INTEGER NOT NULL DEFAULT 0,
    response BLOB NOT NULL,
    messages BLOB NOT NULL
)
"""

_encode = msgspec.json.Encoder().encode
_decode_messages = msgspec.json.Decoder(list[Message]).decode


class ResponseStore:
    """A table of at most `capacity` responses; the least recently used one goes first."""

    def __init__(self, capacity: int, path: Path | None = None) -> None:
        """
        Args:
            path: a database file that other processes use too; None keeps the table in memory.
        """
        self._capacity = capacity
        self._database = sqlite3.connect(":memory:" if path is None else path, isolation_level=None, timeout=10)
        self._database.execute("PRAGMA journal_mode=WAL")
        self._database.execute("PRAGMA synchronous=OFF")  # it need not survive the machine
        self._database.execute(_SCHEMA)

    def put(self, response: ResponseObject, messages: list[Message], *, running: bool = False) -> None:
        """
        Args:
            messages: the conversation up to and with the response's own turn, without `instructions`.
            running: it is a background response that has not ended.
        """
        row = (response.id, time.monotonic_ns(), running, response.background, _encode(response), _encode(messages))
        self._database.execute(
            "INSERT INTO responses (id, used, running, background, response, messages) VALUES (?, ?, ?, ?, ?, ?)",
            row,
        )
        self._database.execute(
            "DELETE FROM responses WHERE id IN (SELECT id FROM responses ORDER BY used DESC LIMIT -1 OFFSET ?)",
            (self._capacity,),
        )

    def update(self, response: ResponseObject, messages: list[Message]) -> None:
        """The end of a background response; nothing if it was deleted meanwhile."""
        self._database.execute(
            "UPDATE responses SET running = 0, response = ?, messages = ? WHERE id = ?",
            (_encode(response), _encode(messages), response.id),
        )

    def get(self, response_id: str) -> bytes:
        """The response as JSON.

        Raises:
            NotFoundError: never stored, deleted, or gone to make room.
        """
        return bytes(self._row(response_id)[2])

    def history(self, response_id: str) -> list[Message]:
        """The conversation that a continuation of the response follows.

        Raises:
            NotFoundError: as `get`.
            BadRequestError: the response has not ended.
        """
        running, _, _, messages = self._row(response_id)
        if running:
            raise BadRequestError(f"`{response_id}` is still running", param="previous_response_id")
        return _decode_messages(messages)

    def delete(self, response_id: str) -> None:
        self._row(response_id)
        self._database.execute("DELETE FROM responses WHERE id = ?", (response_id,))

    def cancel(self, response_id: str) -> None:
        """Ask whoever runs it to stop.

        Raises:
            NotFoundError: as `get`.
            BadRequestError: it was not created in the background.
        """
        if not self._row(response_id)[1]:
            raise BadRequestError("Only a response created with background=true can be cancelled")
        self._database.execute("UPDATE responses SET cancelled = 1 WHERE id = ?", (response_id,))

    def is_cancelled(self, response_id: str) -> bool:
        """Somebody asked to stop it, or deleted it."""
        row = self._database.execute("SELECT cancelled FROM responses WHERE id = ?", (response_id,)).fetchone()
        return row is None or bool(row[0])

    def _row(self, response_id: str) -> tuple[int, int, bytes, bytes]:
        """(running, background, response, messages); counts as a use."""
        row: tuple[int, int, bytes, bytes] | None = self._database.execute(
            "UPDATE responses SET used = ? WHERE id = ? RETURNING running, background, response, messages",
            (time.monotonic_ns(), response_id),
        ).fetchone()
        if row is None:
            raise NotFoundError(
                f"No response `{response_id}` is kept here: unknown, created with store=false, or dropped after "
                f"{self._capacity} later ones",
                code="response_not_found",
            )
        return row
