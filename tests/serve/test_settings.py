"""Settings of the server, API keys and names of runs."""

from __future__ import annotations

import pytest

from regard.errors import UserError
from regard.serve.settings import Keys, ServeSettings, named_runs

KEY = "0123456789abcdef"


def test_keys_are_read_from_a_file(tmp_path):
    path = tmp_path / "keys"
    path.write_text(f"# a remark\n\n{KEY}\nadmin {KEY}admin\n")
    keys = Keys.load(str(path))
    assert keys.any and keys.allows(KEY) and keys.allows(KEY + "admin")
    assert keys.allows_admin(KEY + "admin") and not keys.allows_admin(KEY)
    assert not any(keys.allows(text) for text in ("", KEY[:-1], KEY + "x", "ä" * 16, "\ud800"))
    assert not Keys().any and not Keys().allows("")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("short\n", ":1: a key must have at least 16"),
        (f"{KEY}\nuser {KEY}\n", ":2: a line must be KEY"),
        ("# none\n", "contains no keys"),
        ("ä" * 16, ":1:"),
    ],
)
def test_invalid_key_file_is_refused(tmp_path, text, part):
    (tmp_path / "keys").write_text(text)
    with pytest.raises(UserError, match=part):
        Keys.load(str(tmp_path / "keys"))


def test_missing_key_file_is_refused(tmp_path):
    with pytest.raises(UserError, match="cannot be read"):
        Keys.load(str(tmp_path / "nothing"))


def test_public_host_requires_a_key_or_the_public_option():
    for host in ("127.0.0.1", "::1", "localhost"):
        ServeSettings(host=host).check(Keys())
    for host in ("0.0.0.0", "::", "192.168.1.2", "example.org"):
        with pytest.raises(UserError, match="without a key"):
            ServeSettings(host=host).check(Keys())
        ServeSettings(host=host, public=True).check(Keys())
        ServeSettings(host=host).check(Keys((KEY.encode(),)))


def test_run_name_is_its_directory_name_or_an_explicit_name(tmp_path):
    (tmp_path / "g2p").mkdir()
    (tmp_path / "a=b").mkdir()
    assert named_runs([str(tmp_path / "g2p"), f"en-de={tmp_path}/g2p"]) == {
        "g2p": str(tmp_path / "g2p"), "en-de": f"{tmp_path}/g2p",
    }  # fmt: skip
    with pytest.raises(UserError, match="another run is also named g2p"):
        named_runs([str(tmp_path / "g2p"), "g2p=elsewhere"])
    with pytest.raises(UserError, match="NAME=DIRECTORY"):
        named_runs([str(tmp_path / "a=b")])


def test_invalid_precision_proxy_and_max_inputs_are_refused():
    with pytest.raises(UserError, match="ctranslate2"):
        ServeSettings(engine="torch", precision="int8").check(Keys())
    with pytest.raises(UserError, match="not an address"):
        ServeSettings(proxy=("here",))
    with pytest.raises(UserError, match=r"'http://a.example' is not a name"):
        ServeSettings(host_name=("a.example", "http://a.example"))
    with pytest.raises(UserError, match=r"max_inputs: .* 10000, not 10001"):
        ServeSettings(max_inputs=10_001)
