"""`fedu2 report`: what the page tells, in whatever state runs are, and how it behaves in a real browser."""

from __future__ import annotations

import http.client
import json
import math
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium.webdriver import ActionChains, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webdriver import WebDriver
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

import fedu2
from browser import complaints, media, picture, requests, resize, start
from fedu2.cli import main
from fedu2.console import span
from fedu2.errors import UsageError
from fedu2.experiment import Experiment
from fedu2.federation.play import summarise
from fedu2.methods import resolve
from fedu2.report.content import distinct_names, read_sheets
from fedu2.report.curves import curves_of
from fedu2.report.page import embedded_json, page, write_report
from fedu2.report.serve import ReportServer
from fedu2.report.tables import client_table, difference_table, summary_table
from fedu2.report.words import number, verdict

NASTY = "<img src=x onerror=alert(1)>&\"'\u2028{{style}}"


def record(round_: int, knn: float | None = None, **more: Any) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    line: dict[str, Any] = {"round": round_, **more}
    if round_:
        line |= {"lr": 0.1, "clients": [0, 2], "loss": 2 - round_ / 10, "client_loss": [1.5, 2.5]}
        line |= {"seconds": 2.0, "samples_per_second": 100.0 * round_}
    if knn is not None:
        line |= {"knn": knn, "effective_rank": 80.0 - round_}
    return line


def written(path: Path, records: list[dict[str, Any]], **settings: Any) -> Path:
    """A run directory as training writes it."""
    path.mkdir(parents=True)
    experiment = resolve(Experiment.parse({"rounds": 4, "clients": 3, **settings}))
    (path / "config.yaml").write_text(experiment.to_yaml(), encoding="utf-8")
    (path / "partition.json").write_text(json.dumps({"clients": [[0, 1, 2], [3], [4, 5]]}))
    (path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in records))
    return path


def whole(path: Path, shift: float = 0.0, rounds: int = 4, **settings: Any) -> Path:
    """A finished run: judged before training and after every round."""
    records = [record(round_, 20 + 2 * round_ + shift * (round_ > 0)) for round_ in range(rounds + 1)]
    return written(path, records, rounds=rounds, **settings)


def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def embedded(html: str) -> str:
    """The data inside a page."""
    found = re.search(r'id="data">(.*?)</script>', html)
    assert found is not None
    return found[1]


# What is read


def test_the_figures_are_those_of_the_summary(micro: Experiment, tmp_path: Path) -> None:
    run = fedu2.train(Experiment.parse(micro.flat(), ["evaluation.every=1"]), tmp_path / "run")
    (sheet,) = read_sheets([run.path])
    summary = summarise(run.history)
    assert sheet.finished
    assert sheet.played == summary["rounds"]
    assert sheet.last("knn") == (2, summary["knn"])
    assert sheet.untrained("knn") == summary["untrained_knn"]
    assert sheet.seconds == pytest.approx(summary["seconds"])
    assert sheet.speed == pytest.approx(summary["samples_per_second"])
    assert sheet.environment["torch"] == run.summary["environment"]["torch"]
    assert sum(sheet.clients["images"]) == sum(
        len(share) for share in json.loads(text(run.path / "partition.json"))["clients"]
    )
    assert sheet.clients["eua.weights"] == run.history[-1]["eua.weights"]
    assert {"knn", "loss", "fur.mass", "agreement"} <= {curve.key for curve in curves_of([sheet]) if curve.main}


