"""The section [teacher] of a run file."""

from dataclasses import dataclass

from growkern.train.rules import check
from growkern.train.topk_teacher.http import check_url


@dataclass(frozen=True)
class TeacherSection:
    """The teachers, whose tokenizers must equal the tokenizer of the run.

    Args:
        paths: checkpoint directories of the teachers.
        cache: directory that `growkern cache-teacher` wrote.
        url: of a server of vLLM or SGLang that runs the teacher, see `growkern.ServedTeacher`.
        served_model: the name of the teacher on the server, if that has several.
        k: tokens per row that the server is asked for.

    Raises:
        GrowthError: not exactly one of paths, cache and url is given, or url and k apart, or
            the url names no server.
    """

    paths: tuple[str, ...] = ()
    cache: str | None = None
    url: str | None = None
    served_model: str | None = None
    k: int | None = None

    def __post_init__(self) -> None:
        check("teacher", self)
        if self.url is not None:
            check_url(self.url)

    @property
    def is_model(self) -> bool:
        """Whether the teachers are models that run in the training processes."""
        return bool(self.paths)
