"""What links over Ray do besides what all links do: joining, dying machines, the object store,
ports, tokens.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from muster.cluster.link import Block, LinkLost
from muster.errors import BadOption
from tests.fakes.link_nodes import pattern
from tests.fakes.ray_cluster import (
    NODE,
    cluster,
    environment,
    leave,
    needs_ray,
    ray_cluster,  # noqa: F401 (a fixture)
)

pytestmark = [needs_ray, pytest.mark.slow, pytest.mark.usefixtures("ray_cluster")]
NODES = "tests.fakes.link_nodes:"


@pytest.fixture
def nodes():
    """Open a carrier whose nodes run a function of ``link_nodes.py``."""
    with contextlib.ExitStack() as stack:

        def start(function, count=1, **options):
            from muster.cluster.ray_nodes import Actors, ray_carrier

            deadline_s = options.pop("deadline_s", 15.0)
            transport = options.pop("transport", "ray")
            actors = Actors(**{"count": count, "target": NODES + function, **options})
            carrier = ray_carrier(transport, actors, deadline_s)
            stack.callback(carrier.close)
            connect = carrier.connect

            def connecting(*args):
                link = connect(*args)
                stack.callback(link.close)
                return link

            carrier.connect = connecting
            return carrier

        yield start


def connected(carrier, node=0, epoch=0, within_s=90.0):
    return carrier.connect(node, epoch, within_s, threading.Event())


class TestJoining:
    def test_is_waited_for_while_resources_lack_and_then_says_which(self, nodes):
        carrier = nodes("echo", remote_configs={"num_cpus": 1000})
        with pytest.raises(
            LinkLost,
            match=r"Node 0 .* within 1 s.*'num_cpus': 1000.*CPU 4.*remote_configs",
        ):
            connected(carrier, within_s=1.0)

    def test_given_up(self, nodes):
        carrier = nodes("echo", remote_configs={"num_cpus": 1000})
        given_up = threading.Event()
        threading.Timer(0.3, given_up.set).start()
        begin = time.monotonic()
        with pytest.raises(LinkLost, match="given up"):
            carrier.connect(0, 0, 60.0, given_up)
        assert time.monotonic() - begin < 40

    def test_fails_at_once_with_the_reason(self, nodes):
        with pytest.raises(
            LinkLost,
            match=r"^Node 0 has not joined: .*No module named 'tests.fakes.no_such'\.$",
        ):
            connected(nodes("", target="tests.fakes.no_such:thing"))

    def test_agent_that_fails_is_quoted(self, nodes):
        link = connected(nodes("sender"))
        link.send(b"no numbers at all")
        with pytest.raises(
            LinkLost, match="its agent failed: ValueError: invalid literal"
        ):
            link.receive()

    def test_says_where_nodes_are(self, nodes):
        carrier = nodes("introduced", count=2)
        pids = [
            connected(carrier, node).receive().message.split()[1].decode()
            for node in range(2)
        ]
        states = [carrier._started.get(node).state.split() for node in range(2)]
        assert [words[-1] for words in states] == pids
        assert states[0][4] != states[1][4]  # spread over the machines


class TestMachines:
    def test_node_of_a_dead_machine_joins_on_another(self, nodes, ray_cluster):  # noqa: F811
        spot = NODE | {"resources": {"spot": 1}}
        machine = ray_cluster.add_node(**spot)
        carrier = nodes(
            "introduced", remote_configs={"num_cpus": 1, "resources": {"spot": 1}}
        )
        link = connected(carrier)
        first = link.receive().message
        ray_cluster.remove_node(machine, allow_graceful=False)
        with pytest.raises(LinkLost, match="node 0 .* is lost"):
            link.receive()
        link.close()
        seconds = []

        def join():
            again = connected(carrier, epoch=1)
            seconds.append(time.monotonic())
            assert again.receive().message != first
            again.close()

        joining = threading.Thread(target=join)
        joining.start()  # while Ray still believes that the dead machine lives
        machine = ray_cluster.add_node(**spot)
        up = time.monotonic()
        joining.join()
        assert seconds[0] - up < 15  # 2 to 3 on a machine that is not too busy
        carrier.close()
        ray_cluster.remove_node(machine)

    def test_a_block_for_many_nodes_is_stored_once(self, nodes):
        carrier = nodes("echo", count=2)
        links = [connected(carrier, node) for node in range(2)]
        block = Block(pattern(1_000_000, 3))
        for link in links:
            link.send(b"weights", block, 1)
            assert (link.receive().block == block.array).all()
        assert len(carrier._blocks._refs) == 1
        links[0].send(b"others", Block(pattern(1_000_000, 4)), 2)
        assert (links[0].receive().block == pattern(1_000_000, 4)).all()
        assert list(carrier._blocks._refs) == [block]

    @pytest.mark.timeout(300)
    def test_nothing_is_left_in_the_object_store(self, nodes, ray_cluster):  # noqa: F811
        link = connected(
            nodes("echo", deadline_s=90.0)
        )  # counting takes long where a machine has died
        size = 1_000_000
        memory = np.zeros(size, np.uint8)
        for tag in range(1, 201):
            link.expect(tag, memory)
            link.send(b"block", Block(pattern(size, tag)), tag)
            assert (link.receive().block == pattern(size, tag)).all()
        deadline = time.monotonic() + 60
        while (left := _objects(ray_cluster)) > 4:
            assert time.monotonic() < deadline, f"{left} objects are left"


def _objects(made):
    """In all stores together; infinite as long as Ray asks a machine that has just been removed."""
    import grpc
    from ray._private.internal_api import memory_summary

    try:
        text = memory_summary(address=made.address, stats_only=True)
    except grpc.RpcError as error:
        if error.code() is not grpc.StatusCode.UNAVAILABLE:
            raise
        return float("inf")
    return int(text.split(" objects")[0].split()[-1])


class TestShutdown:
    @pytest.mark.parametrize("joins_again", [False, True])
    def test_of_ray_by_the_user_loses_links_and_starts_nothing(
        self, nodes, joins_again
    ):
        import ray

        carrier = nodes("echo", deadline_s=60.0)
        link = connected(carrier)
        link.send(b"hello")
        assert link.receive().message == b"hello"
        ends = []

        def receive():
            try:
                link.receive()
            except BaseException as error:  # noqa: BLE001 (Ray raises SystemExit)
                ends.append(error)

        receiving = threading.Thread(target=receive, daemon=True)
        receiving.start()
        begin = time.monotonic()
        leave()
        if joins_again:  # another session of Ray, which does not know the actor
            cluster()
        receiving.join(30)
        assert [type(error) for error in ends] == [LinkLost]
        for call in (lambda: link.send(b"more"), link.receive):
            with pytest.raises(LinkLost, match="Ray was shut down"):
                call()
        link.close()
        assert time.monotonic() - begin < 30
        assert ray.is_initialized() == joins_again
        carrier.close()
        assert ray.is_initialized() == joins_again


class TestOptions:
    @pytest.mark.parametrize(
        ("configs", "match"),
        [
            ([{"num_cpus": 1}], "1 entries for 2 nodes"),
            ({"max_restarts": 3}, "max_restarts, which Muster sets"),
            ({"num_cpu": 3}, "node 0: .*num_cpu"),
            (
                [{}, {"enable_tensor_transport": True}],
                "Ray Direct Transport .* object store",
            ),
        ],
    )
    def test_bad_remote_configs(self, nodes, configs, match):
        with pytest.raises(BadOption, match=match):
            nodes("echo", count=2, remote_configs=configs)

    def test_defaults(self, nodes):
        carrier = nodes("echo")
        assert carrier._places.configs == [
            {"scheduling_strategy": "SPREAD", "num_cpus": 1, "memory": 2 * 1024**3}
        ]

    def test_one_config_per_node(self, nodes):
        carrier = nodes(
            "introduced", count=2, remote_configs=[{"num_cpus": 1}, {"num_cpus": 1000}]
        )
        assert connected(carrier, 0).receive().message.startswith(b"0 ")
        with pytest.raises(LinkLost, match="Node 1 has not joined .* not started"):
            connected(carrier, 1, within_s=1.0)

    def test_clients_are_refused_also_where_ray_runs(self, nodes):
        with pytest.raises(BadOption, match="'ray://somewhere:10001', a Ray client"):
            nodes("echo", ray_init_config={"address": "ray://somewhere:10001"})

    def test_no_port_besides_rays_is_opened(self, nodes):
        import psutil

        def listening():
            connections = psutil.Process().net_connections("inet")
            return {
                one.laddr.port
                for one in connections
                if one.status == psutil.CONN_LISTEN
            }

        before = listening()
        direct = nodes("introduced", transport="direct")
        assert len(listening() - before) == 1
        direct.close()
        link = connected(nodes("introduced"))
        link.receive()
        assert listening() <= before

    def test_a_ray_of_the_users_is_left_running(self, nodes):
        import ray

        nodes("echo").close()
        assert ray.is_initialized()


class TestEngine:
    @pytest.mark.parametrize("transport", ["ray", "direct"])
    def test_is_named_where_actors_are_on_two_machines(self, transport, capsys):
        from muster import RayCollector
        from muster.cli.main import main
        from muster.episodes.curve import EpisodeTotals
        from muster.observing.snapshots import snapshot
        from muster.testing import CountingEnv

        with RayCollector(
            [CountingEnv] * 2,
            frames_per_batch=8,
            transport=transport,
            sync=True,
            remote_configs={"num_cpus": 1, "memory": 2**28},
        ) as collector:
            collector.next()
            carrier = collector._nodes.carrier
            states = [carrier._started.get(node).state.split() for node in range(2)]
            assert states[0][4] != states[1][4]  # Ray nodes
            stats = collector.stats()
        assert stats.engine == transport
        assert stats.nodes == 2
        assert (
            f">engine</th><td style='text-align:left'>{transport}</td>"
            in stats._repr_html_()
        )
        assert snapshot(stats, EpisodeTotals())["engine"] == transport
        assert main(["cluster"]) == 0
        assert "engine: ray, or direct" in capsys.readouterr().out


def listens(host, port):
    with contextlib.suppress(OSError), socket.create_connection((host, port), 1.0):
        return True
    threading.Event().wait(0.1)
    return False


def run(program, surroundings, timeout=100):
    """Run a program in a Python of its own; what it prints last, as JSON."""
    env = {
        name: value for name, value in os.environ.items() if not name.startswith("RAY_")
    }
    env |= surroundings | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        env=env,
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


WRONG_TOKEN = """
import json, sys
from muster.cluster.ray_nodes import Actors, ray_carrier
try:
    config = {{"address": "{address}", "log_to_driver": False}}
    ray_carrier("ray", Actors(count=1, ray_init_config=config))
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""

