"""`growkern` that is killed after 40 pieces of the moments of an optimizer."""

import os
import signal

from growkern.cli.main import main
from growkern.growth.optimizer import file

if __name__ == "__main__":
    blocks, build, count = file.row_blocks, file.grow_moment, []

    def build_until(*args, **kwargs):
        count.append(1)
        if len(count) > 40:
            os.kill(os.getpid(), signal.SIGKILL)
        return build(*args, **kwargs)

    file.row_blocks = lambda shape, size, _: blocks(shape, size, 300)
    file.grow_moment = build_until
    main()
