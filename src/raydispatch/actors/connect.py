"""Coming to a Ray cluster: to one that runs, or to one that lasts as long as a block."""

import logging
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib.util import find_spec

import ray
from ray._private.services import canonicalize_bootstrap_address
from ray.exceptions import RayError

from raydispatch.actors.java import use_java
from raydispatch.actors.names import NAMESPACE
from raydispatch.errors import MissingExtra, SystemUnavailable

ANSWER_SECONDS = 5.0
"""How long to wait for a cluster. Left alone, Ray asks at an address where nobody is for more than 10 minutes."""


def connect() -> None:
    """Connect to the cluster that RAY_ADDRESS names, or to the one of this machine; never start one."""
    if ray.is_initialized():
        return
    address = _found()
    try:
        ray.init(address="auto", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise SystemUnavailable(
            f"What answers at {address} does not let this process in ({error}). A Ray cluster may want its token "
            "(RAY_AUTH_MODE=token, and RAY_AUTH_TOKEN or RAY_AUTH_TOKEN_PATH), and the same versions of Ray and Python."
        ) from None


def join(address: str) -> None:
    """Make this process, a worker of Spark, one of a cluster; it must run on a node of it."""
    if ray.is_initialized():
        if ray.get_runtime_context().gcs_address == address:
            return
        ray.shutdown()
    try:
        _knock(address)
        ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError, RayError) as error:
        raise SystemUnavailable(
            f"A Spark worker on {socket.gethostname()} cannot join the Ray cluster at {address} ({error}). Spark's "
            "workers must run on nodes of the Ray cluster: spark_on_ray() starts them there."
        ) from None


def use_ray() -> None:
    """Connect to the cluster that RAY_ADDRESS names, or to the one of this machine; if there is none, start one."""
    if ray.is_initialized():
        return
    if _is_named():
        connect()
        return
    _prepare_java()
    ray.init(
        address="local", namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False
    )


def _is_named() -> bool:
    """Whether there is a cluster to connect to: named, or running here."""
    if address := os.environ.get("RAY_ADDRESS"):
        return address != "local"
    try:
        _found()
    except SystemUnavailable:
        return False
    return True


@contextmanager
def local_ray(num_cpus: int) -> Iterator[None]:
    """A Ray of our own on this machine, gone when the block ends, whatever else runs here."""
    _prepare_java()
    try:
        ray.init(
            address="local", num_cpus=num_cpus, include_dashboard=False, namespace=NAMESPACE, log_to_driver=False,
            logging_level=logging.ERROR,
        )  # fmt: skip
        yield
    finally:
        ray.shutdown()


def _prepare_java() -> None:
    """RayDP's Java actors run on the `java` that Ray finds when it starts; afterwards it is too late."""
    if find_spec("raydp") is not None:
        with suppress(MissingExtra):
            use_java()


def _found() -> str:
    """The address that Ray would connect to, if anybody listens there."""
    try:
        address: str | None = canonicalize_bootstrap_address("auto")
        if address is None:
            raise ConnectionError("RAY_ADDRESS=local means a new one")
        _knock(address)
    except (OSError, ValueError) as error:
        reason = str(error).split(". ")[0]  # What Ray says beyond that is advice for other commands.
        raise SystemUnavailable(
            f"There is no Ray cluster to connect to ({reason}). Start one on this machine with `ray start --head`, or "
            "name one that runs: RAY_ADDRESS=host:port."
        ) from None
    return address


def _knock(address: str) -> None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except OSError as error:
        raise ConnectionError(f"at {address}: {error.strerror or error}") from None
