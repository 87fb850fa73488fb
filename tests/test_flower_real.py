"""A federation in real processes on loopback: a SuperLink, two SuperNodes, TLS and node keys."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

pytest.importorskip("flwr")

import fedu2
from fedu2.experiment import Experiment
from fedu2.federation.flower.deployment import Deployment
from fedu2.federation.flower.init import write_app

SITES = 2


class _Enough(Exception):  # noqa: N818 (a listener that has heard what it waited for)
    pass


def _server_apps(folder: Path) -> list[int]:
    """The processes of ServerApps that this deployment started."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes().decode(errors="replace")
            surroundings = (entry / "environ").read_bytes().decode(errors="replace")
        except OSError:
            continue
        if "flwr-serverapp" in command and str(folder) in surroundings:
            found.append(int(entry.name))
    return found


def _weights(run: fedu2.Run, round_: int) -> bytes:
    """Of the global model after a round."""
    return (run.path / "checkpoint" / f"round-{round_:06d}" / "server.safetensors").read_bytes()


@pytest.mark.slow
def test_rounds_parity_a_killed_server_and_a_killed_site(micro: Experiment, tmp_path: Path) -> None:
    experiment = micro.with_(clients=SITES, flower__server_data="sample", evaluation__every=1)
    experiment = experiment.with_(rounds=3, method="fedema", checkpoint_every=1)
    local = fedu2.train(experiment, tmp_path / "local")
    app = write_app(tmp_path / "app", experiment.with_(flower__timeout=40.0, flower__min_replies=1), tmp_path / "run")
    nodes = [{"partition-id": k, "memory": str(tmp_path / f"memory-{k}")} for k in range(SITES)]
    heard: list[str] = []
    with Deployment(tmp_path / "deployment", nodes, environment={"OMP_NUM_THREADS": "1"}) as deployment:

        def kill_the_server(line: str) -> None:
            heard.append(line)
            if "fedu2: round 1/3" in line:
                for pid in _server_apps(tmp_path / "deployment"):
                    os.kill(pid, signal.SIGKILL)
                raise _Enough

        with pytest.raises(_Enough):
            deployment.run(app, {}, kill_the_server, timeout=200)
        assert fedu2.Run(tmp_path / "run").rounds_played == 1

        def kill_a_site(line: str) -> None:
            heard.append(line)
            if "fedu2: round 2/3" in line:
                deployment.kill_node(1)

        assert deployment.run(app, {}, kill_a_site, timeout=300).completed, "\n".join(heard)
    resumed = fedu2.Run(tmp_path / "run")
    assert resumed.finished
    assert _weights(resumed, 2) == _weights(local, 2)  # while both sites were there, though the server was killed
    assert [line["knn"] for line in resumed.history[:3]] == [line["knn"] for line in local.history[:3]]
    assert [line["round"] for line in resumed.history] == [0, 1, 2, 3]
    assert resumed.history[2]["clients"] == [0, 1]
    assert "1" in resumed.history[3]["left_out"]
    assert resumed.history[3]["clients"] == [0]
    assert not _server_apps(tmp_path / "deployment")
    assert any("client 1 is left out of round 3" in line for line in heard)
