"""A line to a system: a gateway with an event loop in a thread of its own, for processes that have none."""

import asyncio
import threading
from collections.abc import Mapping
from concurrent.futures import Future

import ray

from raydispatch.actors.gateway import Gateway
from raydispatch.actors.names import NAMESPACE, controller_name
from raydispatch.actors.outgoing import find_routers
from raydispatch.actors.rows import RowDelivery, Shipment
from raydispatch.settings import SystemSettings


class Line:
    """Sends rows; lives as long as its process."""

    def __init__(self, system: str, settings: SystemSettings) -> None:
        self._system = system
        self._gateway = Gateway(settings, lambda: find_routers(system))
        self._loop = asyncio.new_event_loop()
        threading.Thread(target=self._loop.run_forever, name=f"raydispatch {system}", daemon=True).start()

    def send_rows(self, shipment: Shipment) -> "Future[RowDelivery]":
        """Send them; the future is what became of them."""
        return asyncio.run_coroutine_threadsafe(self._gateway.send_rows(shipment), self._loop)

    def note(self, job_id: str, counts: Mapping[str, int]) -> None:
        """Tell the controller how far a job is. Nobody waits for it, and nothing depends on it."""
        try:
            controller = ray.get_actor(controller_name(self._system), NAMESPACE)
        except ValueError:
            return  # It is being restarted.
        controller.note_rows.remote(job_id, counts)
