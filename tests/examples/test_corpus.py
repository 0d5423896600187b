"""The corpus: both sides of its split, and nothing lost in tokens."""

from examples.demo.corpus import library_files, read_corpus, train_tokenizer


def test_split_depends_on_content_alone(tmp_path):
    for i in range(200):
        (tmp_path / f"{i:03}.py").write_text(f"x = {i}\n")
    files = library_files(tmp_path)
    corpus = read_corpus(files)
    assert len(corpus.train) + len(corpus.validation) == 200
    assert 1 <= len(corpus.validation) <= 25

    # under another name and in another order a text stays on its side
    (tmp_path / "000.py").rename(tmp_path / "zz.py")
    moved = read_corpus(library_files(tmp_path))
    assert set(moved.validation) == set(corpus.validation)
    assert moved != corpus and read_corpus([*files[1:], tmp_path / "zz.py"]) == moved


def test_skips_what_is_not_the_librarys_own_text(tmp_path):
    for name in ("a.py", "b.rst", "c.txt", "d.pyc", "site-packages/e.py", "x/test/f.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert [path.name for path in library_files(tmp_path)] == ["a.py", "b.rst", "c.txt"]


def test_tokens_give_the_text_back():
    texts = ["def f(x):\n    return x + 1\n", "naïve — 日本\t\n"] * 20
    tokenizer = train_tokenizer(texts, 300)
    assert len(tokenizer) <= 300
    for text in texts[:2]:
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert tokenizer.decode(ids, clean_up_tokenization_spaces=False) == text
    assert tokenizer.mask_token_id == 4
