"""python -m tests.faults.publishing DIRECTORY: walk through a publication of three small files."""

import errno
import sys
from pathlib import Path

from growkern.errors import GrowthError
from growkern.publish import workplace
from tests.faults.walk import Walk, Work, library


def may_replace(directory):
    return not any(directory.iterdir()) or (directory / "mark").is_file()


def fill(directory, text):
    (directory / "inside").mkdir()
    (directory / "mark").write_text(text)
    (directory / "inside" / "file").write_text(text)


def prepare(folder, overwrite):
    (folder / "source").mkdir()
    (folder / "source" / "file").write_text("source")
    if overwrite:
        (folder / "target").mkdir()
        fill(folder / "target", "old")


def publish(folder, overwrite):
    target = folder / "target"
    workplace.delete_leftovers(target, "testing", may_replace)
    if target.exists() and not overwrite:
        raise GrowthError(f"{target} exists")
    with workplace.Workplace(target, "testing", may_replace, resume=False) as place:
        fill(place.open_new(), (folder / "source" / "file").read_text())
        place.publish(overwrite=overwrite)


def main(walk=Walk):
    directory, shim = Path(sys.argv[1]), library()
    for overwrite in (False, True):
        for without in (0, errno.ENOSYS, errno.EINVAL):
            work = Work(
                f"publish-{overwrite}-{without}",
                lambda folder, o=overwrite: prepare(folder, o),
                lambda folder, o=overwrite: publish(folder, o),
                overwrite=overwrite,
            )
            for line in walk(work, directory, shim, without).run():
                print(line, file=sys.stderr)
            print(work.report(), flush=True)


if __name__ == "__main__":
    main()
