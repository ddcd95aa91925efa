"""One local Ray for the whole run of tests; only those that ask for it start it."""

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def ray_cluster() -> Iterator[None]:
    """A real Ray on this machine, with processes of its own."""
    import ray

    ray.init(
        address="local",
        num_cpus=4,
        resources={"disk": 2},
        namespace="raydispatch",
        include_dashboard=False,
        log_to_driver=False,
        logging_level="ERROR",
    )
    yield
    ray.shutdown()
