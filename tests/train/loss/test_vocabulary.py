"""A teacher with another vocabulary is refused, and one that is only padded otherwise is not."""

import copy
import shutil
import warnings

import pytest
import transformers
from tokenizers import Tokenizer, models

import growkern
from growkern import GrowthError, InheritanceSchedule, TwoStageTrainer
from growkern.errors import GrowthWarning
from growkern.train.loss.inheritance import check_padding, check_tokenizers, check_vocabulary
from growkern.train.topk_teacher.teacher import TopKTeacher
from testbed.tiny import VOCAB, TinyTokenizer, arguments, batch, build
from tests.train.topk_teacher.test_teacher_cache import make

SCHEDULE = InheritanceSchedule(end_step=2)
WORDS = [f"w{i}" for i in range(VOCAB)]


def tokenizer(words=WORDS):
    table = models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[1])
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(table), unk_token=words[1], pad_token=words[0]
    )


def saved(folder, words, family="gpt2", **options):
    """A model beside its tokenizer, loaded from there."""
    model = build(family, layers=1, **options)
    model.save_pretrained(folder)
    if words:
        tokenizer(words).save_pretrained(folder)
    return type(model).from_pretrained(folder)


def start(tmp_path, student, teacher, **options):
    return TwoStageTrainer(
        student, arguments(tmp_path / "out"), teacher=teacher, inheritance=SCHEDULE, **options
    )


def roberta(columns):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = transformers.RobertaConfig(vocab_size=columns, intermediate_size=32, **sizes)
    return transformers.RobertaForMaskedLM(config)


# ------------------------------------------------------------------ padding


@pytest.mark.parametrize(
    ("tokens", "columns"),
    [
        *((50257, 50304), (50265, 50272), (50254, 50432), (50277, 50688), (32100, 32128)),
        *((250680, 250880), (50280, 50368), (50295, 51200), (151665, 151936), (151665, 152064)),
        *((100015, 102400), (128815, 129280), (200019, 201088), (255029, 256000)),
        *((30522, 30522), (48, 64), (48, 128), (305, 320), (305, 384)),
    ],
)
def test_published_vocabularies_are_padding(tokens, columns):
    """OPT, Pythia, T5, BLOOM, ModernBERT, Phi-2, Qwen2.5, DeepSeek, gpt-oss, Command R."""
    with warnings.catch_warnings(record=True) as said:
        check_padding("the teacher", columns, tokens, "choose another")
    expected = f"{tokens}: the last {columns - tokens} are taken as padding"
    assert [expected in str(one.message) for one in said] == [True] * (columns > tokens)


@pytest.mark.parametrize(
    ("tokens", "columns"),
    [
        (305, 502),
        (305, 504),
        (305, 512),
        (305, 1024),
        # multiples of 8, as one size in eight is
        (30522, 30600),
        (1000, 1016),
        (28996, 30522),
        (30522, 50304),
        (50257, 50265),
    ],
)
def test_larger_vocabularies_are_not(tokens, columns):
    with pytest.raises(GrowthError, match=rf"{columns} tokens, .* {tokens}: padding does not"):
        check_padding("the teacher", columns, tokens, "choose another")


def test_a_larger_head_is_refused_unless_its_tokenizer_is_the_students(tmp_path):
    teacher = build("gpt2", layers=1, vocab_size=83)
    options = {"processing_class": tokenizer()}
    with pytest.raises(GrowthError, match=r"83 tokens, .* give teacher_tokenizer"):
        start(tmp_path, build("gpt2", layers=1), teacher, **options)
    # tokens that the student does not have are no contradiction
    for words in (WORDS, [*WORDS, *(f"w{i}" for i in range(VOCAB, 83))]):
        both = {**options, "teacher_tokenizer": tokenizer(words)}
        assert (
            start(tmp_path, build("gpt2", layers=1), teacher, **both).objective._vocabulary == VOCAB
        )


def test_a_vocabulary_that_grew_for_the_student_is_taken(tmp_path):
    teacher = build("gpt2", layers=1)
    student = growkern.grow(teacher, vocab_size=101)
    assert (
        start(tmp_path, student, teacher, processing_class=tokenizer()).objective._vocabulary
        == VOCAB
    )