def test_verdicts(tmp_path: Path) -> None:
    def said(records: list[dict[str, Any]]) -> str:
        shutil.rmtree(tmp_path / "run", ignore_errors=True)
        return verdict(read_sheets([written(tmp_path / "run", records)])[0])

    untrained = record(0, 20.0)
    assert said([]) == "Begun; no round has been written yet."
    assert said([untrained]) == (
        "Before the first of 4 rounds: kNN accuracy is 20.0 % without training, and the effective rank is 80.0."
    )
    assert said([untrained, record(1, 31.0), record(2, 30.0)]) == (
        "After 2 of 4 rounds: kNN accuracy is 30.0 %, 10.0 points above the untrained encoder "
        "(at best 31.0 %, in round 1), and the effective rank fell from 80.0 to 78.0."
    )
    assert said([untrained, record(1, 19.0), record(2)]).startswith(
        "After 2 of 4 rounds: kNN accuracy is 19.0 % (round 1), 1.0 points below the untrained encoder"
    )
    assert said([record(1), record(4)]) == "After all 4 rounds: the loss went from 1.900 to 1.600."


def test_unfinished_and_damaged_runs_are_read(tmp_path: Path) -> None:
    path = written(tmp_path / "run", [record(0, 20.0), record(1, math.nan, loss=math.inf), record(2, 25.0)])
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"round": 2, "knn": 26.0, "clients": "none"}\n{"round": 3, "kn')
    (path / "evaluation.json").write_text('[{"protocol": "knn"}, 3')
    (path / "summary.json").write_text("[]")
    (path / "partition.json").write_text("{")
    (sheet,) = read_sheets([path])
    assert not sheet.finished
    assert sheet.series["knn"] == [(0, 20.0), (1, None), (2, 26.0)]  # a round that was written twice counts once
    assert sheet.last("knn") == sheet.best("knn") == (2, 26.0)
    assert all(word not in embedded(page([sheet])) for word in ("NaN", "Infinity"))  # which are no JSON


def test_runs_without_labels_have_no_accuracy(tmp_path: Path) -> None:
    records = [record(0, effective_rank=50.0), record(1, effective_rank=40.0)]
    (sheet,) = read_sheets([written(tmp_path / "run", records)])
    assert verdict(sheet) == "After 1 of 4 rounds: the effective rank fell from 50.0 to 40.0."
    assert "knn" not in {curve.key for curve in curves_of([sheet])}
    assert not any("kNN" in row.label for _, rows in summary_table([sheet]).groups for row in rows)


def test_names_tell_runs_apart() -> None:
    paths = [Path("/a/x/run"), Path("/b/x/run"), Path("/a/other"), Path("/a/other/fedavg")]
    assert distinct_names(paths, [paths[3]]) == ["a/x/run", "b/x/run", "other", "other/fedavg"]


def test_a_comparison_comes_along_and_a_run_counts_once(tmp_path: Path) -> None:
    run = whole(tmp_path / "run")
    plain = whole(tmp_path / "run" / "fedavg", aggregator="fedavg", fur={"weight": 0})
    assert cells(summary_table(read_sheets([run])), "method") == ["FedU²-BYOL", "FedAvg-BYOL"]
    assert [sheet.name for sheet in read_sheets([run])] == ["run", "run/fedavg"]
    assert [sheet.name for sheet in read_sheets([run, plain, tmp_path / "." / "run"])] == ["run", "run/fedavg"]


# What is told


def cells(table: Any, label: str) -> list[str]:
    return next(list(row.cells) for _, rows in table.groups for row in rows if row.label == label)


def test_the_summary_compares_runs(tmp_path: Path) -> None:
    runs = [whole(tmp_path / "a"), whole(tmp_path / "b", shift=-1.0), written(tmp_path / "c", [])]
    linear = {"protocol": "linear", "encoder": "last", "round": 4, "data": "sample", "values": [41, 41.5, 41.25]}
    tuned = {"protocol": "finetune 1 %", "encoder": "best", "round": 3, "data": "sample", "values": [30]}
    scores = [linear | {"mean": 41.25, "deviation": 0.25}, tuned | {"mean": 30, "deviation": 0}]
    (runs[0] / "evaluation.json").write_text(json.dumps(scores))
    table = summary_table(read_sheets(runs))
    assert cells(table, "kNN, last round") == ["28.0 %", "27.0 %", "–"]
    assert cells(table, "rounds") == ["4 of 4", "4 of 4", "0 of 4, unfinished"]
    assert cells(table, "training time") == ["0:08", "0:08", "–"]
    assert cells(table, "samples per second") == ["250", "250", "–"]
    assert cells(table, "linear probe") == ["41.2 ± 0.2 % (3 seeds)", "–", "–"]
    assert cells(table, "fine-tuning, 1 % of the labels, best round") == ["30.0 % (round 3)", "–", "–"]
    assert [row.best for _, rows in table.groups for row in rows if row.label == "kNN, last round"] == [[0]]


def test_only_keys_that_differ_are_listed(tmp_path: Path) -> None:
    sheets = read_sheets([whole(tmp_path / "a"), whole(tmp_path / "b", alpha=0.5, fur={"weight": 0})])
    rows = {row.label: list(row.cells) for row in difference_table(sheets).groups[0][1]}
    assert rows == {"alpha": ["0.1", "0.5"], "fur.weight": ["2.0", "0.0"]}
    alone = {row.label: list(row.cells) for row in difference_table(sheets[1:]).groups[0][1]}
    assert alone["alpha"] == ["0.5", "0.1"]
    assert set(alone) == {"alpha", "fur.weight", "rounds", "clients"}


def test_the_clients_of_the_last_round(tmp_path: Path) -> None:
    table = client_table(read_sheets([whole(tmp_path / "a")])[0])
    assert table.columns == ["images", "loss"]
    assert [(row.label, row.cells) for row in table.groups[0][1]] == [("0", ["3", "1.5"]), ("2", ["2", "2.5"])]


def test_numbers_are_written_for_readers() -> None:
    assert [number(value) for value in (None, 3.0, 20343040, 0.123456, 12345.6, 0.0000161)] == [
        "–", "3", "20\u202f343\u202f040", "0.1235", "12\u202f346", "1.61e-5",
    ]  # fmt: skip
    assert [span(value) for value in (5, 65, 3725)] == ["0:05", "1:05", "1:02:05"]


# The file


def test_what_comes_from_runs_cannot_break_out(tmp_path: Path) -> None:
    path = whole(tmp_path / NASTY)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"round": 4, "</script><b id=out>": 1.0}) + "\n")
    html = page(read_sheets([path]))
    assert "<img" not in html
    assert "<b id=out>" not in html
    assert html.count("</script>") == 2  # the data's and the script's own
    assert "\u2028" not in html[html.index('id="data"') :]
    assert json.loads(embedded(html))["runs"][0]["name"] == NASTY
    assert embedded_json("</script>&<!--") == '"\\u003c/script\\u003e\\u0026\\u003c!--"'


