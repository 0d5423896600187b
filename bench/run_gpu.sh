#!/usr/bin/env bash
# Runs `python -m bench.gpu` on a GPU machine without a network, for a limited time, and packs the
# results into one file:
#
#   bash bench/run_gpu.sh OUT SECONDS [options of bench.gpu]
#
# OUT/results.tgz is complete whenever the machine stops. The most valuable pieces come first
# (bench/on_gpu/pieces.py): 460 seconds for the first line. The second does the rest of what nine
# minutes more allow, with libraries to compare with. The third trains GPT-2 of 110 million
# parameters. The fourth trains two sizes of a family. The fifth needs no GPU. A piece that has finished does not run again.
#
#   bash bench/run_gpu.sh OUT 470
#   bash bench/run_gpu.sh OUT 540 --wheels wheels
#   bash bench/run_gpu.sh OUT 345 --only gpt_110m_1        (more systems in 590 s; seeds: 1, 2, 3)
#   bash bench/run_gpu.sh OUT 590 --only family
#   bash bench/run_gpu.sh OUT 1800 --dry-run
#
# To bring the results home, run this in the repository:
#
#   mkdir there && tar xzf results.tgz -C there && python -m bench.report --take there
#
# The machine needs only PyTorch, Triton and transformers. Pieces that need more are skipped and say
# so. Libraries to compare with can be brought along as wheels, fetched on a machine with a network:
#
#   pip download --no-deps -d wheels liger-kernel orda-kernel cut-cross-entropy
#
# Where there is no .git, add --commit $(git rev-parse --short HEAD), with the value from the
# original repository.
set -euo pipefail
out=$(mkdir -p "${1:?name the directory for results.tgz}" && cd "$1" && pwd)
seconds=${2:?name the seconds that it may take}
shift 2
cd "$(dirname "${BASH_SOURCE[0]}")/.."
# the machine may stop while Python starts
[ -e "$out/results.tgz" ] || tar czf "$out/results.tgz" -T /dev/null
exec "${PYTHON:-python3}" -m bench.gpu --budget "$seconds" --archive "$out/results.tgz" "$@"
