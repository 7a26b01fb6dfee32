"""Open a report of tools.report in a headless Chromium, move its sliders, and take screenshots.

    python benchmarks/report_in_browser.py BROWSER runs/mine [runs/other ...] --output shots --picture docs/report.png

BROWSER is the command of a Chromium or Chrome. At the widths of a desktop and of a phone: nothing is wider than the
window, every picture loads, and every slider shows the evaluation that it is moved to. Prints a line for each
width, and ends with 1 where one of these does not hold. The screenshots are for the eye. The picture is the README's:
the top of the page beside its samples.
"""

import argparse
import base64
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from tools.report import page

from PIL import Image

WIDTHS = {"desktop": 1280, "phone": 390}  # CSS pixels
# what the page itself sees, once it has loaded
PROBE = """(() => {
  const moved = [...document.querySelectorAll(".slider")].map(box => {
    const range = box.querySelector("input"), seen = []
    for (const place of [0, Number(range.max)]) {
      range.value = place
      range.dispatchEvent(new Event("input"))
      const shown = [...box.querySelectorAll("img")].filter(image => image.offsetWidth > 0)
      seen.push(shown.map(image => image.alt).join() == box.querySelector("output").textContent && shown.length == 1)
    }
    return seen.every(Boolean)
  })
  const root = document.documentElement, images = [...document.images]
  return {
    width: root.scrollWidth, window: innerWidth, height: root.scrollHeight,
    images: images.length, loaded: images.filter(image => image.complete && image.naturalWidth > 0).length,
    sliders: moved.length, moved: moved.filter(Boolean).length,
  }
})()"""
OPTIONS = ("--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars")


class Browser:
    """A Chromium without a screen, asked by the DevTools protocol over its two pipes."""

    def __init__(self, command: str) -> None:
        to_read, self._questions = os.pipe()
        self._answers, to_write = os.pipe()

        def as_3_and_4() -> None:  # the file descriptors that the browser talks by
            os.dup2(os.dup(to_read), 3)
            os.dup2(os.dup(to_write), 4)

        options = [command, *OPTIONS, "--remote-debugging-pipe"]
        self._process = subprocess.Popen(options, preexec_fn=as_3_and_4, close_fds=False, stderr=subprocess.DEVNULL)
        os.close(to_read)
        os.close(to_write)
        self._heard = b""
        self._number = 0
        target = self.ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def ask(self, method: str, *, of_page: bool = False, **params: object) -> dict:
        """The result of a method of the DevTools protocol. RuntimeError: the browser ended, or refuses."""
        self._number += 1
        question: dict = {"id": self._number, "method": method, "params": params}
        if of_page:
            question["sessionId"] = self._session
        os.write(self._questions, json.dumps(question).encode() + b"\0")
        while True:
            answer = self._hear()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _hear(self) -> dict:
        while b"\0" not in self._heard:
            part = os.read(self._answers, 1 << 16)
            if not part:
                raise RuntimeError("the browser ended")
            self._heard += part
        message, self._heard = self._heard.split(b"\0", 1)
        return json.loads(message)

    def open(self, path: Path, width: int) -> None:
        """Load a page in a window of this width, and wait for its pictures."""
        self.resize(width, 800)
        self.ask("Page.navigate", of_page=True, url=path.as_uri())
        loaded = "new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))"
        self.ask("Runtime.evaluate", of_page=True, expression=loaded, awaitPromise=True)

    def resize(self, width: int, height: int) -> None:
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.ask("Emulation.setDeviceMetricsOverride", of_page=True, **size)

    def evaluate(self, expression: str) -> Any:
        """What a JavaScript expression is in the page."""
        done = self.ask("Runtime.evaluate", of_page=True, expression=expression, returnByValue=True)
        return done["result"]["value"]

    def screenshot(self) -> bytes:
        """A PNG of the window."""
        return base64.b64decode(self.ask("Page.captureScreenshot", of_page=True, format="png")["data"])

    def close(self) -> str:
        """End the browser. Returns its name and version."""
        product = self.ask("Browser.getVersion")["product"]
        self._process.kill()
        return product


def picture(shot: Path, top_of_right: int) -> Image.Image:
    """The first 900 pixels of a desktop's screenshot beside the 900 from `top_of_right` on, at half size."""
    page = Image.open(shot).convert("RGB")
    both = Image.new("RGB", (2000, 900), "white")
    for left, top in ((0, 0), (1000, top_of_right)):
        both.paste(page.crop((140, top, 1140, top + 900)), (left, 0))
    return both.resize((1000, 450), Image.Resampling.LANCZOS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("browser", help="command of a Chromium")
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    parser.add_argument("--output", type=Path, default=Path("shots"), help="folder of the screenshots")
    parser.add_argument("--picture", type=Path, help="file to write a picture of the desktop's page to")
    args = parser.parse_args()
    args.output.mkdir(parents=True, exist_ok=True)
    holds = True
    browser = Browser(args.browser)
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.html"
        report.write_text(page(args.runs))
        for name, width in WIDTHS.items():
            browser.open(report, width)
            seen = browser.evaluate(PROBE)
            fits = seen["width"] <= seen["window"] == width
            works = seen["loaded"] == seen["images"] and seen["moved"] == seen["sliders"]
            holds = holds and fits and works
            print(
                f"{name}: {seen['width']} of {seen['window']} pixels wide, {seen['height']} high, "
                f"{seen['loaded']} of {seen['images']} pictures, {seen['moved']} of {seen['sliders']} sliders: "
                f"{'holds' if fits and works else 'DIFFERENT'}"
            )
            browser.resize(width, seen["height"])
            (args.output / f"report_{name}.png").write_bytes(browser.screenshot())
            if args.picture and name == "desktop":
                top = browser.evaluate("document.querySelectorAll('h2')[2].getBoundingClientRect().top + scrollY")
                picture(args.output / "report_desktop.png", int(top)).quantize(256).save(args.picture, optimize=True)
    print(browser.close())
    sys.exit(not holds)


if __name__ == "__main__":
    main()
