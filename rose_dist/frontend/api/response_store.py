"""Responses kept for retrieval and for `previous_response_id`. Bounded; one per frontend process."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from rose_dist.frontend.api.exchange import Exchange
from rose_dist.frontend.errors import BadRequestError, NotFoundError, UnavailableError
from rose_dist.frontend.formats.base import Message
from rose_dist.frontend.schema.response_object import ResponseObject


@dataclass
class Stored:
    response: ResponseObject
    messages: list[Message]
    """The conversation up to and with the response's own turn; without `instructions`."""
    running: Exchange | None = None
    """Of a background response that has not ended."""


class ResponseStore:
    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._kept: OrderedDict[str, Stored] = OrderedDict()

    def put(self, stored: Stored) -> None:
        """Keep; beyond the capacity the least recently used one goes."""
        self._kept[stored.response.id] = stored
        self._kept.move_to_end(stored.response.id)
        while len(self._kept) > self._capacity:
            self._kept.popitem(last=False)

    def get(self, response_id: str) -> Stored:
        """
        Raises:
            NotFoundError: never stored, deleted, or gone to make room.
        """
        stored = self._kept.get(response_id)
        if stored is None:
            raise NotFoundError(
                f"No response `{response_id}` is kept here: unknown, created with store=false, or dropped after "
                f"{self._capacity} later ones",
                code="response_not_found",
            )
        self._kept.move_to_end(response_id)
        return stored

    def history(self, response_id: str) -> list[Message]:
        """
        Raises:
            NotFoundError: as `get`.
            BadRequestError: the response has not ended.
        """
        stored = self.get(response_id)
        if stored.running is not None:
            raise BadRequestError(f"`{response_id}` is still running", param="previous_response_id")
        return stored.messages

    def delete(self, response_id: str) -> None:
        self.get(response_id)
        self._kept.pop(response_id)

    def cancel(self, response_id: str) -> ResponseObject:
        """
        Raises:
            NotFoundError: as `get`.
            BadRequestError: it was not created in the background.
        """
        stored = self.get(response_id)
        if not stored.response.background:
            raise BadRequestError("Only a response created with background=true can be cancelled")
        if stored.running is not None:
            stored.response.status = "cancelled"
            stored.running.abort(UnavailableError("cancelled"))
            stored.running = None
        return stored.response
