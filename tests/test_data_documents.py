"""Documents: which files are read, what is refused, and what is held out."""

import os
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mtx.data.documents import hold_out, read_documents
from mtx.errors import UserError


@pytest.fixture
def folder(tmp_path):
    """Writes {relative path: text or bytes} below a folder and returns the folder."""

    def write(files: dict[str, str | bytes]):
        for name, content in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return tmp_path

    return write


def refusal(*paths: object) -> str:
    with pytest.raises(UserError) as caught:
        read_documents([str(path) for path in paths])
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_folder_is_read_recursively_in_the_order_of_names(folder):
    root = folder(
        {"b.txt": "b", "a.MD": "a", "sub/z.rst": "z", "sub/deep/y.txt": "y", "aa/x.text": "x"}
    )
    documents = read_documents([str(root)])
    assert documents.texts == ["a", "b", "x", "z", "y"]
    assert documents.source == f"5 files from {root}"


def test_a_folder_leaves_out_hidden_names_empty_files_and_other_suffixes(folder):
    root = folder(
        {
            ".git/a.txt": "no",
            ".b.txt": "no",
            "c.py": "no",
            "e.txt": "",
            "f.txt": "\ufeff",
            "d.txt": "d",
        }
    )
    documents = read_documents([str(root)])
    assert documents.texts == ["d"]
    assert documents.source == f"1 file from {root} (2 empty left out)"


def test_a_named_file_is_taken_whatever_its_suffix(folder):
    root = folder({"code.py": "x = 1\r\n", "book": "\ufeffOnce"})
    documents = read_documents([str(root / "code.py"), str(root / "book")])
    assert documents.texts == ["x = 1\r\n", "Once"]


def test_a_file_that_is_reached_twice_is_read_once(folder):
    root = folder({"a.txt": "a", "sub/b.txt": "b"})
    (root / "link.txt").symlink_to(root / "a.txt")
    (root / "sub" / "up").symlink_to(root)
    paths = [str(root / "a.txt"), str(root), os.path.relpath(root / "sub")]
    assert read_documents(paths).texts == ["a", "b"]


def test_a_linked_folder_is_read(folder):
    root = folder({"real/a.txt": "a", "given/b.txt": "b"})
    (root / "given" / "more").symlink_to(root / "real")
    assert read_documents([str(root / "given")]).texts == ["b", "a"]


def test_many_paths_are_summed_up(folder):
    root = folder({f"{i}.txt": str(i) for i in range(5)})
    paths = [str(root / f"{i}.txt") for i in range(5)]
    assert read_documents(paths).source == f"5 files from {', '.join(paths[:3])} and 2 more"


def test_a_missing_path_is_named_with_the_folder_it_was_looked_for_in(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    message = refusal("corpus/wiki.txt")
    assert message.startswith("data path 'corpus/wiki.txt' does not exist")
    assert str(tmp_path) in message and "Python's help topics" in message


def test_an_empty_file_is_refused_when_it_is_named(folder):
    root = folder({"a.txt": "a", "empty.txt": ""})
    assert refusal(root / "empty.txt") == (
        f"{root / 'empty.txt'} is empty; take it out of the data path"
    )


def test_a_folder_of_empty_files_is_refused(folder):
    root = folder({"a.txt": "", "b.txt": ""})
    assert refusal(root) == (f"all text files in {root} are empty (2); name files that hold text")


def test_a_folder_without_text_files_is_refused_with_the_suffixes(folder):
    root = folder({"a.py": "x", "sub/b.jsonl": "{}"})
    assert refusal(root) == (
        f"{root} holds no file that ends in .txt, .text, .md, .markdown, .rst; name files that do"
    )


def test_a_link_to_a_parent_is_walked_once(folder):
    root = folder({"sub/a.py": "x"})
    (root / "sub" / "up").symlink_to(root)
    assert f"{root} holds no file" in refusal(root)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"abc\0def", "is not text: NUL at byte offset 3"),
        ("text".encode("utf-16-le"), "is not text: NUL at byte offset 1"),
        (b"caf\xe9 au lait", "is not UTF-8 text: byte 0xe9 at byte offset 3"),
        (b"\xef\xbb\xbfcut \xc3", "is not UTF-8 text: byte 0xc3 at byte offset 7"),
    ],
)
def test_a_binary_file_is_refused_with_its_name_and_the_byte_offset(folder, content, said):
    root = folder({"good.txt": "good", "x.txt": content})
    for given_path in (root, root / "x.txt"):
        message = refusal(given_path)
        assert message.startswith(f"{root / 'x.txt'} {said}")


