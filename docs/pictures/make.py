"""Make the images of the documentation: python docs/pictures/make.py RUN WORD PAIRS IMAGE_RUN IMAGES

The page is photographed in a headless Chromium; everything else is drawn by the program itself.
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent.parent / "tests" / "inspect"))

import chromium  # noqa: E402

from regard.cli import heads, inspect  # noqa: E402

CLIPS = {"alignment": 680, "walk": 900, "position": 620}  # pixels shown of each view


def main() -> None:
    run, word, pairs, image_run, images = sys.argv[1:6]
    page, image_page = HERE / "page.html", HERE / "image.html"
    inspect.command(run, word, output=str(page))
    inspect.command(image_run, images, index=18, output=str(image_page))
    inspect.command(run, word, attention="cross", png=str(HERE / "cross-heads.png"))
    heads.command(run, pairs, picture=str(HERE / "heads.svg"), no_store=True)
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


main()
