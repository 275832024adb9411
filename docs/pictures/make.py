"""Make the pictures of the documentation: python docs/pictures/make.py RUN WORD PAIRS IMAGE_RUN IMAGES

The attention page is photographed in a headless Chromium; everything else is drawn by regard itself. The map of the
code has its own script, architecture.py.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests" / "inspect"))

import chromium  # noqa: E402

CLIPS = {"alignment": 680, "walk": 900, "position": 620}  # visible height of each view in pixels


def regard(*arguments: object) -> None:
    subprocess.run([sys.executable, "-m", "regard", *map(str, arguments)], check=True)


def main() -> None:
    run, word, pairs, image_run, images = sys.argv[1:6]
    page, image_page = HERE / "page.html", HERE / "image.html"
    regard("inspect", run, word, "--out", page)
    regard("inspect", image_run, images, "--index", 18, "--out", image_page)
    regard("inspect", run, word, "--attention", "cross", "--png", HERE / "cross-heads.png")
    regard("heads", run, pairs, "--picture", HERE / "heads.svg", "--no-store")
    program = chromium.find()
    assert program is not None, "no Chromium on this machine"
    for name, height in CLIPS.items():
        browser = chromium.Chromium(program, 1180, height)
        browser.open(page)
        browser.click(f"#tab-{name}")
        browser.hover("h1")
        browser.run("window.scrollTo(0, 0)")
        browser.screenshot(HERE / f"page-{name}.png", full=False)
        browser.close()
    browser = chromium.Chromium(program, 1180, 800)
    browser.open(image_page)
    browser.click(".thumb", 2)
    browser.hover("h1")
    browser.screenshot(HERE / "page-image.png")
    browser.close()
    page.unlink()
    image_page.unlink()


if __name__ == "__main__":
    main()
