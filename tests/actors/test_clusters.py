"""Systems on a cluster of two nodes, with token authentication, started by `ray start` as an operator would."""

import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from tempfile import mkdtemp

import pytest
from tests.actors.helping import wait_until

pytestmark = pytest.mark.slow

RAY = str(Path(sys.executable).parent / "ray")
STORE_BYTES = 80_000_000

TWO_NODES = """
import json
import ray
from raydispatch import DispatchEngine, Envelope, MessageCategory, Reply
from raydispatch.actors import DispatchSystem

engine = DispatchEngine("two-nodes")

async def where(envelope):
    return Reply(ray.get_runtime_context().get_node_id())

for name, resource in (("here", "node-1"), ("there", "node-2")):
    engine.dispatcher(
        name, topics=f"dev.{name}.events.*", category=MessageCategory.EVENT, resources={resource: 1}
    )(where)

with DispatchSystem.start(engine) as system:
    messages = [(f"dev.{('here', 'there')[i % 2]}.events.v1", Envelope(i)) for i in range(2_000)]
    results = list(system.dispatch_many(messages))
    assert all(result.is_successful() for result in results)
    nodes = {replica.node for one in system.status().dispatchers.values() for replica in one.replicas}
print(json.dumps({"messages": len(results), "nodes": len({r.reply.payload for r in results}), "status": len(nodes)}))
"""

LARGE = """
from collections import Counter
from raydispatch import DispatchEngine, Envelope, MessageCategory, Reply
from raydispatch.actors import DispatchSystem

engine = DispatchEngine("large")

@engine.dispatcher("sizes", topics="dev.*.events.*", category=MessageCategory.EVENT, replicas=2)
async def size(envelope):
    return Reply(len(envelope.payload))

with DispatchSystem.start(engine) as system:
    messages = (("dev.file.events.v1", Envelope(bytes(1_000_000), message_type="File")) for _ in range(300))
    results = list(system.dispatch_many(messages))
    print(Counter((str(result.status), result.reply and result.reply.payload) for result in results))
"""


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What the environment of a driver must be."""
    port, dashboard = free_port(), free_port()
    environment = {
        **os.environ,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": secrets.token_hex(32),
        "RAY_ADDRESS": f"127.0.0.1:{port}",
    }
    # Its own folder, since Ray notes there which cluster is the one of this machine; a short one, for names of sockets.
    folder = mkdtemp(prefix="rd-")
    head = [
        "--head",
        f"--temp-dir={folder}",
        f"--port={port}",
        "--include-dashboard=true",
        f"--dashboard-port={dashboard}",
    ]
    nodes = []
    try:
        for place, resource in ((head, "node-1"), ([f"--address=127.0.0.1:{port}"], "node-2")):
            log = tmp_path_factory.mktemp("node") / "log"
            nodes.append(node(place, resource, environment, log))
            wait_until(lambda log=log: "Ray runtime started" in log.read_text(), 60)  # type: ignore[misc]
        environment["DASHBOARD"] = f"http://127.0.0.1:{dashboard}"
        wait_until(lambda: answers(environment["DASHBOARD"]), 60)
        yield environment
    finally:
        for process in nodes:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait(30)
        shutil.rmtree(folder, ignore_errors=True)


def node(place: list[str], resource: str, environment: dict[str, str], log: Path) -> "subprocess.Popen[bytes]":
    command = [RAY, "start", *place, "--num-cpus=2", f'--resources={{"{resource}": 4}}', "--block"]
    command += ["--node-ip-address=127.0.0.1", f"--object-store-memory={STORE_BYTES}", "--disable-usage-stats"]
    # Not the address: `ray start --head` refuses to start where one is named.
    without = {name: value for name, value in environment.items() if name != "RAY_ADDRESS"}
    with log.open("wb") as file:
        return subprocess.Popen(command, env=without, stdout=file, stderr=file, start_new_session=True)


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        found: int = listener.getsockname()[1]
        return found


def answers(address: str) -> bool:
    try:
        urllib.request.urlopen(f"{address}/api/version", timeout=5)
    except urllib.error.HTTPError:
        return True  # It wants the token.
    except OSError:
        return False
    return True


def run(environment: dict[str, str], *command: str) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)


def test_a_job_runs_a_system_over_two_nodes(cluster: dict[str, str], tmp_path: Path) -> None:
    program = tmp_path / "job.py"
    program.write_text(TWO_NODES)

    submit = (RAY, "job", "submit", "--address", cluster["DASHBOARD"], "--", sys.executable, str(program))
    done = run(cluster, *submit)
    for _ in range(20):
        # The part of a new cluster that takes jobs comes up last.
        if "No available agent" in done.stderr:
            done = run(cluster, *submit)

    assert '{"messages": 2000, "nodes": 2, "status": 2}' in done.stdout, done.stdout + done.stderr


def test_payloads_larger_than_the_object_stores_arrive(cluster: dict[str, str]) -> None:
    done = run(cluster, sys.executable, "-c", LARGE)

    assert done.stdout == "Counter({('success', 1000000): 300})\n", done.stdout + done.stderr


def test_without_the_token_nobody_gets_in(cluster: dict[str, str]) -> None:
    program = "from raydispatch.actors import DispatchSystem; DispatchSystem.attach('two-nodes')"
    stranger = {**cluster, "RAY_AUTH_TOKEN": secrets.token_hex(32)}

    done = run(stranger, sys.executable, "-c", program)

    assert done.returncode != 0
    assert "may want its token" in done.stderr
