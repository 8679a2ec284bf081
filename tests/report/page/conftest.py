"""A real Chromium, and pages to open in it."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tests.simulate.graphs import DEVICE, Layer, network, with_lines

from overspill.plans.plan import Plan, make_plan

SCREENSHOTS = Path(__file__).parents[3] / "build" / "screenshots"
WIDE, NARROW = (1280, 1400), (390, 1600)


@pytest.fixture(scope="session")
def plan() -> Plan:
    """A step of eight layers, some of them random and all of known lines, under a budget that makes tensors leave."""
    layers = [
        Layer(3 * 2**20, weight_bytes=2**19, flops=10**8, workspace_bytes=2**18, random=i % 2 == 0) for i in range(8)
    ]
    device = replace(DEVICE, offload_bytes_per_second=1e7, prefetch_bytes_per_second=1e7)
    return make_plan(with_lines(network(layers)), device, "auto", 17 * 2**20)


class Browser:
    """Chromium, and what a reader does with it."""

    def __init__(self, driver: Any) -> None:
        self.driver = driver

    def open(self, path: Path, size: tuple[int, int] = WIDE) -> None:
        metrics = {"width": size[0], "height": size[1], "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
        self.driver.get(path.as_uri())

    def run(self, script: str, *given: Any) -> Any:
        return self.driver.execute_script(script, *given)

    def find(self, selector: str) -> Any:
        return self.driver.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return self.driver.find_elements("css selector", selector)

    @property
    def actions(self) -> Any:
        from selenium.webdriver import ActionChains

        return ActionChains(self.driver, duration=20)

    def settle(self) -> None:
        """Wait until the views rest, and their details are drawn."""
        self.driver.execute_async_script("setTimeout(arguments[0], 150)")

    def shot(self, name: str) -> None:
        SCREENSHOTS.mkdir(parents=True, exist_ok=True)
        self.driver.save_screenshot(str(SCREENSHOTS / f"{name}.png"))

    def complaints(self) -> list[str]:
        """What the console says, but for a hint on how often the tests look at pixels."""
        said = [entry["message"] for entry in self.driver.get_log("browser")]
        return [message for message in said if "willReadFrequently" not in message]

    def pictures(self) -> list[str]:
        """What each view shows."""
        return self.run("return [...document.querySelectorAll('.view canvas:first-child')].map((c) => c.toDataURL())")


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    pytest.importorskip("selenium", reason="needs selenium")
    from selenium import webdriver

    chromium, driver = shutil.which("chromium") or shutil.which("google-chrome"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("needs Chromium and its driver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for flag in ("--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    started = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield Browser(started)
    started.quit()
