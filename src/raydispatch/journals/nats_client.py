"""A connection to NATS: nats-py as we need it, and its troubles as our errors."""

import asyncio
import logging
import ssl
from collections.abc import Awaitable, Callable

from nats import errors
from nats.aio.client import Client
from nats.aio.msg import Msg

from raydispatch.errors import InvalidParameter, JournalUnavailable, MissingExtra
from raydispatch.journals.nats_address import NatsAddress

CONNECT_SECONDS = 2
"""For one server; then the next one is tried."""
RECONNECT_SECONDS = 0.25
PING_SECONDS = 10
"""A server that answers none of two pings is gone, even if its machine has not said so."""

_log = logging.getLogger("raydispatch")


class NatsClient(Client):
    """nats-py, mended in two places."""

    def __init__(self, address: NatsAddress) -> None:
        super().__init__()
        self._address = address
        self._trouble: Exception | None = None

    async def dial(
        self,
        on_message: Callable[[Msg], Awaitable[None]],
        on_loss: Callable[[], Awaitable[None]],
        on_return: Callable[[], Awaitable[None]],
    ) -> str:
        """Connect, and go on doing so; the inbox whose messages come. Raises InvalidParameter if servers refuse us."""
        address, tls = self._address, _tls(self._address)
        try:
            async with asyncio.timeout(address.timeout_seconds):
                await self.connect(
                    list(address.servers),
                    name=f"raydispatch {address.name}",
                    user=address.user,
                    password=address.password,
                    token=address.token,
                    user_credentials=address.creds,
                    tls=tls,
                    connect_timeout=CONNECT_SECONDS,
                    max_reconnect_attempts=-1,
                    reconnect_time_wait=RECONNECT_SECONDS,  # type: ignore[arg-type]  # It only sleeps that long.
                    ping_interval=PING_SECONDS,
                    error_cb=self._on_trouble,
                    disconnected_cb=on_loss,
                    reconnected_cb=on_return,
                )
                inbox = self.new_inbox()
                await self.subscribe(f"{inbox}.*", cb=on_message)
        except ModuleNotFoundError as error:
            raise MissingExtra(error.name or "nkeys", "nats") from None
        except BaseException as error:
            await self.hang_up()
            if isinstance(error, TimeoutError | errors.Error | OSError):
                raise not_connected(self._trouble or error, address) from None
            raise
        return inbox

    async def hang_up(self) -> None:
        """Close, whatever the server does."""
        try:
            async with asyncio.timeout(self._address.timeout_seconds):
                await self.close()
        except Exception as error:  # Whatever it is, nobody needs this connection any more.
            self._abort()
            _log.debug("journal line not closed", extra={"journal": self._address.name, "error": str(error)})

    async def _on_trouble(self, error: Exception) -> None:
        # A server that refuses a login hangs up, and its reason is not always read before that is seen.
        if self._trouble is None or not _is_refusal(self._trouble):
            self._trouble = error
        _log.debug("journal line in trouble", extra={"journal": self._address.name, "error": str(error)})

    def _connect_command(self) -> bytes:
        # nats-py encrypts if the server asks for it. Who asked for it here must not send a password in the open.
        if self._address.is_encrypted and not self._server_info.get("tls_required"):
            raise errors.SecureConnWantedError
        return super()._connect_command()

    async def _attempt_reconnect(self) -> None:
        # It would wait for a machine that is gone to take what was sent, as long as the kernel does: 15 minutes.
        self._abort()
        await super()._attempt_reconnect()

    def _abort(self) -> None:
        if (writer := getattr(self._transport, "_io_writer", None)) is not None:
            writer.transport.abort()


def not_connected(error: Exception, address: NatsAddress) -> InvalidParameter | JournalUnavailable:
    """The error for a connection that cannot be had, or has just broken."""
    reason = str(error).removeprefix("nats: ").strip("'") or type(error).__name__
    if isinstance(error, errors.SecureConnWantedError):
        return InvalidParameter(f"The server of the journal at {address.shown} does not encrypt.")
    if isinstance(error, ssl.SSLError):
        return InvalidParameter(f"The server of the journal at {address.shown} is not to be trusted: {reason}.")
    if _is_refusal(error):
        return InvalidParameter(f"The server of the journal at {address.shown} refuses this login: {reason}.")
    return JournalUnavailable(f"The journal '{address.name}' at {address.shown} cannot be reached: {reason}.")


def _is_refusal(error: Exception) -> bool:
    return "authorization" in str(error).lower()


def _tls(address: NatsAddress) -> ssl.SSLContext | None:
    if not address.is_encrypted:
        return None
    try:
        return ssl.create_default_context(cafile=address.tls_ca)
    except (OSError, ssl.SSLError) as error:
        raise InvalidParameter(f"tls_ca: {address.tls_ca} holds no certificate that can be used ({error}).") from None
