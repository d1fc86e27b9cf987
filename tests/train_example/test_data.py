"""The text: streams, splits, batches."""

import os
import resource

import numpy as np
import pytest

from train_example.config import UserError
from train_example.data import Corpus, Stream, open_text
from train_example.program.run import unigram_bits

MIB = 2**20


def random_bytes(size, seed=0):
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


def test_default_text_is_english_and_the_same_every_time():
    stream = open_text(None)
    text = stream.read(0, len(stream)).tobytes()
    assert len(text) > 200_000
    assert text.count(b" the ") > 1000
    assert open_text(None).read(0, len(stream)).tobytes() == text


def test_reads_cross_the_borders_of_files(tmp_path):
    sizes = (5, 1, 17, 3)
    parts = [random_bytes(size, seed) for seed, size in enumerate(sizes)]
    (tmp_path / "file").write_bytes(parts[2].tobytes())
    stream = Stream([parts[0], parts[1], tmp_path / "file", parts[3]])
    whole = np.concatenate(parts)
    assert len(stream) == whole.size
    for start in range(whole.size):
        for stop in range(start + 1, whole.size + 1):
            np.testing.assert_array_equal(stream.read(start, stop - start), whole[start:stop])


def test_folder_is_its_visible_files_in_order_of_path(tmp_path):
    for name, text in {"b.txt": "2", "a/z.txt": "1", "c/a.txt": "3", ".hidden": "x", ".git/config": "y"}.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").touch()
    stream = open_text(str(tmp_path))
    assert stream.read(0, len(stream)).tobytes() == b"123"


def test_folder_may_hold_more_files_than_a_process_may_open(tmp_path):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        for i in range(400):
            (tmp_path / f"{i:03}").write_text(f"{i:03}")
        stream = open_text(str(tmp_path))
        text = b"".join(stream.read(start, 3).tobytes() for start in range(0, len(stream), 3))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert text == b"".join(b"%03d" % i for i in range(400))


def batch(corpus, seed, step, size):
    return corpus.windows(corpus.batch_starts(seed, step, size))


@pytest.mark.parametrize(
    "change", [lambda file: os.truncate(file, 4000), lambda file: os.truncate(file, 6000), os.unlink]
)
def test_a_file_that_changes_while_it_is_read_is_named(tmp_path, change):
    for name in "abc":
        (tmp_path / name).write_bytes(name.encode() * 5000)
    text = open_text(str(tmp_path))
    assert bytes(text.read(4999, 5002)) == b"a" + b"b" * 5000 + b"c"
    change(tmp_path / "b")
    with pytest.raises(UserError, match=r"--data .*/b (has another size than when it was opened|cannot be read)"):
        text.read(4999, 5002)


def test_batch_is_a_function_of_seed_and_step():
    corpus, again = (Corpus(Stream([random_bytes(5000)]), 20) for _ in range(2))
    found = batch(corpus, 1, 7, 4)
    assert found.shape == (4, 21)
    assert found.dtype == np.uint8
    np.testing.assert_array_equal(found, batch(again, 1, 7, 4))
    assert (found != batch(corpus, 1, 8, 4)).any()
    assert (found != batch(corpus, 2, 7, 4)).any()


@pytest.mark.parametrize("size", [42, 60, 1000])
def test_held_out_part_is_never_trained_on(size):
    held_out = max(21, size // 10)
    text = np.concatenate([np.zeros(size - held_out, np.uint8), np.ones(held_out, np.uint8)])
    corpus = Corpus(Stream([text]), 20)
    assert corpus.training_units == size - held_out
    assert not any(batch(corpus, 0, step, 16).any() for step in range(200))
    windows = corpus.windows(corpus.held_out_starts(most=100, multiple=4))
    assert windows.all()
    assert windows.shape[0] % 4 == 0


def test_held_out_windows_cover_the_held_out_part_which_is_bounded():
    corpus = Corpus(Stream([(np.arange(2000) // 10).astype(np.uint8)]), 20)
    assert set(corpus.windows(corpus.held_out_starts(most=100, multiple=1)).flat) == set(range(180, 200))
    assert Corpus(Stream([np.zeros(300 * MIB, np.uint8)]), 20).held_out_units == 16 * MIB


@pytest.mark.slow
def test_offsets_past_two_to_the_31(tmp_path):
    end = random_bytes(1000)
    with (tmp_path / "big").open("wb") as file:  # sparse, takes no room
        file.truncate(2**32)
        file.seek(0, 2)
        file.write(end.tobytes())
    corpus = Corpus(open_text(str(tmp_path / "big")), 64)
    stream = corpus.stream
    assert len(stream) == 2**32 + 1000
    np.testing.assert_array_equal(stream.read(2**32 - 10, 110), np.concatenate([np.zeros(10, np.uint8), end[:100]]))
    starts, read = [], stream.read
    stream.read = lambda start, length: (starts.append(start), read(start, length))[1]
    batch(corpus, 0, 0, 64)
    assert 2**31 < max(starts) <= corpus.training_units - 65
    assert min(starts) < 2**31
    assert unigram_bits(corpus) < 0.01


def test_unigram_entropy_is_that_of_the_text_and_of_a_sample_of_a_large_one():
    text = np.repeat(np.array([65, 66, 67], np.uint8), [500, 250, 250])
    assert unigram_bits(Corpus(Stream([text]), 20)) == pytest.approx(1.5)
    assert f"{unigram_bits(Corpus(Stream([text[:500]]), 20)):.3f}" == "0.000"
    corpus = Corpus(Stream([random_bytes(70 * MIB) % 4]), 20)
    read_bytes, read = [], corpus.stream.read
    corpus.stream.read = lambda start, length: (read_bytes.append(length), read(start, length))[1]
    assert unigram_bits(corpus) == pytest.approx(2, abs=1e-4)
    assert sum(read_bytes) == 64 * MIB


def test_too_short_a_text_says_how_much_is_needed():
    with pytest.raises(UserError, match="has 41 bytes, must have at least 42"):
        Corpus(Stream([np.zeros(41, np.uint8)]), 20)
