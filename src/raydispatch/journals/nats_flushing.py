"""Whether the servers of a journal write to their disks before they say that they have."""

import asyncio
import json
import logging
import urllib.request

from raydispatch.journals.nats_address import NatsAddress

TIMEOUT_SECONDS = 2.0
ADVICE = "set `sync_interval: always` in the jetstream block of the server's configuration"

_log = logging.getLogger("raydispatch")


async def warn_unless_flushed(address: NatsAddress) -> None:
    """A warning for each server that does not, and one if nobody can know. By default, servers write every two minutes,
    and lose what they have acknowledged meanwhile when the power fails."""
    if not address.monitors:
        _log.warning(
            "flushing of the journal cannot be seen",
            extra={"journal": address.name, "reason": "no monitor= in its url", "advice": ADVICE},
        )
    await asyncio.gather(*(_check(address, monitor) for monitor in address.monitors))


async def _check(address: NatsAddress, monitor: str) -> None:
    try:
        config = await asyncio.to_thread(_config, monitor)
    except (OSError, ValueError) as error:
        _log.warning(
            "flushing of the journal cannot be seen",
            extra={"journal": address.name, "monitor": monitor, "reason": str(error), "advice": ADVICE},
        )
        return
    if not config.get("sync_always"):
        _log.warning(
            "journal may lose accepted messages when the power fails",
            extra={
                "journal": address.name,
                "monitor": monitor,
                "sync_interval_seconds": config.get("sync_interval", 0) / 1e9,
                "advice": ADVICE,
            },
        )


def _config(monitor: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{monitor}/jsz?config=1", timeout=TIMEOUT_SECONDS) as answer:  # noqa: S310
        config: dict[str, int] = json.load(answer).get("config", {})
    return config
