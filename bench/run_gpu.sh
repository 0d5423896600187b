#!/usr/bin/env bash
# Runs `python -m bench.gpu` on a GPU machine without a network, for a limited time, and packs the
# results into one file:
#
#   bench/run_gpu.sh OUT [SECONDS] [options of bench.gpu]
#
# It runs for SECONDS (default: 520) and writes OUT/results.tgz. The most valuable pieces come first
# (PIECES in bench/on_gpu/pieces.py). To bring the results home, run this in the repository:
#
#   mkdir there && tar xzf results.tgz -C there && python -m bench.report --take there/bench/results
#
# The machine needs only PyTorch, Triton and transformers. Pieces that need more are skipped and say
# so. The missing packages can be brought along as wheels, fetched on a machine with a network. The
# first line is for the ops' tests, the trainer and checksums. The next two are libraries to compare
# with.
#
#   pip download -d wheels pytest hypothesis && pip download --no-deps -d wheels accelerate psutil xxhash
#   pip download --no-deps -d wheels liger-kernel cut-cross-entropy
#   pip download -d wheels quack-kernels     # with nvidia-cutlass-dsl and its other dependencies
#   bench/run_gpu.sh OUT 520 --wheels wheels
#
# The next run resumes where this one stopped, because finished pieces do not run again. A visit of
# 30 minutes is three runs. Where there is no .git, add
# --commit $(git rev-parse --short HEAD), with the value from the original repository.
set -uo pipefail
out=$(mkdir -p "${1:?name the directory for results.tgz}" && cd "$1" && pwd)
seconds=${2:-520}
shift $(($# < 2 ? $# : 2))
cd "$(dirname "${BASH_SOURCE[0]}")/.."

${PYTHON:-python3} -m bench.gpu --budget "$seconds" "$@"
code=$?
# also after a failure, to keep the pieces that were measured before it
tar czf "$out/results.tgz" bench/results
exit $code
