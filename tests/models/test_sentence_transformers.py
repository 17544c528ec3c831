"""SentenceTransformer, built from a small random model and a tokenizer made here."""

import pytest
import torch

import maskwise as mw

from .contract import routes
from .zoo import BERT, config, transformers

sentence_transformers = pytest.importorskip("sentence_transformers", reason="sentence-transformers is not installed")

WORDS = ["a", "mask", "says", "what", "is", "kept", "and", "padding", "costs", "nothing", "when", "it", "never", "runs"]
TEXTS = ["a mask", "padding costs nothing when it never runs", "what is kept", "a mask says what is kept and nothing"]


@pytest.fixture
def encoder(tmp_path):
    vocabulary = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    (tmp_path / "vocab.txt").write_text("\n".join(vocabulary))
    model = transformers.BertModel(config("Bert", **{**BERT, "vocab_size": len(vocabulary)}))
    model.save_pretrained(tmp_path)
    transformers.BertTokenizer(str(tmp_path / "vocab.txt")).save_pretrained(tmp_path)
    return sentence_transformers.SentenceTransformer(str(tmp_path), device="cpu")


def test_encode_works_unchanged_and_runs_packed(encoder):
    expected = encoder.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
    mw.unpad(encoder)
    with mw.explain() as log:
        found = encoder.encode(TEXTS, convert_to_tensor=True, show_progress_bar=False)
    assert routes(log) == ["packed"]
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
