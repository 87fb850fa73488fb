"""Real Flower processes on loopback, with TLS and node keys: they work, strangers stay out, and none is left over.

The app here knows neither torch nor fedu2: a node answers with its partition and with how often it was asked before.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

pytest.importorskip("cryptography")

from fedu2.errors import TrainingError, UsageError
from fedu2.federation.flower import deployment as module
from fedu2.federation.flower.deployment import Deployment, config_text
from fedu2.federation.flower.keys import make_keys, make_node_keys
from fedu2.federation.flower.process import Process

needs_flower = pytest.mark.skipif(importlib.util.find_spec("flwr") is None, reason="needs Flower")
needs_proc = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")

LONGEST = 180  # seconds that a step may take on a busy machine before it counts as hanging

APP = {
    "pyproject.toml": """
        [project]
        name = "roll-call"
        version = "1.0.0"
        [tool.flwr.app]
        publisher = "nobody"
        [tool.flwr.app.components]
        serverapp = "roll.server:app"
        clientapp = "roll.client:app"
        [tool.flwr.app.config]
        nodes = 2
        lost = 0
        rounds = 2
        seconds = 0.0
        word = ""
    """,
    "roll/__init__.py": "",
    "roll/server.py": """
        import json, time
        from flwr.app import ConfigRecord, Message, RecordDict
        from flwr.serverapp import ServerApp

        app = ServerApp()

        @app.main()
        def main(grid, context):
            config = context.run_config
            print("word", config["word"])
            while len(nodes := list(grid.get_node_ids())) < config["nodes"]:
                time.sleep(0.2)
            for round_ in range(config["rounds"]):
                last = round_ == config["rounds"] - 1
                ask = RecordDict({"ask": ConfigRecord({"seconds": config["seconds"] if last else 0.0})})
                asked = [Message(ask, dst_node_id=node, message_type="query") for node in nodes]
                waiting, valid = set(grid.push_messages(asked)), 0
                while valid < len(nodes) - (config["lost"] if last else 0):
                    for reply in grid.pull_messages(waiting):
                        waiting.remove(reply.metadata.reply_to_message_id)
                        if not reply.has_error():
                            answer, valid = reply.content["answer"], valid + 1
                            print("answer", json.dumps([round_, answer["partition"], answer["seen"]]))
                    time.sleep(0.2)
    """,
    "roll/client.py": """
        import time
        from flwr.app import ConfigRecord, Message, RecordDict
        from flwr.clientapp import ClientApp

        app = ClientApp()

        @app.query()
        def query(message, context):
            seen = context.state["seen"]["count"] if "seen" in context.state else 0
            context.state["seen"] = ConfigRecord({"count": seen + 1})
            print("at work", flush=True)
            time.sleep(message.content["ask"]["seconds"])
            answer = {"partition": context.node_config["partition-id"], "seen": seen}
            return Message(RecordDict({"answer": ConfigRecord(answer)}), reply_to=message)
    """,
}

HOLDER = """
    import sys
    from pathlib import Path
    from fedu2.federation.flower.deployment import Deployment

    with Deployment(Path(sys.argv[1]), [{"partition-id": 0}]) as deployment:
        deployment.run(Path(sys.argv[2]), {"nodes": 1, "rounds": 1, "seconds": 600.0})
"""

RESTLESS = """
    import subprocess, sys, time

    code = "import os, subprocess, sys, time; subprocess.Popen(sys.argv[1:]); print('up', flush=True); time.sleep(600)"
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    subprocess.Popen([sys.executable, "-c", code, *sleep], start_new_session=True)
    time.sleep(600)
"""  # a child in a session of its own, and a grandchild


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("app")
    for name, text in APP.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(textwrap.dedent(text))
    return folder


def _alive(folder: Path) -> set[int]:
    """The processes of a deployment: all have its folder in their environment, whoever started them."""
    found = set()
    for environment in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # it has ended, or is not ours
            if f"FLWR_HOME={folder}".encode() in environment.read_bytes():
                found.add(int(environment.parent.name))
    return found


def _is_there(ask: Callable[[int, int], None], number: int) -> bool:
    """Whether a process (os.kill) or a process group (os.killpg) exists."""
    try:
        ask(number, 0)
    except ProcessLookupError:
        return False
    return True


class Census:
    """The processes and process groups of a deployment, as far as they were seen."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.pids, self.groups = folder, set[int](), set[int]()

    def take(self) -> None:
        for pid in _alive(self.folder):
            with contextlib.suppress(ProcessLookupError):
                self.groups.add(os.getpgid(pid))
                self.pids.add(pid)

    def survivors(self) -> set[int]:
        pids = {pid for pid in self.pids if _is_there(os.kill, pid)}
        groups = {group for group in self.groups if _is_there(os.killpg, group)}
        return _alive(self.folder) | pids | groups


