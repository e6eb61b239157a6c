"""Streaming text against the tokenizer's own decoding of the whole, and stop strings against a search in the whole."""

import random

import pytest
import tokenizers
from dspark.runtime.detokenize import StopMatcher, TextTracker
from dspark.runtime.request import SamplingParams
from dspark.runtime.tokenizer import Tokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

CORPUS = ["the cat sat on the mat. " * 3, "def f(x):\n    return x\n" * 3, "naïve façade 東京 東京 🙂🙂 дом дом " * 3]
BOS = 0


def byte_level():
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=340,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|bos|>", "<|eos|>", "<｜user｜>"],
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    return Tokenizer(backend, BOS)


def byte_fallback():
    """A vocabulary as sentencepiece makes them: U+2581 for spaces, ``<0xE6>`` for bytes of unknown characters."""
    pieces = ["<s>", "</s>", "<unk>"] + [f"<0x{b:02X}>" for b in range(256)]
    pieces += ["\u2581", "\u2581the", "the", "cat", "a", "b", "c", "t", "h", "e", "."]
    backend = tokenizers.Tokenizer(
        models.BPE(vocab={p: i for i, p in enumerate(pieces)}, merges=[], byte_fallback=True, unk_token="<unk>")
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1, right=0),
        ]
    )
    backend.add_special_tokens(["<s>", "</s>"])
    return Tokenizer(backend, BOS)


def stream(tokenizer, ids, params=None):
    tracker = TextTracker(tokenizer)
    tracker.add("r", params or SamplingParams())
    pieces, kept = [], len(ids)
    for i, token in enumerate(ids):
        count = tracker.push("r", [token])
        if count is not None:
            kept = i + count
            break
        pieces.append(tracker.take("r", finished=False))
    pieces.append(tracker.take("r", finished=True))
    return pieces, kept


def random_text(rng):
    alphabet = "abt hec.\n" + "éüß東京дом🙂👩‍👩‍👧\u0301\u2581"
    return "".join(rng.choice(alphabet) for _ in range(rng.randrange(1, 40)))


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_streamed_text_is_the_decoded_text(build):
    tokenizer, rng = build(), random.Random(1)
    for _ in range(300):
        text = random_text(rng)
        ids = tokenizer.backend.encode(text).ids
        pieces, _ = stream(tokenizer, ids)
        assert "".join(pieces) == tokenizer.decode(ids)
        # Half a character is never shown: every piece is made of whole characters of the text.
        assert all("\ufffd" not in piece for piece in pieces[:-1]), text


@pytest.mark.parametrize("skip", [True, False])
def test_arbitrary_tokens_give_what_the_library_gives(skip):
    tokenizer, rng = byte_level(), random.Random(2)
    size = tokenizer.backend.get_vocab_size()
    for _ in range(500):
        ids = [rng.randrange(size + 3) for _ in range(rng.randrange(1, 30))]
        pieces, _ = stream(tokenizer, ids, SamplingParams(skip_special_tokens=skip))
        assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=skip), ids


def test_text_waits_only_for_the_rest_of_a_character():
    tokenizer = byte_level()
    ids = [tokenizer.backend.token_to_id(c) for c in "aðŁĻĤb"]  # a, the four bytes of U+1F642, b
    assert stream(tokenizer, ids)[0] == ["a", "", "", "", "\U0001f642", "b", ""]
    assert stream(tokenizer, ids[:3])[0] == ["a", "", "", "\ufffd"]


def test_bos_is_put_first_once():
    tokenizer = byte_level()
    plain = tokenizer.encode("the cat")
    assert plain[0] == BOS and plain.count(BOS) == 1
    assert tokenizer.encode("<|bos|>the cat") == plain
    assert tokenizer.encode("") == (BOS,)
    assert tokenizer.decode(plain) == "the cat"
    with pytest.raises(ValueError, match="Unicode at character 1"):
        tokenizer.encode("a\udc80")


def first_completion(text, stops):
    """Where the text ends and the character at which that is known, by looking at every prefix."""
    for end in range(1, len(text) + 1):
        ending = [s for s in stops if text[:end].endswith(s)]
        if ending:
            return end - max(map(len, ending)), end
    return None


def test_stop_matcher_equals_a_search_of_every_prefix():
    rng = random.Random(3)
    for _ in range(3000):
        stops = ["".join(rng.choice("ab") for _ in range(rng.randrange(1, 6))) for _ in range(rng.randrange(1, 4))]
        text = "".join(rng.choice("abc") for _ in range(rng.randrange(0, 30)))
        matcher, found, fed = StopMatcher(stops), None, 0
        while fed < len(text) and found is None:
            size = rng.randrange(1, 4)
            found = matcher.push(text[fed : fed + size])
            fed += size
            if found is None:
                seen = text[:fed]
                longest = max(k for s in stops for k in range(len(s)) if seen.endswith(s[:k]))
                assert matcher.num_held == longest, (stops, seen)
        expected = first_completion(text, stops)
        assert (found.start if found else None) == (expected[0] if expected else None), (stops, text)


@pytest.mark.parametrize("build", [byte_level, byte_fallback])
def test_stop_strings_cut_text_and_tokens_exactly(build):
    tokenizer, rng, num_stopped = build(), random.Random(4), 0
    for _ in range(400):
        ids = tokenizer.backend.encode(random_text(rng) + random_text(rng)).ids
        text = tokenizer.decode(ids)
        start = rng.randrange(len(text)) if text else 0
        stops = tuple({text[start : start + rng.randrange(1, 5)] or "x", rng.choice(["zz", "t.", "東京", "a"])})
        pieces, kept = stream(tokenizer, ids, SamplingParams(stop=stops))
        expected = first_completion(text, stops)
        if expected is None:
            assert "".join(pieces) == text and kept == len(ids)
            continue
        num_stopped += 1
        cut, known = expected
        assert "".join(pieces) == text[:cut]
        # The last kept token is the one that made the stop string complete, no sooner and no later.
        complete = [n for n in range(1, len(ids) + 1) if tokenizer.decode(ids[:n]).startswith(text[:known])]
        assert kept == complete[0], (ids, stops)
    assert num_stopped > 100


def test_a_block_of_tokens_is_cut_inside():
    tokenizer = byte_level()
    tracker = TextTracker(tokenizer)
    tracker.add("r", SamplingParams(stop=("b.", "zzz")))
    ids = [tokenizer.backend.token_to_id(c) for c in "abab.ab"]
    assert tracker.push("r", ids[:2]) is None
    assert tracker.take("r", finished=False) == "a"
    assert tracker.push("r", ids[2:]) == 3
    assert tracker.take("r", finished=True) == "ba"
    assert tracker.take("r", finished=True) == ""


def test_without_a_tokenizer_there_is_no_text_and_stop_strings_are_refused():
    tracker = TextTracker(None)
    tracker.add("r", SamplingParams())
    assert tracker.push("r", [1, 2]) is None
    assert tracker.take("r", finished=True) == ""
    with pytest.raises(ValueError, match="'q'.*tokenizer.json"):
        tracker.add("q", SamplingParams(stop=("x",)))


def test_broken_tokenizer_files_are_named(tmp_path):
    with pytest.raises(ValueError, match="no tokenizer.json"):
        Tokenizer.load(tmp_path, BOS)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match="tokenizer.json is not a tokenizer file"):
        Tokenizer.load(tmp_path, BOS)
    byte_level().backend.save(str(tmp_path / "tokenizer.json"))
    assert Tokenizer.load(tmp_path, BOS).decode(Tokenizer.load(tmp_path, BOS).encode("東京 🙂")) == "東京 🙂"
