"""A whole Flower deployment on this machine, secured as a real one is: TLS, and a key for every node.

    with Deployment(folder, [{"partition-id": 0}, {"partition-id": 1}]) as deployment:
        end = deployment.run(app, {"rounds": 2}, print)

Each of Flower's programs is started by a guard (guard.py), which ends with this process and ends all that they started.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import socket
import ssl
import sysconfig
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from fedu2.errors import TrainingError, UsageError
from fedu2.federation.flower.keys import make_keys
from fedu2.federation.flower.process import Process
from fedu2.files import write_atomically

__all__ = ["Config", "Deployment", "Exit", "config_text"]

Config = Mapping[str, str | int | float | bool]
"""What `--node-config` and `--run-config` say."""

HOST = "127.0.0.1"
NAME = "deployment"  # of the connection, in Flower's config.toml
PORTS = range(20_000, 32_000)  # below those that systems hand to outgoing connections
IN_USE = 75.0  # seconds after which the key of a killed node is surely free again
BETWEEN_TRIES = 3.0
QUIET = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
QUICK = {"FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1", "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.2"}

Listener = Callable[[str], object]


@dataclass(frozen=True)
class Exit:
    """How a run ended. status: as `flwr list` has it, such as finished:completed or finished:failed."""

    status: str
    run: int | None = None

    @property
    def completed(self) -> bool:
        return self.status == "finished:completed"


class Deployment:
    """A SuperLink, and a SuperNode for each of `nodes`, the nodes' configurations.

    folder: where everything goes: keys/, logs/ and Flower's own files in flower/, so that ~/.flwr is left alone.
    environment: further variables for Flower's processes, such as OMP_NUM_THREADS.
    patience: seconds for each step of the start.
    durable: the SuperLink keeps what it knows in a file, so that it can be killed and restarted; messages are slower.
    """

    def __init__(
        self,
        folder: Path,
        nodes: Sequence[Config],
        *,
        environment: Mapping[str, str] | None = None,
        patience: float = 90.0,
        durable: bool = False,
    ) -> None:
        if not nodes:
            raise UsageError("a deployment has at least one node")
        self.folder, self.configs = folder.resolve(), list(nodes)
        self.patience, self.durable = patience, durable
        self._further = dict(environment or {})
        self._ports = _free_ports(1 + len(self.configs))
        self._processes: dict[str, Process] = {}

    def __enter__(self) -> Deployment:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    @property
    def address(self) -> str:
        """The SuperLink's."""
        return f"{HOST}:{self._ports[0]}"

    def run(
        self, app: Path, config: Config | None = None, listener: Listener = print, *, timeout: float | None = None
    ) -> Exit:
        """Run a Flower app to its end; every line that `flwr run --stream` prints goes to `listener`."""
        overrides = ["--run-config", config_text(config)] if config else []
        process = self._flwr("run", "run", str(app.resolve()), NAME, "--stream", *overrides)
        number = None
        try:
            for line in process.lines(timeout):
                number = number or _run_number(line)
                listener(line)
        finally:
            process.end()
            process.wait()
        if number is None:
            raise process.trouble("the app was not run")
        return Exit(self._status(number), number)

    def node(self, i: int) -> Process:
        """The SuperNode of the i-th configuration."""
        return self._processes[f"node-{i}"]

    def kill_node(self, i: int) -> None:
        """What a site's power failure is to the others: its processes are gone, and nobody was told."""
        self.node(i).kill()

    def restart_node(self, i: int) -> None:
        """Start a node's SuperNode anew, with the key and the configuration that it had.

        One that was killed is refused for up to a minute: the SuperLink takes its key to be in use until it has missed
        two heartbeats.
        """
        self.node(i).end()
        self.node(i).wait()
        deadline = time.monotonic() + max(self.patience, IN_USE)
        while True:
            self._start_node(i)
            try:
                return self._wait_for_node(i)
            except TrainingError:
                if time.monotonic() > deadline:
                    raise
                time.sleep(BETWEEN_TRIES)

    def kill_link(self) -> None:
        """The end of the server's machine, with the app that it runs."""
        self._processes["superlink"].kill()

    def restart_link(self) -> None:
        """Start a durable SuperLink anew; nodes come back to it by themselves, the app's run does not."""
        if not self.durable:
            raise UsageError("a SuperLink that is not durable has forgotten its nodes")
        self._processes["superlink"].end()
        self._processes["superlink"].wait()
        self._start_link()

    def supernode(self, name: str, *options: str) -> Process:
        """A SuperNode with these options beside those that name the SuperLink; it is stopped with the others."""
        return self._program(name, "flower-supernode", "--superlink", self.address, *options)

    def stop(self) -> None:
        """End every process, and wait until all are gone."""
        processes = list(self._processes.values())
        for process in processes:
            process.end()  # all of them first: should the wait be interrupted, they end nevertheless
        for process in processes:
            process.wait()

    def _start(self) -> None:
        names = [f"node-{i}" for i in range(len(self.configs))]
        self.keys = make_keys(self.folder / "keys", names, force=True)  # of this deployment alone
        connection = {"address": self.address, "root-certificates": str(self.keys.ca)}
        lines = [f"[superlink.{NAME}]", *(f"{key} = {_value(text)}" for key, text in connection.items())]
        write_atomically(self.folder / "flower" / "flwr" / "config.toml", "\n".join(lines) + "\n")
        for stale in self.folder.glob("state.db*"):
            stale.unlink()
        self._start_link()
        self._register(names)
        for i in range(len(names)):
            self._start_node(i)
        for i in range(len(names)):
            self._wait_for_node(i)

    def _start_link(self) -> None:
        keys = self.keys
        memory = ["--database", str(self.folder / "state.db")] if self.durable else []
        link = self._program(
            "superlink", "flower-superlink", "--host", HOST, "--port", str(self._ports[0]),
            "--ssl-ca-certfile", str(keys.ca), "--ssl-certfile", str(keys.certificate),
            "--ssl-keyfile", str(keys.certificate_key),
            "--enable-supernode-auth", "--disable-runtime-dependency-installation", *memory,
        )  # fmt: skip
        self._wait(link, "the SuperLink did not start", lambda: _speaks_tls(self._ports[0], keys.ca))

    def _register(self, names: Sequence[str]) -> None:
        registrations = [
            self._flwr(f"register-{name}", "supernode", "register", str(self.keys.public(name)), NAME) for name in names
        ]
        for process in registrations:
            if process.wait(self.patience) != 0:
                raise process.trouble("a node was not registered")

    def _start_node(self, i: int) -> None:
        name = f"node-{i}"
        self.supernode(
            name, "--root-certificates", str(self.keys.ca), "--auth-supernode-private-key", str(self.keys.nodes[name]),
            "--port", str(self._ports[1 + i]), "--node-config", config_text(self.configs[i]),
        )  # fmt: skip

    def _wait_for_node(self, i: int) -> None:
        """A SuperNode tells its number when the SuperLink has let it in."""
        node = self.node(i)
        self._wait(node, "a SuperNode did not start", lambda: "SuperNode ID:" in node.output())

    def _wait(self, process: Process, failure: str, ready: Callable[[], bool]) -> None:
        deadline = time.monotonic() + self.patience
        while not ready():
            if process.code is not None or time.monotonic() > deadline:
                raise process.trouble(failure)
            time.sleep(0.1)

    def _status(self, number: int) -> str:
        process = self._flwr("list", "list", NAME, "--run-id", str(number), "--format", "json")
        process.wait(self.patience)
        found = re.search(r'"status": "([^"]+)"', process.output())
        if found is None:
            link = self._processes["superlink"]
            raise (process if link.code is None else link).trouble("how the run ended is not known")
        return found[1]

    def _flwr(self, name: str, *arguments: str) -> Process:
        return self._program(name, "flwr", *arguments, home="flwr")

    def _program(self, name: str, command: str, *arguments: str, home: str = "") -> Process:
        """Start one of Flower's programs. Each has a folder of Flower's own, as on a machine of its own."""
        flower, logs = self.folder / "flower" / (home or name), self.folder / "logs"
        for folder in (flower, logs):
            folder.mkdir(parents=True, exist_ok=True)
        environment = _environment(flower) | self._further
        program = shutil.which(command, path=environment["PATH"])
        if program is None:
            raise UsageError(f"{command} is not installed: pip install 'fedu2[flower]'")
        self._processes[name] = Process([program, *arguments], environment, logs / f"{name}.log")
        return self._processes[name]


