"""A headless Chromium for tests, driven by Selenium.

Chromium and its driver must be installed (Debian: ``chromium chromium-driver``); if they are not, the tests fail, as
tests of a missing framework do. ``CROSSREDUCE_TEST_BROWSER=0`` leaves these tests out on purpose.
"""

import os
import shutil
import time
from contextlib import contextmanager

FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--hide-scrollbars",
    "--disable-dev-shm-usage",
)  # fmt: skip


def require_browser():
    """Skip the test if browsers are left out on purpose, and fail it if Chromium is missing."""
    import pytest

    if os.environ.get("CROSSREDUCE_TEST_BROWSER") == "0":
        pytest.skip("browsers are left out by CROSSREDUCE_TEST_BROWSER=0")
    missing = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    remedy = "install Debian's chromium and chromium-driver, or set CROSSREDUCE_TEST_BROWSER=0"
    assert not missing, f"these tests need a browser, but there is no {' and no '.join(missing)}: {remedy}"


@contextmanager
def chromium(folder, width=1280, height=1000):
    """Yield a driver of a new Chromium whose profile is in an empty folder, and end it."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    for flag in (*FLAGS, f"--user-data-dir={folder}", f"--window-size={width},{height}"):
        options.add_argument(flag)
    options.binary_location = shutil.which("chromium")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    # Selenium downloads a driver unless it is told where one is.
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_script_timeout(60)
        resize(driver, width, height)
        yield driver
    finally:
        driver.quit()


def wait(condition, seconds=20):
    """Wait until a condition is true, and return its value."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "the page does not get there"
        time.sleep(0.02)
    return value


def wait_until_ready(driver):
    """Wait until a page of the plan explorer has drawn itself."""
    wait(lambda: driver.execute_script("return document.documentElement.dataset.ready"))


def resize(driver, width, height):
    """Set the size of the page's window."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)


def prefer(driver, scheme):
    """Tell pages that the user prefers "light" or "dark" colours."""
    features = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", features)
