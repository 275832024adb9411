"""The LibreTranslate API, with its clients and the requests of its documentation against a real server."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urlencode

import pytest

import regard
from kit.models import family, letters
from kit.server import serving
from regard.data.statistics import Statistics
from regard.serve.translation import html_parts, join_parts, line_parts, rank_languages

KEY = "k" * 20
FORM = "application/x-www-form-urlencoded"


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    path = tmp_path_factory.mktemp("libretranslate")
    letters().save(path / "plain")
    for name, characters in (("en", {"a": 50, "b": 40, "c": 10}), ("fr", {"C": 10, "d": 80, "e": 10})):
        replace(letters(), statistics=Statistics(source_characters=characters)).save(path / name)
    return {name: path / name for name in ("plain", "en", "fr")}


@pytest.fixture(scope="module")
def client(runs):
    with serving({"en-de": runs["en"], "en-zh-Hans": runs["en"], "fr-de": runs["fr"]}, max_inputs=500) as client:
        yield client


def translations(path: Path, *sources: str, n: int = 1) -> list[list[str]]:
    return [[h.text for h in row] for row in regard.load(path).generate(sources, beam=4, nbest=n)]


def form(client, path: str, **fields: object):
    return client.post(path, urlencode(fields, doseq=True).encode(), Content_Type=FORM)


def test_libretranslatepy_translates(client, runs):
    api = pytest.importorskip("libretranslatepy").LibreTranslateAPI(client.url)
    (expected,), (other,) = translations(runs["en"], "abc", "ba")
    assert api.translate("abc", "en", "de") == expected != "" and other != expected
    assert api.translate("abc\n\n  ba\n", "EN", "De") == f"{expected}\n\n  {other}\n"
    assert api.detect("dedc")[0]["language"] == "fr"
    assert {"code": "en", "name": "en", "targets": ["de", "zh-Hans"]} in api.languages()
    with pytest.raises(HTTPError) as error:
        api.translate("abc")
    assert "en to es (pairs: en to de, en to zh-Hans, fr to de)" in json.loads(error.value.read())["error"]


def test_deep_translator_translates(client, runs):
    library = pytest.importorskip("deep_translator")
    translator = library.LibreTranslator(source="English", target="German", api_key="none", custom_url=client.url + "/")
    (expected,), (other,) = translations(runs["en"], "abc", "ba")
    assert translator.translate("abc\nba") == f"{expected}\n{other}"
    assert translator.translate_batch(["abc", "ba"]) == [expected, other]


def test_clients_send_the_key_as_a_field(runs, tmp_path):
    (tmp_path / "keys").write_text(f"{KEY}\n")
    with serving({"en-de": runs["en"]}, keys=str(tmp_path / "keys")) as client:
        pages = ("/languages", "/frontend/settings", "/spec")
        for path in pages:
            assert client.get(path).status == 401 and client.get(f"{path}?api_key=wrong").status == 401
            assert client.get(f"{path}?api_key={KEY}").status == 200
        body = {"q": "abc", "source": "en", "target": "de"}
        multipart = (
            '--x\r\nContent-Disposition: form-data; name="q"\r\n\r\nabc\r\n--x\r\nContent-Disposition: form-data;'
        )
        multipart += f' name="api_key"\r\n\r\n{KEY}\r\n--x--\r\n'
        assert form(client, "/translate", **body).json == {
            "error": "a key is required: api_key, or the header Authorization: Bearer KEY"
        }
        assert form(client, "/translate", **body, api_key=KEY).status == 200
        assert client.post(f"/detect?api_key={KEY}&q=abc", b"", Content_Type="").status == 200
        assert (
            client.post("/translate", multipart.encode(), Content_Type="multipart/form-data; boundary=x").status == 200
        )
        assert client.get("/health").json == {"status": "ok"}
        library = pytest.importorskip("libretranslatepy")
        api = library.LibreTranslateAPI(client.url, KEY)
        assert api.translate("abc", "en", "de") and api.languages() and api.detect("abc")
        with pytest.raises(HTTPError, match="401"):
            library.LibreTranslateAPI(client.url, "wrong").languages()


# As in LibreTranslate's documentation of its endpoints; only the address and the key differ.
REQUESTS = [
    ("-X", "POST", "/translate", "-H", "accept: application/json", "-H", f"Content-Type: {FORM}", "-d",
     "q=ab%20c&source=en&target=de&format=text&alternatives=3&api_key="),
    ("/translate", "-d", "q=ab%20c", "-d", "source=en", "-d", "target=de"),
    ("/translate", "-F", "q=ab c", "-F", "source=en", "-F", "target=de"),
    ("-X", "POST", "/translate?q=ab%20c&source=en&target=de"),
    ("-X", "POST", "/translate", "-H", "Content-Type: application/json", "-d",
     '{"q": "ab c", "source": "en", "target": "de", "format": "text", "api_key": "xxxxxx"}'),
]  # fmt: skip


@pytest.mark.parametrize("arguments", REQUESTS, ids=" ".join)
def test_every_form_of_a_request_has_the_same_answer(client, runs, arguments):
    if shutil.which("curl") is None:
        pytest.skip("curl is not installed")
    command = [client.url + part if part.startswith("/") else part for part in arguments]
    answer = json.loads(subprocess.run(["curl", "-s", *command], capture_output=True, check=True).stdout)
    (texts,) = translations(runs["en"], "ab c", n=4)
    assert answer["translatedText"] == texts[0]
    assert answer.get("alternatives", texts[1:]) == texts[1:]


def test_lists_and_alternatives(client, runs):
    (abc, ba) = translations(runs["en"], "abc", "ba", n=3)
    body = {"q": ["abc", "ba", "", "abc\r\nba"], "source": "en", "target": "de", "alternatives": 2}
    answer = client.post("/translate", body).json
    assert answer["translatedText"] == [abc[0], ba[0], "", f"{abc[0]}\r\n{ba[0]}"]
    assert answer["alternatives"] == [abc[1:], ba[1:], [], [f"{x}\r\n{y}" for x, y in zip(abc, ba, strict=True)][1:]]
    assert form(client, "/translate", **body).json == answer
    assert client.post("/translate", body | {"q": "  \n"}).json == {"translatedText": "  \n", "alternatives": []}


@pytest.mark.parametrize(("text_format", "text"), [("text", "a\n\n"), ("html", "<b>"), ("html", "< ")])
def test_text_with_too_many_parts_is_refused_at_once(client, text_format, text):
    body = {"q": [text * 30_000] * 5, "source": "en", "target": "de", "format": text_format}
    start = time.process_time()
    refusal = client.post("/translate", body)
    assert refusal.status == 413 and "more than 5000" in refusal.json["error"]
    assert time.process_time() - start < 1


def test_text_without_a_translation_is_an_error(client):
    refusal = client.post("/translate", {"q": ["abc", "ab" * 5000], "source": "en", "target": "de"})
    assert refusal.status == 422 and "q: the source has" in refusal.json["error"]


def test_only_language_pairs_of_the_runs_are_translated(client, runs):
    for source, target in (("de", "en"), ("en", "fr"), ("fr", "zh-hans"), ("en", "")):
        refusal = client.post("/translate", {"q": "abc", "source": source, "target": target})
        assert refusal.status == 422 and "(pairs: en to de, en to zh-Hans, fr to de)" in refusal.json["error"]
    assert client.post("/translate", {"q": "abc", "source": "En", "target": "ZH-hans"}).status == 200
    with serving({"plain": runs["plain"]}) as other:
        assert other.post("/translate", {"q": "abc"}).status == 200
        refusal = other.post("/translate", {"q": "abc", "source": "en", "target": "de"})
        assert refusal.status == 422 and "such as en-de=DIRECTORY" in refusal.json["error"]
        assert other.post("/detect", {"q": "abc"}).status == 404
    with serving({"en-de": runs["plain"]}) as older:  # a run without statistics
        assert older.post("/detect", {"q": "abc"}).json == [{"language": "en", "confidence": 0.0}]
        detected = older.post("/translate", {"q": "abc", "source": "auto", "target": "de"}).json["detectedLanguage"]
        assert detected == {"language": "en", "confidence": 0.0}


def test_language_is_detected(client, runs):
    for text, language in (("abba", "en"), ("DEDE 1!", "fr")):
        first, second = client.post("/detect", {"q": text}).json
        assert first["language"] == language and first["confidence"] > 90 > second["confidence"]
        answer = client.post("/translate", {"q": text, "source": "auto", "target": "de"}).json
        assert answer["detectedLanguage"] == first
        assert answer["translatedText"] == translations(runs[language], text)[0][0]
    assert client.post("/detect", {"q": ["ab", "ab"]}).json == client.post("/detect", {"q": "ab\nab"}).json
    assert [x["confidence"] for x in client.post("/detect", {"q": "xyz 12"}).json] == [0, 0]
    refusal = client.post("/translate", {"q": "12", "source": "auto", "target": "de"})
    assert refusal.status == 422 and refusal.json["error"] == "source: cannot be detected; give one of en, fr"
    only = client.post("/translate", {"q": "abd", "target": "zh-Hans"}).json["detectedLanguage"]
    assert only["language"] == "en" and 0 < only["confidence"] < 100


def test_classifier_of_languages_detects(runs, tmp_path):
    for name, labels in (("languages", ("en", "fr", "it")), ("tones", ("good", "en", "fr"))):
        replace(family("classes"), labels=labels).save(tmp_path / name)
    expected = regard.load(tmp_path / "languages").classify(["abba"])[0].probabilities
    pairs = {"en-de": runs["en"], "fr-de": runs["fr"]}
    with serving({**pairs, "languages": tmp_path / "languages", "tones": tmp_path / "tones"}) as client:
        answer = client.post("/detect", {"q": "abba"}).json
        assert {x["language"]: x["confidence"] for x in answer} == {
            label: pytest.approx(100 * probability, abs=0.06) for label, probability in expected.items()
        }


def test_probabilities_of_languages():
    counts = {"x": {"a": 90, "b": 10}, "y": {"A": 10, "b": 90}}
    assert [rank_languages(text, counts)[0][0] for text in ("aaab", "bbba")] == ["x", "y"]
    (_, sure), (_, unsure) = (rank_languages(text, counts)[0] for text in ("aaaa", "ab"))
    assert 0.5 <= unsure < sure <= 1
    assert rank_languages("aaaa????", counts)[0][1] == pytest.approx(sure)  # only letters count
    assert rank_languages("aaaaцццц", counts)[0][1] == pytest.approx(sure / 2, rel=0.01)  # half of them known
    assert rank_languages("", counts) == [("x", 0.0), ("y", 0.0)] and rank_languages("a", {}) == []


def test_forms_of_other_web_sites_are_refused(runs):
    fields = urlencode({"q": "abc", "source": "en", "target": "de"})
    with serving({"en-de": runs["en"]}, cors=("https://a.example",)) as client:
        for origin, status in (
            ("https://evil.example", 403), ("null", 403), ("https://a.example", 200), (client.url, 200),
        ):  # fmt: skip
            assert client.post("/translate", fields.encode(), Content_Type=FORM, Origin=origin).status == status
            assert client.post(f"/translate?{fields}", b"", Content_Type="", Origin=origin).status == status
        assert client.post("/translate", fields.encode(), Content_Type="text/plain").status == 415
        assert client.post("/v1/generate", b"inputs=abc", Content_Type=FORM).status == 415


MALFORMED = [
    (b"q=%ff", FORM, 400, "the form cannot be read"),
    (b"q=a&x=b", FORM, 422, "x: no such key"),
    (b"q=a&alternatives=many", FORM, 422, "alternatives"),
    (b"source=en", FORM, 422, "q: is required"),
    (b"&".join([b"q=a"] * 501), FORM, 413, "at most 500"),
    (b"q=a&" * 10_001, FORM, 400, "the form cannot be read"),
    (b"--x\r\n\r\n--x--", "multipart/form-data; boundary=x", 400, "a part has no name"),
    (b"--x\r\n", "multipart/form-data; boundary=x", 400, "no end"),
    (b"q", "multipart/form-data", 400, "no boundary"),
    (b"[1", "application/json", 400, "not JSON"),
    (b'{"q": "a", "format": "xml"}', "application/json", 422, "format"),
]


@pytest.mark.parametrize(("data", "content_type", "status", "message"), MALFORMED, ids=lambda x: str(x)[:30])
def test_error_is_a_text(client, data, content_type, status, message):
    reply = client.post("/translate", data, Content_Type=content_type)
    assert reply.status == status and isinstance(reply.json["error"], str) and message in reply.json["error"]


def test_settings_and_description(client):
    settings = client.get("/frontend/settings").json
    assert settings["language"]["target"]["code"] == "de" and settings["keyRequired"] is False
    assert client.get("/spec").json == client.get("/openapi.json").json


HTML = {
    '<p class="green">abc</p>': '<p class="green">[abc]</p>',
    "abc <b>ba</b>\n<br/>c &amp; d": "[abc] <b>[ba]</b>\n<br/>[c &amp; d]",
    "<!-- abc --><SCRIPT>a < 'b'</SCRIPT>d": "<!-- abc --><SCRIPT>a < 'b'</SCRIPT>[d]",
    "<style>c{}</style>d": "<style>c{}</style>[d]",
    '<a title="a>b" x=\'"\'>l&#39;ici</a>': "<a title=\"a>b\" x='\"'>[l'ici]</a>",
    "<a x'=\" y' z=>a\">b</a>": "<a x'=\" y' z=>a\">[b]</a>",
    "a &lt;b&gt; < c <i": "[a &lt;b&gt; &lt; c &lt;i]",
    "a <b 'c": "[a &lt;b 'c]",
    "<script>abc": "<script>abc",
    "<!-- abc": "[&lt;!-- abc]",
    "<title>&lt;/title&gt;&lt;b&gt;</title>": "<title>[&lt;/title&gt;&lt;b&gt;]</title>",
    " \n ": " \n ",
    "": "",
}


@pytest.mark.parametrize("text", HTML)
def test_html_keeps_its_tags(text):
    parts = html_parts(text)
    outputs = iter([[f"[{part.text}]"] for part in parts if part.is_input])
    assert join_parts(parts, outputs, as_html=True) == [HTML[text]]


def test_output_in_html_is_always_text(client, runs):
    class Tags(HTMLParser):
        def handle_starttag(self, tag, attrs):
            tags.append(tag)

    hostile = "</b><script>x</script><img src=x onerror=y>"
    for text in ("a", "<p>a</p>", "<p title='>'>a <i>b</i></p>"):
        parts = html_parts(text)
        (joined,) = join_parts(parts, iter([[hostile]] * len(parts)), as_html=True)
        tags: list[str] = []
        Tags().feed(joined)
        assert set(tags) <= {"p", "i"} and "&lt;script&gt;" in joined
    body = {"q": "<b>abc</b> ba", "source": "en", "target": "de", "format": "html", "alternatives": 1}
    (abc, ba) = translations(runs["en"], "abc", "ba", n=2)
    answer = client.post("/translate", body).json
    assert answer == {
        "translatedText": f"<b>{abc[0]}</b> {ba[0]}",
        "alternatives": [f"<b>{abc[1]}</b> {ba[1]}"],
    }


SEEDS = ["<", "<!--x>", "<a ", "<a href='", "<a b=c ", "<a b = c= = ", "<script>", "<b>", "&lt", "<!", "</a ", " \r\n"]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("split", [html_parts, line_parts])
def test_parts_take_linear_time(seed, split):
    start = time.process_time()
    text = seed * (100_000 // len(seed))
    assert "".join(part.text for part in line_parts(text)) == text
    split(text)
    assert time.process_time() - start < 5  # html.parser needs up to 100 s
