"""The Bible's text, from a file as the package has it, and a language model's loss over sentences."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import samples_of, split_of

from hocket.errors import UserError
from hocket_tasks.bible import Bible, Network
from hocket_tasks.bible_text import FILE, _decompressed, read_verses
from hocket_tasks.sequences import NextElements

HEADER = b"\x1f\x9d\x90"  # what `compress` writes before a stream of codes of up to 16 bits
CLEAR = 256


def compressed(text: bytes, clear_after: int = 10**9) -> bytes:
    """Return what `compress` writes, without its header; the table is cleared once, after so many codes."""
    bits: list[np.ndarray] = []
    group: list[int] = []
    width, table, before, num_codes = 9, {bytes([byte]): byte for byte in range(256)}, b"", 0

    def put(code: int) -> None:
        group.append(code)
        bits.append((code >> np.arange(width)) & 1)

    def fill_group() -> None:
        while len(group) % 8:
            put(0)
        group.clear()

    for byte in text:
        longer = before + bytes([byte])
        if longer in table:
            before = longer
            continue
        put(table[before])
        num_codes += 1
        table[longer] = len(table) + 1  # 256 is no string
        before = bytes([byte])
        # The reader's table is one string behind.
        if len(table) == 2**width:
            fill_group()
            width += 1
        if num_codes == clear_after:
            put(CLEAR)
            fill_group()
            width, table = 9, {bytes([byte]): byte for byte in range(256)}
    if before:
        put(table[before])
    return np.packbits(np.concatenate(bits).astype(np.uint8), bitorder="little").tobytes() if bits else b""


def bible_data(path: Path, text: bytes, block: int = 65536) -> None:
    blocks = [compressed(text[start : start + block]) for start in range(0, len(text), block)]
    table_at = 0x58
    first = table_at + 4 + 4 * len(blocks)
    starts = first + np.cumsum([0, *map(len, blocks)])[:-1]
    head = bytes(table_at) + struct.pack(f">I{len(blocks)}I", len(blocks), *starts)
    path.write_bytes(head + b"".join(blocks))


VERSES = (
    b"Holy Bible.  Textfile 930105.\n"
    + b"Ge1:1 In the beginning God created the heaven and the earth.\n"
    + b"Ge1:2 And he said, Who? I am. So it was\n1Sa1:3 and it is.\n" * 30
)


@pytest.fixture
def file(tmp_path: Path) -> str:
    bible_data(tmp_path / "bible.data", VERSES, block=1000)
    return str(tmp_path / "bible.data")


@given(st.binary(max_size=40).flatmap(lambda part: st.integers(0, 60).map(lambda times: part * times)))
def test_what_was_compressed_comes_back(text: bytes) -> None:
    assert _decompressed(compressed(text)) == text


@pytest.mark.parametrize("clear_after", [1, 8, 100, 300, 1000, 10**9])
def test_streams_as_gzip_reads_them(clear_after: int) -> None:
    """Codes of up to 13 bits, and tables that are cleared; the encoder above agrees with gzip, too."""
    text = (np.random.default_rng(0).integers(97, 107, 30_000)).astype(np.uint8).tobytes()
    stream = compressed(text, clear_after)
    read = subprocess.run(["gzip", "-dc"], input=HEADER + stream, capture_output=True, check=True)
    assert read.stdout == text
    assert _decompressed(stream) == text


def test_verses_are_one_text_without_their_numbers(file: str) -> None:
    expected = b"In the beginning God created the heaven and the earth."
    expected += b" And he said, Who? I am. So it was and it is." * 30
    assert read_verses(file) == expected


GUTENBERG = """\ufeffThe Project Gutenberg eBook of a Bible
with a preface.

*** START OF THE PROJECT GUTENBERG EBOOK A BIBLE ***

The First Book of Moses

1:1 In the beginning God created the
heaven and the earth. 1:2 And he said, \u201cWho?\u201d I am \u2014 caf\u00e9 at 11:15pm.