NO_TOKEN = """
import json
from muster.cluster.ray_nodes import Actors, ray_carrier
config = {{"address": "{address}", "log_to_driver": False}}
try:
    target = "tests.fakes.link_nodes:introduced"
    carrier = ray_carrier("ray", Actors(count=1, ray_init_config=config, target=target))
    import threading
    carrier.connect(0, 0, 90.0, threading.Event()).receive()
    carrier.close()
    print(json.dumps(["joined", ""]))
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
"""

CLIENT = """
import json, ray
from muster.cluster.ray_runtime import Lease
ray.init("{address}", log_to_driver=False)
try:
    Lease()
except Exception as error:
    print(json.dumps([type(error).__name__, str(error)]))
ray.shutdown()
"""

OWN_RAY = """
import json, threading
import psutil, ray
from muster.cluster.ray_nodes import Actors, ray_carrier
config = {"address": "local", "num_cpus": 2, "object_store_memory": 100 * 2**20, "log_to_driver": False}
actors = Actors(count=1, ray_init_config=config, target="tests.fakes.link_nodes:introduced")
carrier, second = (ray_carrier("ray", actors) for _ in range(2))
link = carrier.connect(0, 0, 90.0, threading.Event())
link.receive()
processes = [psutil.Process(), *psutil.Process().children(recursive=True)]
listening = sorted({c.laddr.ip for p in processes for c in p.net_connections("inet") if c.status == "LISTEN"})
dashboard = ray._private.worker._global_node.webui_url
link.close()
carrier.close()
still = ray.is_initialized()
second.close()
print(json.dumps([listening, dashboard, still, ray.is_initialized()]))
"""


