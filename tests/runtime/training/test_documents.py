"""Training text: which documents a file holds, and how they are cut."""

import gzip
import json

import numpy as np
import pytest
from dspark.runtime.checkpoint import bundled_model
from dspark.runtime.tokenizer import Tokenizer
from dspark.runtime.training.documents import (
    TextDocument,
    cut,
    is_held_out,
    load_sequences,
    read_documents,
    source_name,
)


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.load(bundled_model(), 0)


def test_documents_of_a_text_file(tmp_path):
    text = "one\ntwo\n<|eos|>\n\nthree<|user|>\n<|eos|>\n \n<|eos|>\nlast"
    (tmp_path / "a.txt").write_text(text)
    with gzip.open(tmp_path / "b.txt.gz", "wt") as stream:
        stream.write(text)
    for name in ("a.txt", "b.txt.gz"):
        documents = [document.text for document in read_documents(tmp_path / name, "<|eos|>")]
        assert documents == ["one\ntwo", "\nthree<|user|>", "last"]
    assert source_name(tmp_path / "b.txt.gz") == "b"


def test_documents_of_json_lines(tmp_path):
    lines = [{"text": "whole"}, {"prompt": "ask", "completion": "answer", "complete": False}]
    (tmp_path / "c.jsonl").write_text("\n".join(json.dumps(line) for line in lines) + "\n\n")
    assert list(read_documents(tmp_path / "c.jsonl", "<|eos|>")) == [
        TextDocument("", "whole", True),
        TextDocument("ask", "answer", False),
    ]


@pytest.mark.parametrize("line", ['{"text": 3}', "[]", "{", '{"prompt": "only"}'])
def test_a_bad_line_is_named(tmp_path, line):
    (tmp_path / "c.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(ValueError, match="line 2"):
        list(read_documents(tmp_path / "c.jsonl", "<|eos|>"))


def test_other_files_are_refused(tmp_path):
    (tmp_path / "d.csv").write_text("x")
    with pytest.raises(ValueError, match="expected a .txt"):
        list(read_documents(tmp_path / "d.csv", "<|eos|>"))
    with pytest.raises(ValueError, match="no such file"):
        list(read_documents(tmp_path / "absent.txt", "<|eos|>"))


@pytest.mark.parametrize("max_length", [8, 9, 33])
def test_a_long_document_is_cut_without_loss(tokenizer, max_length):
    text = "def f(x):\n    return x + 1\n" * 9
    ids = [*tokenizer.backend.encode(text).ids, 1]
    pieces = cut(TextDocument("", text), tokenizer, 1, max_length, "code", False)
    assert all(piece.ids[0] == 0 and 3 <= len(piece.ids) <= max_length for piece in pieces)
    joined = np.concatenate([piece.ids[1:] for piece in pieces]).tolist()
    assert joined == ids[: len(joined)] and len(ids) - len(joined) < 2
    assert all(piece.first_label == 1 for piece in pieces)


def test_a_prompt_is_not_learned(tokenizer):
    document = TextDocument("<|user|>Hello!<|assistant|>", "Good day to you.")
    (piece,) = cut(document, tokenizer, 1, 100, "chat", True)
    prompt = [0, *tokenizer.backend.encode(document.prompt).ids]
    assert piece.ids[: piece.first_label].tolist() == prompt and piece.ids[-1] == 1 and piece.held_out


def test_held_out_documents_depend_on_their_text_alone():
    documents = [TextDocument("", f"document {number}") for number in range(4000)]
    held = [is_held_out(document, 0.1) for document in documents]
    assert 300 < sum(held) < 500
    assert held[::-1] == [is_held_out(document, 0.1) for document in reversed(documents)]
    assert not any(is_held_out(document, 0.1) and not is_held_out(document, 0.3) for document in documents)


def test_a_token_limit_takes_whole_pieces_in_a_random_order(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("\n<|eos|>\n".join(f"document number {n} says {n * n}" for n in range(300)))
    options = {"max_length": 64, "held_out_share": 0.2}
    everything = load_sequences([tmp_path / "a.txt"], tokenizer, 1, **options)
    some = load_sequences([tmp_path / "a.txt"], tokenizer, 1, **options, max_tokens=500, seed=3)
    sizes = [len(sequence.ids) for sequence in some]
    assert sum(sizes[:-1]) < 500 <= sum(sizes)
    texts = [sequence.ids.tobytes() for sequence in everything]
    assert all(sequence.ids.tobytes() in texts for sequence in some)
    assert [sequence.ids.tobytes() for sequence in some] != texts[: len(some)]


def test_text_that_leaves_nothing_to_evaluate_is_refused(tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text("a single document of a few words")
    with pytest.raises(ValueError, match="1 sequences of 1 files leave no"):
        load_sequences([tmp_path / "a.txt"], tokenizer, 1, max_length=64, held_out_share=0.5)
