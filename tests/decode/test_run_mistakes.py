"""Errors in runs and inputs: missing or superfluous features, unknown tokens, NaN weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from kit.decoding import blank, run_of, tokenizer
from kit.models import family
from kit.toy import call
from regard.api import LoadedRun
from regard.decode.encoder_only import classify
from regard.decode.forced import score_text
from regard.decode.torch_engine import score
from regard.errors import UserError
from regard.run import Run, average
from regard.text.codec import Codec, Example
from regard.weight_files import weights_of

FEATURES_REQUIRED = "features: is required, since the run was trained with features"
FEATURES_REFUSED = "features: not for this run, which was trained without features"


@pytest.fixture(scope="module")
def run_with_features() -> LoadedRun:
    """A run with features and random weights."""
    codec = Codec(tokenizer("char"), tokenizer("char"), ("N", "PL"), ("source", "features", "target"))
    model = blank("transformer-tiny", 1, codec)
    return LoadedRun(model.config, codec, model, Path("random"))


def as_loaded(run: Run) -> LoadedRun:
    return LoadedRun(run.config, run.codec, run.model, run.path, run.labels)


def test_missing_and_superfluous_features_are_flagged(run_with_features: LoadedRun) -> None:
    plain = as_loaded(run_of("transformer-tiny"))
    for run, wrong, reason in (
        (run_with_features, Example("ab"), FEATURES_REQUIRED),
        (plain, Example("ab", None, "N"), FEATURES_REFUSED),
    ):
        right = Example("ab", None, "N;PL" if run is run_with_features else None)
        bad, good, empty = (row[0] for row in run.generate([wrong, right, wrong._replace(source="")], max_length=5))
        assert list(empty.flags) == ["empty"]
        assert (bad.text, bad.ids, bad.flags) == ("", (), {"error": reason}) and "error" not in good.flags
        bad_score, good_score = run.score([wrong._replace(target="ba"), right._replace(target="ba")])
        assert bad_score.flags == {"error": reason} and bad_score.as_dict()["score"] is None
        assert good_score.flags == {} and good_score.score < 0
        with pytest.raises(UserError, match=f"stream: {reason}"):
            run.stream(wrong)
        with pytest.raises(UserError, match=reason):
            run.attention(wrong)
        with pytest.raises(
            UserError, match=rf"data\[0\]: {FEATURES_REQUIRED}" if run is run_with_features else "features"
        ):
            columns = ("source", "target") if run is run_with_features else ("source", "features", "target")
            run.evaluate(
                [("ab", "N", "ba")[: 3 if run is plain else 1] + ("ba",) * (run is run_with_features)], columns=columns
            )
    classifier = family("classes")
    (flagged,) = classify(classifier, [Example("ab", None, "N")])
    assert flagged.flags == {"error": FEATURES_REFUSED} and flagged.as_dict()["label"] is None


def test_unknown_tokens_and_features_are_flagged(run_with_features: LoadedRun) -> None:
    example = Example("aßb", None, "N;DU")
    reason = "not in the vocabulary: 'ß' (U+00DF), 'DU'"
    ((best,),) = run_with_features.generate([example], max_length=4)
    assert best.flags["unknown"] == reason and best.ids
    (scored,) = run_with_features.score([example._replace(target="bq")])
    assert scored.flags == {"unknown": f"{reason}, 'q'"} and scored.score < 0
    with pytest.warns(UserWarning, match="attention: not in the vocabulary") as warnings_:
        run_with_features.attention(example, "b")
    assert warnings_[0].filename == __file__
    (answer,) = classify(family("classes"), ["aß"])
    assert answer.flags and answer.label and answer.as_dict()["label"] == answer.label


def break_weights(run: Run, path: Path) -> Run:
    """Save a copy of a run with NaN weights."""
    run.save(path)
    copy = Run.load(path)
    with torch.no_grad():
        next(iter(weights_of(copy.model).values())).view(-1)[-1] = torch.nan
        for parameter in copy.model.parameters():
            if parameter.dim() > 1:
                parameter.view(-1)[0] = torch.nan
    copy.save(path)
    return copy


def test_broken_weights_are_refused(tmp_path: Path) -> None:
    run = break_weights(run_of("transformer-tiny"), tmp_path / "nan")
    run_of("transformer-tiny").save(tmp_path / "good")
    with pytest.raises(UserError, match="not numbers"):
        list(score(run, [("ab", "ba")]))
    result = call("score", tmp_path / "nan", "--json", stdin="ab\tba\n")
    assert result.code == 2 and result.out == "" and "its weights are broken" in result.err
    (tmp_path / "pairs.tsv").write_text("ab\tba\nba\tab\n" * 8)
    for verb in (
        ["heads", tmp_path / "nan", tmp_path / "pairs.tsv"],
        ["prune", tmp_path / "nan", tmp_path / "small", "--data", tmp_path / "pairs.tsv", "--heads", 1],
    ):
        assert "some weights are not finite numbers" in call(*verb).err
    inspection = call("inspect", tmp_path / "nan", "ab", "--target", "ba", "-o", tmp_path / "page.html")
    assert inspection.code == 2 and "some weights are not finite numbers" in inspection.err
    for order in (["nan", "good"], ["good", "nan"]):
        with pytest.raises(UserError, match=r"nan: some weights are not finite numbers \(\w"):
            average([tmp_path / name for name in order], tmp_path / "mean")
        assert not (tmp_path / "mean").exists()
    for kind in ("lm", "masked"):
        other = break_weights(family(kind), tmp_path / kind)
        with pytest.raises(UserError, match="not numbers"):
            score_text(other, torch.tensor(other.codec.source.encode(["abcabcabc"])[0]).numpy(), 4)
    with pytest.raises(UserError, match="not numbers"):
        classify(break_weights(family("classes"), tmp_path / "classes"), ["abc"])
    with pytest.raises(UserError, match="not numbers"):
        as_loaded(Run.load(tmp_path / "masked")).generate(["<mask>a"])
    with pytest.raises(UserError, match="not numbers"):
        as_loaded(Run.load(tmp_path / "masked")).embed(["abc"])
