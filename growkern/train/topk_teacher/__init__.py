"""Teachers known by the k likeliest tokens of each row: a cache, a server, or a file."""

from typing import TYPE_CHECKING

from growkern.rooms import opener

# fmt: off
if TYPE_CHECKING:
    from growkern.train.topk_teacher.http import check_url, is_server
    from growkern.train.topk_teacher.served import ServedTeacher
    from growkern.train.topk_teacher.store import TeacherCache
    from growkern.train.topk_teacher.teacher import (cache_arguments, TopKCollator, TopKRows,
        TopKTeacher)
    from growkern.train.topk_teacher.write import cache_teacher, check_cache_options, check_place
# fmt: on

__getattr__ = opener(__name__, __file__)
