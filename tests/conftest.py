"""One local Ray and one Spark for the whole run of tests; only those that ask for them start them."""

import signal
from collections.abc import Iterator
from typing import Any

import pytest

# A shell makes what runs in its background ignore Ctrl-C, and so everything that it starts. Some tests send it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A real Ray on this machine, with processes of its own."""
    import ray

    from raydispatch.actors.java import use_java

    use_java()
    ray.init(
        address="local",
        num_cpus=6,
        resources={"disk": 2},
        namespace="raydispatch",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()


@pytest.fixture(scope="session")
def spark(ray_cluster: None) -> Iterator[Any]:
    """A real Spark, with an executor of its own on that Ray."""
    from raydispatch.spark import spark_on_ray

    with spark_on_ray(executors=1, cores=2, memory="1g", config={"spark.sql.shuffle.partitions": "2"}) as session:
        yield session