class TestCluster:
    def test_of_the_tests_is_no_part_of_this_process(self, ray_cluster):  # noqa: F811
        import psutil
        import ray

        def sockets():
            return {
                one.raddr
                for one in psutil.Process().net_connections("tcp")
                if one.status == "ESTABLISHED"
            }

        assert len(ray.nodes()) >= 2
        leave()
        assert not ray.is_initialized()
        assert len(sockets()) <= 1  # Ray keeps the one to its GCS
        assert not {"raylet", "gcs_server"} & {
            child.name() for child in psutil.Process().children(recursive=True)
        }
        assert cluster() is ray_cluster
        assert len(ray.nodes()) >= 2

    def test_wrong_token_is_refused_with_what_to_do(self, ray_cluster, tmp_path):  # noqa: F811
        (tmp_path / "token").write_text("00" * 32)
        surroundings = environment(ray_cluster.folder) | {
            "RAY_AUTH_TOKEN_PATH": str(tmp_path / "token")
        }
        kind, text = run(WRONG_TOKEN.format(address=ray_cluster.address), surroundings)
        assert kind == "BadOption"
        assert "token" in text
        assert "RAY_AUTH_TOKEN_PATH" in text

    def test_without_a_token_a_cluster_that_has_one_is_not_joined(
        self,
        ray_cluster,  # noqa: F811
        tmp_path,
    ):
        surroundings = {
            "RAY_TMPDIR": str(tmp_path),
            "HOME": str(tmp_path),
            "RAY_AUTH_MODE": "disabled",
        }
        kind, text = run(NO_TOKEN.format(address=ray_cluster.address), surroundings)
        assert kind == "BadOption"
        assert "RAY_AUTH_MODE=token" in text

    def test_its_token_lets_another_process_in(self, ray_cluster):  # noqa: F811
        kind, text = run(
            NO_TOKEN.format(address=ray_cluster.address),
            environment(ray_cluster.folder),
        )
        assert (kind, text) == ("joined", "")

    def test_clients_of_the_users_are_refused(self, ray_cluster):  # noqa: F811
        with socket.create_server(("127.0.0.1", 0)) as found:
            port = found.getsockname()[1]
        argv = [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--address",
            ray_cluster.address,
        ]
        server = subprocess.Popen(
            [
                sys.executable,
                "-m",
                "ray.util.client.server",
                *argv,
                "--mode",
                "specific-server",
            ],
            env=os.environ
            | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},  # 127.0.0.1 stays what it is
            stderr=subprocess.DEVNULL,
        )
        try:
            deadline = time.monotonic() + 60
            while not listens("127.0.0.1", port):
                assert time.monotonic() < deadline
                assert server.poll() is None
            kind, text = run(
                CLIENT.format(address=f"ray://127.0.0.1:{port}"),
                environment(ray_cluster.folder),
            )
        finally:
            server.kill()
            server.wait()
        assert kind == "BadOption"
        assert "connected to a Ray cluster as a client" in text

    def test_of_its_own_listens_on_loopback_and_ends_with_its_last_user(
        self,
        ray_cluster,  # noqa: F811
    ):
        listening, dashboard, still, after = run(
            OWN_RAY, environment(ray_cluster.folder)
        )
        assert {ip.removeprefix("::ffff:") for ip in listening} == {"127.0.0.1"}
        assert not dashboard
        assert still
        assert not after