def test_the_page_needs_nothing_else(tmp_path: Path) -> None:
    html = page(read_sheets([whole(tmp_path / "run")]))
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', html)
    assert policy is not None
    assert "default-src &#x27;none&#x27;" in policy[1]
    assert "connect-src" not in policy[1]
    assert not re.search(r'(?:src|href)="(?!#|data:,)', html)
    assert "url(" not in html


def test_where_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    runs = [str(whole(tmp_path / name)) for name in "ab"]
    assert main(["report", runs[0], "--no-figures"]) == 0
    assert str(tmp_path / "a" / "report.html") in capsys.readouterr().out
    assert main(["report", *runs, "--no-figures"]) == 0
    assert (tmp_path / "report.html").exists()
    assert main(["report", *runs, "--no-figures", "--out", "deep/page.html"]) == 0
    assert "2 runs compared" in text(tmp_path / "deep" / "page.html")


def test_no_run_no_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, out = whole(tmp_path / "run"), tmp_path / "page.html"
    assert main(["report", str(run), str(tmp_path / "nothing"), "--out", str(out)]) == 2
    assert "nothing holds no run" in capsys.readouterr().err
    (run / "config.yaml").write_text("rounds: many")
    assert main(["report", str(run), "--out", str(out)]) == 2
    assert "rounds" in capsys.readouterr().err
    assert main(["report", str(run), "--out", str(tmp_path), "--no-figures"]) == 2
    assert main(["report", str(run), "--serve", "--out", str(out)]) == 2
    assert "--serve writes no file" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