*** END OF THE PROJECT GUTENBERG EBOOK A BIBLE ***
and a licence
"""


def test_a_plain_text_is_read_too(tmp_path: Path) -> None:
    expected = (
        b"The First Book of Moses In the beginning God created the heaven and the earth. "
        b'And he said, "Who?" I am -- cafe at 11:15pm.'
    )
    path = tmp_path / "pg10.txt"
    path.write_text(GUTENBERG, encoding="utf-8")
    assert read_verses(str(path)) == expected
    bare = tmp_path / "bare.txt"
    bare.write_text("One. ! Two\n\nthree. " * 20)
    train, valid = samples_of(NextElements, Bible(file=str(bare)))
    assert (len(train), len(valid)) == (38, 2)  # without the signs that stand alone
    for content, message in (
        (b"\xff\xfe", "is not UTF-8 text: invalid start byte at byte 0"),
        (b" \n", "holds no ASCII text"),
    ):
        (tmp_path / "other.txt").write_bytes(content)
        read_verses.cache_clear()
        with pytest.raises(UserError, match=message):
            read_verses(str(tmp_path / "other.txt"))


@pytest.mark.filterwarnings("ignore")  # of the library and of what it uses
def test_what_the_library_datasets_has_saved_is_read_too(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    texts, kind = ["One line. And", "", " another one."], datasets.Value("string")
    lines = split_of({"text": kind}, {"text": texts})
    datasets.DatasetDict({"train": lines, "test": lines}).save_to_disk(tmp_path / "both")
    lines.save_to_disk(tmp_path / "alone")
    for name in ("both", "alone"):
        assert read_verses(str(tmp_path / name)) == b"One line. And another one."
    split_of({"words": kind}, {"words": texts}).save_to_disk(tmp_path / "words")
    with pytest.raises(UserError, match=r"task\.file: .* has no column 'text'; there are: words"):
        read_verses(str(tmp_path / "words"))


def test_sentences_reach_over_verses_and_the_last_are_held_out(file: str) -> None:
    train, valid = samples_of(NextElements, Bible(file=file))
    sentences = ["And he said, Who?", "I am.", "So it was and it is."]
    assert (len(train), len(valid)) == (87, 4)
    assert train.lengths.tolist()[:4] == [53, *(len(sentence) - 1 for sentence in sentences)]
    inputs, targets = train[[1, 2]]
    assert bytes(inputs[0].tolist()).decode() == sentences[0][:-1]
    assert bytes(targets[0].tolist()).decode() == sentences[0][1:]
    assert bytes(targets[1].tolist()).rstrip(b"\0").decode() == sentences[1][1:]
    assert valid.lengths.tolist() == sorted(valid.lengths)


def test_sentences_are_cut_and_stretches_are_alike(file: str) -> None:
    cut, _ = samples_of(NextElements, Bible(file=file, longest=10))
    assert cut.lengths.max() == 9
    stretches, _ = samples_of(NextElements, Bible(file=file, length=64))
    assert set(stretches.lengths.tolist()) == {64}
    inputs, targets = stretches[[0, 1]]
    assert inputs.shape == targets.shape == (2, 64)
    assert targets[0, -1] == inputs[1, 0]


def test_loss_and_accuracy_are_means_over_sentences() -> None:
    """Against a loop over sentences; padding counts for nothing."""
    torch.manual_seed(0)
    task = Bible(hidden=4)
    target = torch.tensor([[5, 6, 7, 8], [9, 3, 0, 0]])
    output = torch.randn(2, 4, 128)
    output[0, :3, [5, 6, 7]] += 20 * torch.eye(3)
    output[1, 2:, 0] += 20
    losses, shares = [], []
    for logits, wanted, length in zip(output, target, (4, 2), strict=True):
        found = torch.log_softmax(logits[:length], dim=1)[torch.arange(length), wanted[:length]]
        losses.append(-found.mean())
        shares.append((logits[:length].argmax(dim=1) == wanted[:length]).float().mean())
    torch.testing.assert_close(task.loss(output, target), torch.stack(losses).mean())
    torch.testing.assert_close(task.metrics(output, target)["accuracy"], torch.stack(shares).sum())
    assert task.loss(task.model()(target), target).item() == pytest.approx(np.log(128), abs=0.5)


def test_the_transformer_looks_back_only_and_takes_sentences_and_stretches() -> None:
    torch.manual_seed(0)
    fields: dict[str, Any] = {"network": "transformer", "hidden": 8, "heads": 2}
    text = torch.randint(1, 128, (3, 9))
    changed = text.clone()
    changed[:, 5:] = 1
    for task in (Bible(length=9, **fields), Bible(longest=10, **fields)):
        model = task.model()
        told, other = model(text), model(changed)
        assert told.shape == (3, 9, 128)
        torch.testing.assert_close(told[:, :5], other[:, :5])
        assert (told[:, 5:] - other[:, 5:]).abs().amax(2).min() > 1e-4
        # What comes before matters at each place.
        changed_at_0 = text.clone()
        changed_at_0[:, 0] = (text[:, 0] + 1) % 128
        assert (model(changed_at_0) - told).abs().amax(2).min() > 1e-4
        torch.testing.assert_close(model(text[:, :4]), told[:, :4])
        assert task.loss(told, text).item() == pytest.approx(np.log(128), abs=0.5)
    drawn = [values for name, values in model.named_parameters() if name.endswith("linear1.weight")]
    assert len(drawn) == 2
    assert not torch.equal(*drawn)


def test_a_transformer_learns_what_repeats(file: str) -> None:
    task = Bible(file=file, length=16, network=Network.TRANSFORMER, hidden=16, heads=2, held_out=10)
    train, valid = samples_of(NextElements, task)
    assert (len(train), len(valid)) == (79, 8)
    torch.manual_seed(0)
    model = task.model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    inputs, targets = train[list(range(10, len(train)))]
    for _ in range(60):
        optimizer.zero_grad()
        task.loss(model(inputs), targets).backward()
        optimizer.step()
    inputs, targets = valid[list(range(8))]
    assert task.loss(model(inputs), targets).item() < 1.0


def test_a_missing_file_says_what_installs_it(tmp_path: Path) -> None:
    with pytest.raises(UserError) as caught:
        Bible(file=str(tmp_path / "nowhere")).data(seed=0)
    message = str(caught.value)
    assert message.startswith(f"task.file: {tmp_path / 'nowhere'} cannot be read: No such file or directory.")
    assert "apt install bible-kjv-text" in message


@pytest.mark.parametrize(
    "content", [bytes(8), b"no table\0", bytes(0x58) + struct.pack(">II", 1, 96) + b"\xff" * 9]
)
def test_another_file_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(UserError, match=r"^task\.file: .*other (is not the|holds no verses).*bible-kjv-text"):
        read_verses(str(tmp_path / "other"))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"length": 1}, "length is 1; allowed: 2 or more"),
        ({"longest": 1}, "longest is 1; allowed: 2 or more"),
        ({"hidden": 0}, "hidden is 0; allowed: 1 or more"),
        ({"layers": 0}, "layers is 0; allowed: 1 or more"),
        ({"held_out": 0}, "held_out is 0; allowed: 1 or more"),
        ({"network": "transformer", "hidden": 6}, "hidden is 6; allowed: a multiple of the 4 heads"),
    ],
)
def test_values_out_of_range_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Bible(**fields)


@pytest.mark.skipif(not Path(FILE).is_file(), reason="needs Debian's package bible-kjv-text")
def test_the_installed_text_is_whole() -> None:
    samples = samples_of(NextElements, Bible(longest=10**6))
    lengths = np.concatenate([part.lengths for part in samples]) + 1
    assert read_verses(FILE).startswith(
        b"In the beginning God created the heaven and the earth. And the earth"
    )
    assert read_verses(FILE).endswith(b"The grace of our Lord Jesus Christ be with you all. Amen.")
    assert (len(read_verses(FILE)), len(lengths)) == (4_137_849, 29_710)
    assert (lengths.min(), lengths.max()) == (4, 2298)
    assert (lengths.mean(), lengths.std()) == (pytest.approx(138.3, abs=0.1), pytest.approx(102.1, abs=0.1))