def _until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + LONGEST
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.05)


def _answers(lines: list[str]) -> set[tuple[int, int, int]]:
    """(round, partition, how often it had been asked before) of every answer."""
    return {tuple(json.loads(line.removeprefix("answer "))) for line in lines if line.startswith("answer ")}


@pytest.mark.slow
@needs_flower
@needs_proc
def test_rounds_over_tls_with_node_keys_and_a_node_that_is_killed_at_work(app: Path, tmp_path: Path) -> None:
    census, lines = Census(tmp_path), list[str]()
    with Deployment(tmp_path, [{"partition-id": i} for i in range(2)]) as deployment:

        def kill_in_the_last_round() -> None:
            _until(lambda: deployment.node(1).output().count("at work") == 2)
            census.take()
            deployment.kill_node(1)

        killer = threading.Thread(target=kill_in_the_last_round)
        killer.start()
        config = {"word": "a b=c", "lost": 1, "seconds": 5.0}
        end = deployment.run(app, config, lines.append, timeout=LONGEST)
        killer.join()
        census.take()
    assert end.completed, lines
    assert "word a b=c" in lines
    two_rounds = {(round_, node, round_) for round_ in range(2) for node in range(2)}
    assert _answers(lines) == two_rounds - {(1, 1, 1)}
    assert len(census.pids) >= 3 * 3  # the SuperLink and two nodes: a guard, a program and a SuperExec each
    assert not census.survivors()


@pytest.mark.slow
@needs_flower
@needs_proc
def test_strangers_are_refused_known_nodes_come_back_and_an_exception_leaves_no_process(tmp_path: Path) -> None:
    census = Census(tmp_path)

    def block() -> None:
        with Deployment(tmp_path, [{"partition-id": 0}], durable=True) as deployment:
            _refuse_strangers(deployment)
            before = deployment.node(0)
            assert before.code is None  # nobody has taken its place
            deployment.kill_link()
            deployment.restart_link()
            deployment.restart_node(0)  # it is still registered
            assert before.code is not None
            assert deployment.node(0).code is None
            census.take()
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        block()
    assert len(census.pids) >= 2 * 3
    assert not census.survivors()


def _refuse_strangers(deployment: Deployment) -> None:
    key, root, keys = "--auth-supernode-private-key", "--root-certificates", deployment.keys
    stranger = make_node_keys(deployment.folder / "stranger", ["stranger"]).nodes["stranger"]
    wrong = make_keys(deployment.folder / "wrong", []).ca
    refused = {  # the options of a SuperNode, and why it is refused
        "unregistered": ([root, keys.ca, key, stranger], "[code: 2004]"),
        "keyless": ([root, keys.ca], "[code: 2001]"),
        "misled": ([root, wrong, key, keys.nodes["node-0"]], "CERTIFICATE_VERIFY_FAILED"),
        "in-clear": (["--insecure", key, keys.nodes["node-0"]], "Exit Code: 303"),
    }
    ports = module._free_ports(len(refused))
    nodes = [
        deployment.supernode(name, *map(str, options), "--port", str(port))
        for port, (name, (options, _)) in zip(ports, refused.items(), strict=True)
    ]
    for node, (_, why) in zip(nodes, refused.values(), strict=True):
        assert node.wait(LONGEST) not in (None, 0)
        assert why in node.output()
        assert "SuperNode ID:" not in node.output()