def test_figures_are_drawn_into_the_page(micro: Experiment, tmp_path: Path) -> None:
    run = fedu2.train(micro, tmp_path / "run")
    shutil.rmtree(run.path / "checkpoint")  # figures of representations need it; the others do not
    html = text(write_report([run.path]))
    assert 'id="figures"' in html
    assert html.count("<figcaption>") == html.count('<figure class="drawing">') > 1


# The server


@pytest.fixture
def serving() -> Iterator[Callable[..., ReportServer]]:
    servers: list[ReportServer] = []

    def start(*paths: Path) -> ReportServer:
        servers.append(ReportServer(paths))
        threading.Thread(target=servers[-1].serve_forever, args=(0.05,), daemon=True).start()
        return servers[-1]

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def ask(server: ReportServer, path: str = "/", method: str = "GET", host: str = "localhost") -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=60)
    connection.request(method, path, headers={"Host": host})
    answer = connection.getresponse()
    body = answer.read()
    connection.close()
    return answer.status, body


def test_the_server_gives_the_page_and_its_data_alone(serving: Callable[..., ReportServer], tmp_path: Path) -> None:
    server = serving(whole(tmp_path / "run"))
    assert server.server_address[0] == "127.0.0.1"
    status, html = ask(server)
    assert status == 200
    assert b"connect-src &#x27;self&#x27;" in html
    status, data = ask(server, "/data.json")
    assert status == 200
    assert [point[1] for point in json.loads(data)["runs"][0]["series"]["knn"]] == [20, 22, 24, 26, 28]
    for path in ("/config.yaml", "/../run/config.yaml", f"{tmp_path}/run/config.yaml"):
        assert ask(server, path)[0] == 404
    assert ask(server, "/?x=1")[0] == 200  # as after a reload with a query
    assert ask(server, host=f"LOCALHOST:{server.server_port}")[0] == 200
    for method in ("POST", "PUT", "DELETE", "HEAD"):
        assert ask(server, method=method)[0] == 501


def test_the_server_answers_to_its_own_name_alone(serving: Callable[..., ReportServer], tmp_path: Path) -> None:
    server = serving(whole(tmp_path / "run"))
    for host in ("localhost", "localhost:9000", "127.0.0.1:80"):  # ports change on the way through a tunnel
        assert ask(server, host=host)[0] == 200
    for host in ("evil.example", "evil.example:80", "localhost.evil.example", "", "127.0.0.1.evil.example:80"):
        assert ask(server, "/data.json", host=host)[0] == 403


def test_a_run_that_is_not_there_yet_is_waited_for(serving: Callable[..., ReportServer], tmp_path: Path) -> None:
    server = serving(tmp_path / "run")
    assert b"it is waited for" in ask(server)[1]
    whole(tmp_path / "run")
    assert len(json.loads(ask(server, "/data.json")[1])["runs"][0]["series"]["knn"]) == 5
    config = tmp_path / "run" / "config.yaml"
    config.write_text("rounds: many")
    assert ask(server, "/data.json")[0] == 503
    with pytest.raises(UsageError, match="holds no run"):
        ReportServer([config])
    with pytest.raises(UsageError, match="cannot serve on port"):
        ReportServer([tmp_path / "other"], server.server_port)


def test_ctrl_c_ends_it_cleanly(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "fedu2", "report", str(whole(tmp_path / "run")), "--serve"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert re.search(r"http://127\.0\.0\.1:\d+/", process.stdout.readline())
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=120)
    assert (process.returncode, errors) == (0, "")


# In a browser


@pytest.fixture(scope="module")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[WebDriver]:
    browser = start(tmp_path_factory.mktemp("profile"))
    yield browser
    browser.quit()


