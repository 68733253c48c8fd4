"""JupyterLab as a person meets it: a server, headless Chromium, a notebook."""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
CHROMIUM_FLAGS = (
    "--no-sandbox",  # as root, which tests often are
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
)
START_LIMIT_S = 90
QUIET = {"fetchNews": "false", "checkForUpdates": False}
# The notebook is there, its kernel is connected and has nothing to do.
READY = """async () => {
  const widget = window.jupyterapp?.shell.currentWidget;
  if (!widget?.sessionContext || !widget.context) return false;
  await widget.context.ready;
  await widget.revealed;
  await widget.sessionContext.ready;
  const kernel = widget.sessionContext.session?.kernel;
  if (!kernel) return false;
  await kernel.info;
  return kernel.status === 'idle';
}"""


@contextmanager
def server(root: Path, state: Path) -> Iterator[str]:
    """A JupyterLab server on `root` that knows nothing of the user's settings.

    Yields the address of the notebook page, to which a file's name is added.
    """
    token = secrets.token_hex(16)
    settings = state / "settings" / "@jupyterlab/apputils-extension"
    settings.mkdir(parents=True)
    (settings / "notification.jupyterlab-settings").write_text(json.dumps(QUIET))
    environment = os.environ | {
        "JUPYTER_CONFIG_DIR": str(state / "config"),
        "JUPYTER_DATA_DIR": str(state / "data"),
        "JUPYTER_RUNTIME_DIR": str(state / "runtime"),
        "JUPYTERLAB_SETTINGS_DIR": str(state / "settings"),
        "JUPYTERLAB_WORKSPACES_DIR": str(state / "workspaces"),
        "IPYTHONDIR": str(state / "ipython"),
        "JUPYTER_TOKEN": token,
    }
    log = state / "server.log"
    with open(log, "wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root",
             "--ip=127.0.0.1", "--port=0", "--LabApp.expose_app_in_browser=True",
             f"--ServerApp.root_dir={root}"],
            stdout=output, stderr=output, env=environment, cwd=root,
        )  # fmt: skip
    try:
        address = wait_for_address(process, log)
        yield f"{address}/lab/tree/{{}}?token={token}&reset"
    finally:
        process.send_signal(signal.SIGTERM)  # it shuts its kernels down
        process.wait(30)


def wait_for_address(process: subprocess.Popen, log: Path) -> str:
    """The address that the server prints, once it serves there."""
    deadline = time.monotonic() + START_LIMIT_S
    while time.monotonic() < deadline:
        text = log.read_text()
        if found := re.search(r"(http://127\.0\.0\.1:[1-9]\d*)/lab", text):
            return found[1]
        if process.poll() is not None:
            raise RuntimeError(f"JupyterLab ended:\n{text[-3000:]}")
        time.sleep(0.1)
    raise TimeoutError(f"JupyterLab told no address:\n{log.read_text()[-3000:]}")


@contextmanager
def browser() -> Iterator[Page]:
    """A page in Debian's Chromium."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=list(CHROMIUM_FLAGS)
        )
        page = chromium.new_page(viewport={"width": 1280, "height": 1000})
        page.set_default_timeout(60_000)
        try:
            yield page
        finally:
            chromium.close()


def open_notebook(page: Page, address: str) -> None:
    page.goto(address)
    page.wait_for_selector(".jp-NotebookPanel .jp-Cell")
    deadline = time.monotonic() + START_LIMIT_S
    while not page.evaluate(READY):
        assert time.monotonic() < deadline, "the kernel did not become ready"
        page.wait_for_timeout(100)


def run_all_from_the_menu(page: Page) -> None:
    page.click("css=.lm-MenuBar-itemLabel >> text=Run")
    page.click("css=.lm-Menu-itemLabel >> text=/^Run All Cells$/")