def config_text(config: Config) -> str:
    """A configuration as Flower's options take it: partition-id=0 data="/images of a site"."""
    return " ".join(f"{key}={_value(value)}" for key, value in config.items())


def _value(value: str | int | float | bool) -> str:
    if not isinstance(value, str):
        return str(value).lower()
    quote = "'" if '"' in value or "\\" in value else '"'  # Flower knows no escapes
    if quote in value or not value.isprintable():
        raise UsageError(f"Flower cannot be told {value!r}: both kinds of quotation marks, or a control character")
    return f"{quote}{value}{quote}"


def _environment(home: Path) -> dict[str, str]:
    """That of this process, without settings of Flower's that are meant for other deployments."""
    inherited = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    path = os.pathsep.join([sysconfig.get_path("scripts"), os.environ.get("PATH", os.defpath)])
    direct = {key: ",".join(filter(None, [HOST, os.environ.get(key)])) for key in ("NO_PROXY", "no_proxy")}
    own = {"PATH": path, "PYTHONUNBUFFERED": "1", "FLWR_HOME": str(home)}
    return inherited | QUIET | QUICK | direct | own


def _free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, len(PORTS)):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind((HOST, port))
            ports.append(port)
        if len(ports) == count:
            return ports
    raise TrainingError(f"{count} free ports are needed on {HOST}")


def _speaks_tls(port: int, ca: Path) -> bool:
    """Whether there is a server that shows a certificate of ours."""
    context = ssl.create_default_context(cafile=ca)
    try:
        with socket.create_connection((HOST, port), timeout=5) as raw, context.wrap_socket(raw, server_hostname=HOST):
            return True
    except OSError:
        return False


def _run_number(line: str) -> int | None:
    found = re.search(r"Successfully started run (\d+)", line)
    return int(found[1]) if found else None