@pytest.fixture
def browser(chromium: WebDriver) -> Iterator[WebDriver]:
    """The browser with a clean slate; a page that complains, or asks for anything but itself, fails its test."""
    chromium.get("about:blank")
    resize(chromium, 1280, 900)
    media(chromium, prefers_color_scheme="light", prefers_reduced_motion="reduce")
    complaints(chromium), requests(chromium)
    yield chromium
    assert complaints(chromium) == []
    assert {re.sub(r"[^/]*$", "", address) for address in requests(chromium)} <= {
        re.sub(r"[^/]*$", "", chromium.current_url)
    }
    chromium.execute_script("localStorage.clear()")


def opened(browser: WebDriver, *runs: Path) -> None:
    """The page on these runs, from a file."""
    out = runs[0].parent / "page.html"
    browser.get(write_report(runs, out, figures=False).as_uri())


def chart(browser: WebDriver, curve: str) -> WebElement:
    return browser.find_element(By.CSS_SELECTOR, f'[data-curve="{curve}"] .plot')


def lines(browser: WebDriver, curve: str) -> dict[str, int]:
    """The runs that are drawn, with the number of points of each line; read at once, for a live page redraws itself."""
    script = """return [...document.querySelector(`[data-curve="${arguments[0]}"] .plot`).querySelectorAll(".run")]
        .map((run) => [run.dataset.run, run.querySelector(".line").getAttribute("d")])"""
    paths = dict(browser.execute_script(script, curve))
    assert all(re.fullmatch(r"([ML][\d.]+ [\d.]+)+", path) for path in paths.values())
    return {run: len(re.findall("[ML]", path)) for run, path in paths.items()}


def tooltip(browser: WebDriver) -> str:
    """The values that are shown, spaces and line ends alike."""
    (tip,) = [tip for tip in browser.find_elements(By.CSS_SELECTOR, ".tip") if tip.is_displayed()] or [None]
    return " ".join(tip.text.split()) if tip else ""


def point_at(browser: WebDriver, curve: str, round_: int, run: int = 0) -> None:
    mark = (
        chart(browser, curve)
        .find_elements(By.CSS_SELECTOR, ".run")[run]
        .find_elements(By.CSS_SELECTOR, ".mark")[round_]
    )
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
    ActionChains(browser).move_to_element_with_offset(mark, 2, 20).perform()


def sideways(browser: WebDriver) -> int:
    """Pixels by which the page is wider than its window."""
    return browser.execute_script("return document.documentElement.scrollWidth - innerWidth")


def test_every_run_is_a_line(browser: WebDriver, tmp_path: Path) -> None:
    runs = [
        whole(tmp_path / "a"),
        whole(tmp_path / "b", shift=3.0, rounds=6),
        written(tmp_path / "c", [record(0, 21.0)]),
    ]
    opened(browser, *runs)
    assert lines(browser, "knn") == {"a": 5, "b": 7, "c": 1}
    assert lines(browser, "loss") == {"a": 4, "b": 6}
    looks = [
        (line.value_of_css_property("stroke"), line.get_attribute("stroke-dasharray"))
        for line in chart(browser, "knn").find_elements(By.CSS_SELECTOR, ".line")
    ]
    assert len(set(looks)) == 3
    assert browser.find_element(By.TAG_NAME, "h1").text == "3 runs compared"


def test_hover_shows_the_values_of_all_runs(browser: WebDriver, tmp_path: Path) -> None:
    opened(browser, whole(tmp_path / "a"), whole(tmp_path / "b", shift=3.25))
    point_at(browser, "knn", 3)
    assert tooltip(browser) == "Round 3 b 29.25 % a 26 %"  # the higher one first
    point_at(browser, "samples_per_second", 0, run=1)
    assert tooltip(browser) == "Round 1 a 100 b 100"
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h2")).perform()
    assert tooltip(browser) == ""