def test_a_broken_link_in_a_folder_is_refused(folder):
    root = folder({"a.txt": "a"})
    (root / "b.txt").symlink_to(root / "gone.txt")
    assert str(root / "b.txt") in refusal(root)


def test_python_carries_enough_text_of_its_own():
    documents = read_documents([])
    assert len(documents.texts) >= 50
    assert sum(map(len, documents.texts)) >= 360_000
    assert "help topics of Python 3." in documents.source


def test_no_passage_of_the_help_topics_stands_in_two_documents():
    seen: dict[str, int] = {}
    for index, text in enumerate(read_documents([]).texts):
        for paragraph in text.split("\n\n"):
            words = " ".join(paragraph.split())
            if len(words) > 200:
                assert seen.setdefault(words, index) == index, words


def test_a_python_without_help_topics_is_told_to_name_files(monkeypatch):
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    assert "no pydoc_data.topics" in refusal()


untimed = settings(deadline=None)  # examples must not fail because the machine is busy
lengths = st.lists(st.integers(1, 500), min_size=1, max_size=50)
fractions = st.floats(0.01, 0.9)


def unlike(lengths: list[int]) -> list[str]:
    """Texts of these lengths in which no character occurs twice, within or across."""
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return [
        "".join(chr(0x20000 + c) for c in range(start, start + length))
        for start, length in zip(starts, lengths, strict=True)
    ]


@untimed
@given(lengths=lengths, fraction=fractions, seed=st.integers(0, 2**40))
def test_every_character_is_either_trained_on_or_held_out(lengths, fraction, seed):
    texts = unlike(lengths)
    split = hold_out(texts, fraction=fraction, seed=seed)
    assert all(split.train) and all(split.held_out)
    assert sorted("".join(split.train + split.held_out)) == sorted("".join(texts))
    assert hold_out(texts, fraction=fraction, seed=seed) == split


@untimed
@given(lengths=lengths, fraction=fractions, seed=st.integers(0, 2**40))
def test_the_held_out_share_is_met_and_never_passed(lengths, fraction, seed):
    split = hold_out(unlike(lengths), fraction=fraction, seed=seed)
    held, wanted = len("".join(split.held_out)), fraction * sum(lengths)
    rounding = len(lengths) / 2
    assert 0.75 * wanted - rounding <= held <= wanted + rounding


@untimed
@given(lengths=lengths, fraction=fractions, seed=st.integers(0, 2**40))
def test_what_is_held_out_is_a_whole_document_or_the_tail_of_one(lengths, fraction, seed):
    texts = unlike(lengths)
    split = hold_out(texts, fraction=fraction, seed=seed)
    assert sum(text in texts for text in split.held_out) >= split.held_whole
    assert all(any(text.endswith(held) for text in texts) for held in split.held_out)
    assert all(any(text.startswith(kept) for text in texts) for kept in split.train)


def test_one_file_gives_its_tail():
    (text,) = unlike([1000])
    split = hold_out([text], fraction=0.05, seed=0)
    assert (split.train, split.held_out) == ([text[:950]], [text[950:]])
    assert split.describe() == "the tail of 1 document held out"


def test_many_files_are_held_out_whole():
    texts = unlike([100] * 200)
    split = hold_out(texts, fraction=0.05, seed=0)
    assert len(split.held_out) == split.held_whole == 10
    assert sorted(split.train + split.held_out) == texts
    assert split.describe() == "10 whole documents held out"


def test_a_giant_among_notes_gives_its_tail_and_the_notes_their_share():
    giant, *notes = unlike([9000] + [10] * 100)
    split = hold_out([giant, *notes], fraction=0.1, seed=3)
    assert giant[-900:] in split.held_out
    assert split.held_whole == 10
    assert split.describe() == "10 whole documents and the tail of 1 document held out"


def test_a_larger_share_adds_documents_to_a_smaller_one():
    """The first document that does not fit ends the held-out part, whatever its length."""
    texts = unlike([1 + i % 40 for i in range(400)])
    shares = [
        hold_out(texts, fraction=fraction, seed=7).held_out for fraction in (0.05, 0.1, 0.2, 0.4)
    ]
    for smaller, larger in zip(shares, shares[1:], strict=False):
        assert larger[: len(smaller)] == smaller and len(larger) > len(smaller)


def test_the_seed_decides_the_order_and_what_is_held_out():
    texts = unlike([10] * 200)
    first, second = (hold_out(texts, fraction=0.1, seed=seed) for seed in (0, 1))
    assert first.train != texts and first.train != second.train
    assert set(first.held_out) != set(second.held_out)
