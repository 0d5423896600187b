#!/usr/bin/env bash
# One visit to a GPU machine that has no network and little time:
#
#   bench/run_gpu.sh OUT [SECONDS] [options of bench.gpu]
#
# Takes the pieces of `python -m bench.gpu` in order of value (every kernel's checks, then the
# benchmarks, then training steps, tuning, compile-time figures) for SECONDS, 520 by default, and
# leaves OUT/results.tgz: one file to bring home. At home, in the repository:
#
#   mkdir there && tar xzf results.tgz -C there && python -m bench.shared.harness --take there/bench/results
#
# Nothing else has to be installed there than PyTorch, Triton and transformers; what needs more is
# skipped and says so. It can come along as wheels, fetched where there is a network: what the ops'
# tests, the trainer and sums of files need, and peers.
#
#   pip download -d wheels pytest hypothesis && pip download --no-deps -d wheels accelerate psutil xxhash
#   pip download --no-deps -d wheels liger-kernel cut-cross-entropy
#   pip download -d wheels quack-kernels     # with nvidia-cutlass-dsl and what else it needs
#   bench/run_gpu.sh OUT 520 --wheels wheels
#
# The next visit goes on where this one stopped, because finished pieces are not done again: with
# 30 minutes there, three visits. Where there is no .git, add --commit $(git rev-parse --short HEAD).
set -uo pipefail
out=$(mkdir -p "${1:?where to leave results.tgz}" && cd "$1" && pwd)
seconds=${2:-520}
shift $(($# < 2 ? $# : 2))
cd "$(dirname "${BASH_SOURCE[0]}")/.."

${PYTHON:-python3} -m bench.gpu --budget "$seconds" "$@"
code=$?
# also after a failure: what was measured before it is kept
tar czf "$out/results.tgz" bench/results
exit $code