def test_a_cache_of_a_larger_vocabulary_is_refused(tmp_path):
    """Without a record of its tokenizer. With one, its size does not matter."""
    schedule = InheritanceSchedule(end_step=2)
    for words, is_taken in ((None, False), (WORDS, True)):
        folder = tmp_path / f"kept-{is_taken}"
        make(folder, model=build("bert", layers=1, vocab_size=83), k=4, vocab_size=83,
             tokenizer=words and tokenizer(words))  # fmt: skip
        cached = TopKTeacher(growkern.TeacherCache(folder), schedule)
        student = build("bert", layers=1, vocab_size=90)
        if is_taken:
            assert cached.common_vocabulary(student, tokenizer()) == 83
        else:
            with pytest.raises(GrowthError, match=r"83 tokens, .* make it with tokenizer="):
                cached.common_vocabulary(student, tokenizer())


# --------------------------------------------------------------- special ids


def test_padding_without_a_tokenizer_is_said_with_the_option_that_compares(tmp_path):
    teacher, options = build("gpt2", layers=1, vocab_size=64), {"processing_class": tokenizer()}
    with pytest.warns(GrowthWarning, match=r"the last 16 are .* give teacher_tokenizer"):
        start(tmp_path, build("gpt2", layers=1), teacher, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        start(tmp_path, build("gpt2", layers=1), teacher, teacher_tokenizer=tokenizer(), **options)


@pytest.mark.parametrize("columns", [VOCAB, 64])
def test_other_special_ids_are_refused(tmp_path, columns):
    student, teacher = build("bert", layers=1), roberta(columns)
    with pytest.raises(GrowthError, match=r"pad_token_id \[1\].* \[0\].*give teacher_tokenizer"):
        start(tmp_path, student, teacher, processing_class=TinyTokenizer())
    if columns == VOCAB:
        with pytest.raises(GrowthError, match=r"RobertaForMaskedLM.* pad_token_id .*vocab_size"):
            growkern.inherited_loss(student, teacher, batch())
        growkern.inherited_loss(student, teacher, batch(), vocab_size=VOCAB)
        both = {"processing_class": tokenizer(), "teacher_tokenizer": tokenizer()}
        start(tmp_path, student, teacher, **both)


@pytest.mark.parametrize("columns", [VOCAB, 64])
def test_another_family_is_refused(tmp_path, columns):
    student, teacher = build("bert", layers=1), roberta(columns)
    # special ids that agree say nothing of the rest
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        setattr(teacher.config, name, getattr(student.config, name))
    # without the student's tokenizer other sizes are refused first
    for given in ({"processing_class": TinyTokenizer()}, {})[: 1 + (columns == VOCAB)]:
        with pytest.raises(GrowthError, match=r"a roberta and the student a bert.*teacher_token"):
            start(tmp_path, student, teacher, **given)
    if columns == VOCAB:
        both = {"processing_class": tokenizer(), "teacher_tokenizer": tokenizer()}
        start(tmp_path, student, teacher, **both)


@pytest.mark.parametrize(
    "ids",
    [
        {"eos_token_id": 7},  # a chat model beside its base model
        {"eos_token_id": [7, 1], "bos_token_id": 5},
        {"pad_token_id": 3, "eos_token_id": None, "bos_token_id": None},
        {"bos_token_id": 50256, "eos_token_id": 50256},  # a default that the vocabulary lacks
    ],
)
def test_special_ids_that_say_nothing_are_taken(tmp_path, ids):
    teacher = build("gpt2", layers=1, vocab_size=64)
    for name, value in ids.items():
        setattr(teacher.config, name, value)
    start(tmp_path, build("gpt2", layers=1), teacher, processing_class=TinyTokenizer())


# ---------------------------------------------------------------- tokenizers


def test_the_tokenizer_beside_a_teacher_is_compared(tmp_path):
    others = [*WORDS[:40], *(f"v{i}" for i in range(40, VOCAB))]
    own, other = saved(tmp_path / "own", WORDS), saved(tmp_path / "other", others)
    student = growkern.grow(own, n_embd=32)
    with pytest.raises(GrowthError, match=r"another tokenizer .*'v40' has the id 40"):
        start(tmp_path, student, other, processing_class=tokenizer())
    start(tmp_path, student, own, processing_class=tokenizer())
    # what the user says goes
    start(tmp_path, student, other, processing_class=tokenizer(), teacher_tokenizer=tokenizer())
    # without processing_class the student's own directory has its tokenizer
    for teacher in (other, [own, other]):
        with pytest.raises(GrowthError, match="another tokenizer"):
            start(tmp_path, saved(tmp_path / "student", WORDS), teacher)
    with pytest.raises(GrowthError, match="1 teacher_tokenizer for 2 teachers"):
        both = {"processing_class": tokenizer(), "teacher_tokenizer": tokenizer()}
        start(tmp_path, student, [own, copy.deepcopy(own)], **both)


def test_inherited_loss_compares_the_tokenizers_beside_the_models(tmp_path):
    own, other = saved(tmp_path / "own", WORDS), saved(tmp_path / "other", WORDS[::-1])
    again = saved(tmp_path / "again", WORDS)
    growkern.inherited_loss(own, again, batch())
    with pytest.raises(GrowthError, match=r"the teacher .* has another tokenizer"):
        growkern.inherited_loss(own, other, batch())
    # a teacher that fits one student need not fit the next
    with pytest.raises(GrowthError, match="another tokenizer"):
        growkern.inherited_loss(other, again, batch())


def test_no_cache_is_made_with_another_tokenizer_than_the_teachers(tmp_path):
    teacher = saved(tmp_path / "teacher", WORDS, family="bert")
    for model in (teacher, tmp_path / "teacher"):
        with pytest.raises(GrowthError, match="another tokenizer"):
            make(tmp_path / "kept", model=model, tokenizer=tokenizer(WORDS[::-1]))
    make(tmp_path / "kept", model=teacher, tokenizer=tokenizer([*WORDS, "[PAD]"]))


def test_a_tokenizer_that_cannot_be_had_is_no_reason_to_refuse(tmp_path):
    own, bare = saved(tmp_path / "own", WORDS), saved(tmp_path / "bare", None)
    damaged = saved(tmp_path / "damaged", WORDS)
    (tmp_path / "damaged" / "tokenizer.json").write_text("{")
    gone = saved(tmp_path / "gone", WORDS)
    shutil.rmtree(tmp_path / "gone")
    for teacher in (bare, damaged, gone):
        start(tmp_path, own, teacher, processing_class=tokenizer())


def test_the_current_directory_is_not_that_of_a_model_that_is_nowhere(tmp_path, monkeypatch):
    own, gone = saved(tmp_path / "own", WORDS), saved(tmp_path / "gone", None)
    tokenizer(WORDS[::-1]).save_pretrained(tmp_path / "here")
    monkeypatch.chdir(tmp_path / "here")
    gone.config._name_or_path = gone.name_or_path = "not/there"
    start(tmp_path, own, gone, processing_class=tokenizer())


def test_the_hubs_cache_has_a_teachers_tokenizer(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.file_download.HF_HUB_CACHE", str(tmp_path), raising=False)
    folder = tmp_path / "models--some--teacher"
    other = saved(folder / "snapshots" / ("0" * 40), WORDS[::-1])
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text("0" * 40)
    other.config._name_or_path = other.name_or_path = "some/teacher"
    with pytest.raises(GrowthError, match="another tokenizer"):
        check_vocabulary("teacher", build("gpt2"), other, tokenizer(), "")


def test_an_added_token_is_no_other_tokenizer():
    check_tokenizers(tokenizer(), [tokenizer([*WORDS, "[CHAT]"])])
    check_tokenizers(tokenizer([*WORDS, "[PAD]"]), [tokenizer()])
    for words in (WORDS[1:], ["v", *WORDS[1:]], WORDS[::-1]):
        with pytest.raises(GrowthError, match="another tokenizer"):
            check_tokenizers(tokenizer(), [tokenizer(words)])