def test_touch_shows_values(browser: WebDriver, tmp_path: Path) -> None:
    opened(browser, whole(tmp_path / "a"))
    mark = chart(browser, "knn").find_elements(By.CSS_SELECTOR, ".mark")[1]
    browser.execute_script("arguments[0].scrollIntoView({block: 'center'})", mark)
    box = browser.execute_script("return arguments[0].getBoundingClientRect()", mark)
    touch = {"type": "touchStart", "touchPoints": [{"x": box["x"] + 4, "y": box["y"] + 30}]}
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", touch)
    browser.execute_cdp_cmd("Input.dispatchTouchEvent", {"type": "touchEnd", "touchPoints": []})
    assert tooltip(browser) == "Round 1 a 22 %"


def test_arrow_keys_walk_through_the_rounds(browser: WebDriver, tmp_path: Path) -> None:
    opened(browser, whole(tmp_path / "a"))
    plot = chart(browser, "knn")
    plot.send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert tooltip(browser) == "Round 1 a 22 %"
    plot.send_keys(Keys.END, Keys.ARROW_LEFT)
    assert tooltip(browser) == "Round 3 a 26 %"
    assert browser.find_element(By.ID, "spoken").get_attribute("textContent") == "kNN accuracy, round 3: a 26\u00a0%"
    plot.send_keys(Keys.ESCAPE)
    assert tooltip(browser) == ""


def test_the_legend_hides_a_run(browser: WebDriver, tmp_path: Path) -> None:
    opened(browser, whole(tmp_path / "a"), whole(tmp_path / "b"))
    button = browser.find_elements(By.CSS_SELECTOR, "#legend button")[0]
    button.click()
    assert button.get_attribute("aria-pressed") == "false"
    assert list(lines(browser, "knn")) == list(lines(browser, "loss")) == ["b"]
    button.send_keys(Keys.SPACE)
    assert list(lines(browser, "knn")) == ["a", "b"]


def test_all_runs_can_be_hidden(browser: WebDriver, tmp_path: Path) -> None:
    opened(browser, whole(tmp_path / "a"), whole(tmp_path / "b"))
    for button in browser.find_elements(By.CSS_SELECTOR, "#legend button"):
        button.click()
    assert "no values to show" in chart(browser, "knn").text
    chart(browser, "knn").send_keys(Keys.HOME)
    assert tooltip(browser) == ""


CONTRAST = """
const light = (channel) => (channel /= 255) <= 0.04045 ? channel / 12.92 : ((channel + 0.055) / 1.055) ** 2.4;
const luminance = (colour) => {
  const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map(light);
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
};
const ground = (node) => {
  const colour = getComputedStyle(node).backgroundColor;
  return colour !== "rgba(0, 0, 0, 0)" ? colour : ground(node.parentElement);
};
const texts = [...document.querySelectorAll("p, a, h1, h2, h3, th, td, summary, button, figcaption")];
return Math.min(...texts.filter((node) => node.checkVisibility() && !node.matches(".skip")).map((node) => {
  const pair = [luminance(getComputedStyle(node).color), luminance(ground(node))].sort((a, b) => b - a);
  return (pair[0] + 0.05) / (pair[1] + 0.05);
}));
"""


def test_light_and_dark(browser: WebDriver, tmp_path: Path) -> None:
    def paper() -> str:
        return browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")

    opened(browser, whole(tmp_path / "a"), whole(tmp_path / "b", shift=1.0))
    light = paper()
    assert browser.execute_script(CONTRAST) >= 4.5  # WCAG AA
    picture(browser, "report-light")
    browser.find_element(By.ID, "theme").click()
    dark = paper()
    assert dark != light
    assert browser.execute_script(CONTRAST) >= 4.5
    picture(browser, "report-dark")
    browser.refresh()
    WebDriverWait(browser, 10).until(lambda _: paper() == dark)  # it is remembered
    media(browser, prefers_color_scheme="dark", prefers_reduced_motion="reduce")
    browser.find_element(By.ID, "theme").click()
    assert paper() == light
    browser.execute_script("localStorage.clear()")
    browser.refresh()
    WebDriverWait(browser, 10).until(lambda _: paper() == dark)  # what the reader's system prefers


