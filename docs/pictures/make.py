"""Make the pictures of the documentation: python docs/pictures/make.py RUN WORD PAIRS IMAGE_RUN IMAGES SERVED_RUN TEXT

Pages are captured in a headless Chromium; regard draws the other pictures. The map of the code has its own script,
architecture.py.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlencode

from regard.cli.demo import TITLE
from regard.inspect.live import write_live_page
from regard.inspect.trace import trace
from regard.model import Model
from regard.presets import preset
from regard.run import Run
from regard.text.codec import Codec, Example
from regard.text.tokenizer import Tokenizer

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests"))

from kit import chromium  # noqa: E402
from kit.server import serving  # noqa: E402

CLIP_HEIGHTS = {"alignment": 680, "walk": 900}  # visible height of each view in pixels
MEASUREMENT_SECONDS = 5.0  # time in which the page measures all heads
LIVE_SIZE = (1180, 1240)  # picture of the live page


def regard(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "regard", *map(str, arguments)], check=True)


def sinusoid_page(word: str) -> str:
    """The page of an untrained model with sinusoid positions, for its position view."""
    tokenizer = Tokenizer.train("char", [word])
    stack = {"position": "sinusoid", "width": 128}
    model = Model(preset("transformer-tiny", tokenizer.size, changes={"encoder": stack, "decoder": stack}))
    run = Run(model.config, Codec(tokenizer), model, Path("sinusoids"))
    return trace(run, Example(word)).to_html()


def picture_of_server(program: str, run: Path, text: str) -> None:
    """The page of a server, with the alternatives for a token."""
    browser = chromium.Chromium(program, 1180, 900)
    with serving({run.name: run}) as client:
        browser.open(f"{client.url}/#{urlencode({'source': text})}")
        browser.until("document.getElementById('single').dataset.state === 'idle'")
        browser.click(".token", 4)
        browser.until("document.querySelectorAll('.alternative').length > 1")
        browser.hover("h1")
        browser.screenshot(HERE / "serve.png")
    browser.close()


def main() -> None:
    run, word, pairs, image_run, images, served_run, text = sys.argv[1:8]
    page = HERE / "page.html"
    position_page = HERE / "position.html"
    image_page = HERE / "image.html"
    live_page = HERE / "live.html"
    regard("inspect", run, word, "--out", page)
    write_live_page(Run.load(Path(run)), live_page, example=Example(word), title=TITLE)
    position_page.write_text(sinusoid_page(word), encoding="utf-8")
    regard("inspect", image_run, images, "--index", 18, "--out", image_page)
    regard("inspect", run, word, "--attention", "cross", "--png", HERE / "cross-heads.png")
    regard("heads", run, pairs, "--picture", HERE / "heads.svg", "--no-store")
    program = chromium.find()
    assert program is not None, "no Chromium on this machine"
    picture_of_server(program, Path(served_run), text)
    for name, height in CLIP_HEIGHTS.items():
        browser = chromium.Chromium(program, 1180, height)
        browser.open(page)
        browser.click(f"#tab-{name}")
        browser.hover("h1")
        browser.run("window.scrollTo(0, 0)")
        browser.screenshot(HERE / f"page-{name}.png", full=False)
        browser.close()
    browser = chromium.Chromium(program, *LIVE_SIZE)
    browser.open(live_page)
    time.sleep(MEASUREMENT_SECONDS)
    browser.screenshot(HERE / "page-live.png", full=False)
    browser.close()
    browser = chromium.Chromium(program, 1180, 470)
    browser.open(position_page)
    browser.click("#tab-position")
    browser.run("document.querySelectorAll('main > :not(#panel)').forEach((node) => node.remove())")
    browser.screenshot(HERE / "page-position.png", full=False)
    browser.close()
    browser = chromium.Chromium(program, 1180, 800)
    browser.open(image_page)
    browser.click("#tab-image")
    browser.click(".thumb", 1)
    browser.hover("h1")
    browser.screenshot(HERE / "page-image.png")
    browser.close()
    for path in (page, live_page, position_page, image_page):
        path.unlink()


if __name__ == "__main__":
    main()
