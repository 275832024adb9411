"""What tests of pages in a browser share: markup that must stay text, and what a page must not do."""

from __future__ import annotations

import itertools

from chromium import Chromium

SHELLS = ["{}", '"{}', "'>{}", "</script>{}", "--><!-- {}", "<b>{}", "]]>{}", "\u202e{}", "</title>{}", "{}\u2028"]
CORES = [
    f"<{tag} {on}=window.hit=1>"
    for tag, on in itertools.product(
        ("img src=x", "svg", "body", "details open", "input autofocus", "video src=x", "iframe srcdoc=x", "a href=#"),
        ("onerror", "onload", "onfocus", "ontoggle", "onclick"),
    )
] + [
    "<script>window.hit=1</script>",
    "<script src=data:,window.hit=1></script>",
    "<iframe src=javascript:parent.hit=1></iframe>",
    "<a href=javascript:window.hit=1>x</a>",
    "<style>*{display:none}</style>",
    "<meta http-equiv=refresh content=0;url=javascript:window.hit=1>",
    "<base href=//evil.example>",
    "<object data=javascript:window.hit=1>",
    "<math><mtext><table><mglyph><style><img src=x onerror=window.hit=1>",
    "${window.hit=1}",
]
PAYLOADS = [shell.format(core) for shell, core in itertools.product(SHELLS, CORES)]


def complaints(browser: Chromium) -> list[str]:
    """Exceptions, console errors, and anything the page asked the network for beside itself."""
    out = []
    for event in browser.events:
        if event.get("method") in ("Runtime.exceptionThrown", "Log.entryAdded", "Page.javascriptDialogOpening"):
            out.append(str(event["params"]))
        if event.get("method") == "Network.requestWillBeSent":
            url = event["params"]["request"]["url"]
            if not url.endswith("/page.html") and url != "about:blank":
                out.append(url)
    return out