@pytest.mark.slow
@needs_flower
@needs_proc
@pytest.mark.parametrize("way", [signal.SIGKILL, signal.SIGINT])
def test_no_process_outlives_kill_9_or_ctrl_c(app: Path, tmp_path: Path, way: signal.Signals) -> None:
    census, log = Census(tmp_path), tmp_path / "logs" / "node-0.log"
    command = [sys.executable, "-c", textwrap.dedent(HOLDER), str(tmp_path), str(app)]
    with subprocess.Popen(command, stderr=subprocess.PIPE) as holder:
        try:
            _until(lambda: holder.poll() is not None or (log.exists() and b"at work" in log.read_bytes()))
            census.take()
        finally:
            holder.send_signal(way)
        assert holder.wait(LONGEST) == -way  # Python ends by SIGINT, too, when nobody handles KeyboardInterrupt
    assert len(census.pids) >= 9  # SuperLink and SuperNode: a guard, a program, a SuperExec and an app each; flwr run
    if way == signal.SIGINT:
        assert not census.survivors()  # the block was left properly
    _until(lambda: not census.survivors())


@needs_flower
@needs_proc
def test_a_start_that_fails_says_which_process_and_why(tmp_path: Path) -> None:
    deployment = Deployment(tmp_path, [{"partition-id": 0}])
    port = int(deployment.address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)), pytest.raises(TrainingError, match="did not start") as error:
        deployment.__enter__()
    assert "superlink" in str(error.value)
    assert "address already in use" in str(error.value)
    assert str(tmp_path / "logs" / "superlink.log") in str(error.value)
    assert not _alive(tmp_path)


@needs_proc
@pytest.mark.parametrize("way", ["end", "kill"])
def test_a_process_ends_with_children_that_have_left_its_session(tmp_path: Path, way: str) -> None:
    home = {**os.environ, "FLWR_HOME": str(tmp_path)}
    process = Process([sys.executable, "-c", textwrap.dedent(RESTLESS)], home, tmp_path / "log")
    try:
        _until(lambda: "up" in process.output())
        _until(lambda: len(_alive(tmp_path)) == 4)  # the guard, and three generations
    finally:
        getattr(process, way)()
        process.wait()
    assert not _alive(tmp_path)


@needs_proc
def test_a_process_that_ends_by_itself_takes_its_children_along_and_hands_on_its_code(tmp_path: Path) -> None:
    home = {**os.environ, "FLWR_HOME": str(tmp_path)}
    leaves = "import subprocess, sys; subprocess.Popen(sys.argv[1:], start_new_session=True); print('bye'); sys.exit(7)"
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    process = Process([sys.executable, "-c", leaves, *sleep], home, tmp_path / "log")
    assert process.wait(LONGEST) == 7
    assert process.output() == "bye\n"
    assert not _alive(tmp_path)


@needs_proc
def test_a_program_does_not_outlive_its_guard(tmp_path: Path) -> None:
    home = {**os.environ, "FLWR_HOME": str(tmp_path)}
    program = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
    process = Process(program, home, tmp_path / "log")
    _until(lambda: "up" in process.output())
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    _until(lambda: not _alive(tmp_path))


def test_configurations_as_flower_reads_them() -> None:
    text = config_text({"partition-id": 3, "data": "/images of/a site", "half": True, "lr": 0.5, "say": 'a "b"'})
    assert text == """partition-id=3 data="/images of/a site" half=true lr=0.5 say='a "b"'"""
    if importlib.util.find_spec("flwr"):
        from flwr.common.config import parse_config_args

        read = {"partition-id": 3, "data": "/images of/a site", "half": True, "lr": 0.5, "say": 'a "b"'}
        assert parse_config_args([text]) == read


@pytest.mark.parametrize("value", ['it\'s "both"', "two\nlines"])
def test_what_flower_cannot_be_told_is_refused(value: str) -> None:
    with pytest.raises(UsageError, match="Flower cannot be told"):
        config_text({"word": value})


def test_a_deployment_needs_nodes(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="at least one node"):
        Deployment(tmp_path, [])


def test_only_a_durable_link_is_restarted(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="has forgotten its nodes"):
        Deployment(tmp_path, [{"partition-id": 0}]).restart_link()


def test_a_deployment_without_flower_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.shutil, "which", lambda *_, **__: None)
    with pytest.raises(UsageError, match=r"pip install 'fedu2\[flower\]'"):
        Deployment(tmp_path, [{"partition-id": 0}]).__enter__()
