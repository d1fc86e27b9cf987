"""Text as tokens of a public model: documents apart, each with the end token that the model's files name."""

import json
import shutil
from pydoc_data.topics import topics

import numpy as np
import pytest
from tokenizers import Tokenizer

from tests.train_example.tiny_checkpoint import END, VOCABULARY, write_tiny_checkpoint
from train_example.config import UserError
from train_example.data import Stream, open_text
from train_example.public_models.tokens import token_stream

TEXT = "\n".join(topics[name] for name in sorted(topics)[:40])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tokens") / "model")


@pytest.fixture
def without_end(folder, tmp_path):
    """A copy of the model's folder, whose config.json names no end token."""
    copy = shutil.copytree(folder, tmp_path / "model")
    content = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(content | {"eos_token_id": None}))
    return copy


def stream_of(folder, *documents, vocabulary=VOCABULARY):
    return token_stream(Stream([np.frombuffer(text.encode(), np.uint8) for text in documents]), folder, vocabulary)


def ids(stream):
    return stream.read(0, len(stream)).tolist()


def test_each_documents_tokens_are_the_tokenizers_with_the_models_end_token_and_the_text_comes_back(folder, tmp_path):
    stream = stream_of(folder, TEXT)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert ids(stream) == [*tokenizer.encode(TEXT).ids, tokenizer.token_to_id(END)]
    assert stream.decode(ids(stream)) == TEXT + END
    assert stream.bytes_per_unit == len(TEXT.encode()) / len(stream) > 1.1
    # Documents are tokenized apart.
    assert tokenizer.encode("list").ids != tokenizer.encode("li").ids + tokenizer.encode("st").ids
    for name, text in {"1": "li", "2": "st", "3": ""}.items():
        (tmp_path / name).write_text(text)
    stream = token_stream(open_text(str(tmp_path)), folder, VOCABULARY)
    end = tokenizer.token_to_id(END)
    assert ids(stream) == [*tokenizer.encode("li").ids, end, *tokenizer.encode("st").ids, end]
    assert (len(stream.documents), stream.end) == (2, end)


def test_what_the_tokenizers_last_user_cut_off_or_filled_up_is_forgotten(without_end):
    expected = ids(stream_of(without_end, TEXT[:5000]))
    tokenizer = Tokenizer.from_file(str(without_end / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4000)
    tokenizer.save(str(without_end / "tokenizer.json"))
    assert ids(stream_of(without_end, TEXT[:5000])) == expected


@pytest.mark.default_cases("*")
@pytest.mark.parametrize(
    ("file", "content", "end"),
    [
        ("generation_config.json", {"eos_token_id": [7, 5]}, 7),
        ("tokenizer_config.json", {"eos_token": END}, 0),
        ("tokenizer_config.json", {"eos_token": {"content": END}}, 0),
        ("generation_config.json", {}, None),
        ("generation_config.json", {"eos_token_id": 300}, "generation_config.json has eos_token_id=300, which tokeni"),
        ("generation_config.json", {"eos_token_id": True}, "has eos_token_id=True"),
        ("generation_config.json", {"eos_token_id": -1}, "has eos_token_id=-1"),
        ("tokenizer_config.json", {"eos_token": "</s>"}, "eos_token='</s>', which tokenizer.json has not"),
    ],
)
def test_the_end_token_is_that_of_the_models_files_and_a_token(without_end, file, content, end):
    (without_end / file).write_text(json.dumps(content))
    if isinstance(end, str):
        with pytest.raises(UserError, match=end):
            stream_of(without_end, "a")
    else:
        stream = stream_of(without_end, "a", "b")
        assert stream.end == end
        assert len(stream) == 2 + 2 * (end is not None)


def test_what_cannot_be_tokens(folder, tmp_path):
    with pytest.raises(UserError, match=r"has the token \d+, but the model only 100"):
        stream_of(folder, TEXT, vocabulary=100)
    (tmp_path / "latin").write_bytes("déjà".encode("latin-1"))
    with pytest.raises(UserError, match=r"latin is not UTF-8 \(invalid continuation byte: b'\\xe9'\): convert it"):
        token_stream(open_text(str(tmp_path / "latin")), folder, VOCABULARY)
    with pytest.raises(UserError, match=r"tokenizer.json cannot be read"):
        stream_of(tmp_path, "text")