def test_ten_runs_with_long_names_fit_a_phone(browser: WebDriver, tmp_path: Path) -> None:
    runs = [whole(tmp_path / f"20261115-142501-fedu2-byol-cifar10-{n}", shift=n / 4) for n in range(9)]
    runs.append(whole(tmp_path / NASTY))
    resize(browser, 360, 740)
    opened(browser, *runs)
    for details in browser.find_elements(By.CSS_SELECTOR, "details"):
        browser.execute_script("arguments[0].open = true", details)
    assert sideways(browser) <= 0
    assert len(lines(browser, "knn")) == 10
    point_at(browser, "knn", 4)
    assert tooltip(browser).count("%") == 10
    assert sideways(browser) <= 0
    assert browser.find_elements(By.TAG_NAME, "img") == []
    picture(browser, "report-phone")


def test_odd_runs_are_drawn(browser: WebDriver, tmp_path: Path) -> None:
    damaged = written(tmp_path / "nan", [record(0, 20.0), record(1, math.nan), record(2, 24.0), record(3, 25.0)])
    opened(
        browser,
        damaged,
        written(tmp_path / "nothing", []),
        whole(tmp_path / "x" / "run"),
        whole(tmp_path / "y" / "run"),
    )
    path = chart(browser, "knn").find_element(By.CSS_SELECTOR, '[data-run="nan"] .line').get_attribute("d")
    assert re.sub("[^ML]", "", path) == "MML"  # what is not a number breaks the line
    assert list(lines(browser, "knn")) == ["nan", "x/run", "y/run"]
    chart(browser, "knn").send_keys(Keys.HOME, Keys.ARROW_RIGHT)
    assert "nan –" in tooltip(browser)
    opened(browser, tmp_path / "nothing")
    assert browser.find_elements(By.CSS_SELECTOR, ".chart") == []


def test_print(browser: WebDriver, tmp_path: Path) -> None:
    opened(browser, whole(tmp_path / "a"), whole(tmp_path / "b", shift=1.0))
    browser.find_element(By.ID, "theme").click()
    resize(browser, 794, 1123)
    media(browser, "print")
    paper = browser.find_element(By.TAG_NAME, "body").value_of_css_property("background-color")
    assert paper == "rgba(255, 255, 255, 1)"
    assert not any(node.is_displayed() for node in browser.find_elements(By.CSS_SELECTOR, "nav, details, #theme"))
    assert chart(browser, "knn").is_displayed()
    assert sideways(browser) <= 0
    picture(browser, "report-print")


def test_a_served_page_grows_with_its_run(
    browser: WebDriver, serving: Callable[..., ReportServer], tmp_path: Path
) -> None:
    run = written(tmp_path / "run", [record(0, 20.0), record(1, 21.0), record(2, 22.0)])
    browser.get(serving(run, tmp_path / "later", whole(tmp_path / "other")).address)
    assert lines(browser, "knn") == {"run": 3, "other": 5}
    wait = WebDriverWait(browser, 10)
    wait.until(lambda _: browser.find_element(By.ID, "live").text.startswith("live, "))
    browser.find_elements(By.CSS_SELECTOR, "#legend button")[2].click()
    browser.execute_script("document.querySelector('#numbers details').open = true")
    point_at(browser, "knn", 1)
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(record(3, 27.5)) + "\n")
    whole(tmp_path / "later", shift=1.0)
    wait.until(lambda _: lines(browser, "knn") == {"run": 4, "later": 5})
    assert tooltip(browser) == "Round 1 later 23 % run 21 %"  # still there, and the other one is still hidden
    assert "After 3 of 4 rounds" in browser.find_element(By.ID, "verdicts").text
    assert browser.find_element(By.CSS_SELECTOR, "#numbers details").get_attribute("open")
