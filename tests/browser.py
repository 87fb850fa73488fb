"""A headless Chromium for tests of pages: found, started without looking for anything on the network, and watched."""

from __future__ import annotations

import base64
import json
import os
import shutil
from pathlib import Path

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.remote.webdriver import WebDriver

ARTIFACTS = Path(__file__).parents[1] / "test-artifacts"

FLAGS = (
    "--headless=new",
    "--no-sandbox",  # which root cannot have
    "--disable-gpu",
    "--disable-quic",
    "--disable-dev-shm-usage",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)


def start(profile: Path) -> WebDriver:
    """A browser with a fresh profile; without one the test is skipped, unless FEDU2_BROWSER=required."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    driver = shutil.which("chromedriver")
    if not (browser and driver):
        missing = "needs Chromium and chromedriver"
        pytest.fail(missing) if os.environ.get("FEDU2_BROWSER") == "required" else pytest.skip(missing)
    options = Options()
    options.binary_location = browser
    for flag in (*FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=Service(executable_path=driver))


def requests(browser: WebDriver) -> list[str]:
    """The addresses that pages asked for since this was asked last."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    sent = [event["params"] for event in events if event["method"] == "Network.requestWillBeSent"]
    return [event["request"]["url"] for event in sent]


def complaints(browser: WebDriver) -> list[str]:
    """What pages wrote to the console since this was asked last: errors, warnings, refused loads."""
    return [entry["message"] for entry in browser.get_log("browser")]


def resize(browser: WebDriver, width: int, height: int) -> None:
    """The page's own size, narrower than a window could be."""
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def media(browser: WebDriver, kind: str = "", **features: str) -> None:
    """Emulate print, or what a reader prefers: `prefers_color_scheme="dark"`."""
    preferred = [{"name": name.replace("_", "-"), "value": value} for name, value in features.items()]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": kind, "features": preferred})


def picture(browser: WebDriver, name: str) -> Path:
    """Keep the whole page, from top to bottom, as it looks now."""
    height = browser.execute_script("return document.documentElement.scrollHeight")
    width = browser.execute_script("return document.documentElement.clientWidth")
    clip = {"x": 0, "y": 0, "width": width, "height": min(height, 8000), "scale": 1}
    shot = browser.execute_cdp_cmd("Page.captureScreenshot", {"clip": clip, "captureBeyondViewport": True})
    ARTIFACTS.mkdir(exist_ok=True)
    path = ARTIFACTS / f"{name}.png"
    path.write_bytes(base64.b64decode(shot["data"]))
    return path
