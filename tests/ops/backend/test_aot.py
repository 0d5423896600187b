"""The record of the kernels' machine code: every launch is in it, and compiling gives it again."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from bench.shared.results import read
from bench.shared.roofline import HotCode, estimate, read_gcn, read_sass
from growkern.ops.backend import nvrtc
from growkern.ops.backend.launch import HAS_TRITON

if HAS_TRITON:
    import triton

ROOT = Path(__file__).parents[3]
UPDATE = "run python -m bench.aot and python -m bench.report"
KEPT = ROOT / "bench" / "results" / "aot.json"
ARCHS = {"sm_80", "sm_90", "sm_100", "sm_120"}


ONE_OF_EACH = ["expand rows bf16", "CUDA expand FPI bf16"]
# unchanged launches of the record are not compiled again; ONE_OF_EACH always is
WAITS = "kl_mlm once bf16 gradient"
COMPILE = """
import sys
from pathlib import Path
import triton
from bench import aot
from bench.launches import sources
from bench.shared import results
table, again, waits, *names = sys.argv[1:]
code = aot.main(["--json", table])
rows = [row for name in names for row in aot.compile_all(name, ["sm_90"])]
(case,) = (case for case in sources.all_cases() if case.name == waits)
options = sources.options_of(case)
made = triton.compile(sources.source_of(case), sources.TARGETS["sm_90"], options)
kept = {name: made.asm[name] for name in ("ttir", "ptx")}
kept["cooperative"] = made.metadata.launch_cooperative_grid
rows = [row for row in rows if row["kernel"] in names]
results.write(Path(again), {"rows": rows, "waits": kept})
sys.exit(code)
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Every kernel for every architecture, in a process that does not interpret them."""
    scratch = tmp_path_factory.mktemp("aot")
    shutil.copy(KEPT, scratch / "aot.json")
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    env |= {"TRITON_CACHE_DIR": str(scratch / "cache")}
    files = [str(scratch / name) for name in ("aot.json", "again.json")]
    command = [sys.executable, "-c", COMPILE, *files, WAITS, *ONE_OF_EACH]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode in (0, 1), done.stdout + done.stderr
    table, again = (read(Path(file)) for file in files)
    return done, table.get("rows", []), again.get("rows", []), again.get("waits")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_no_kernel_spills_or_loads_narrowly(compiled):
    done, rows, *_ = compiled
    assert done.returncode == 0, done.stdout + done.stderr
    assert {row["arch"] for row in rows} >= ARCHS
    families = {"expand", "kl_mlm", "topk_kl_mlm", "CUDA"}
    assert {row["kernel"].split()[0] for row in rows} >= families
    for row in rows:
        assert row["registers"] <= 255 and row["spilled_bytes"] == 0, row
        assert row["narrow"] or row["wide_share"] >= 0.5, row
        assert row["narrow_stores"] or row["wide_store_share"] >= 0.5, row
        # whatever is gathered, what a growth writes lies together
        assert "gathered" not in row["narrow_stores"], row
        assert ("of bandwidth" in row) != bool(row.get("no estimate")), row


# what a program does after it has stored its sums, and how it then reads those of all parts
ACQUIRES, READS = "atomic_rmw add, acquire, gpu", "cacheModifier = cg"
WAIT = ("barrier", "atomic_rmw add, release, gpu", ACQUIRES, "scf.while", ACQUIRES, "barrier")


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_programs_that_share_a_row_wait_in_compiled_code(compiled):
    """No thread goes on before all have stored, nor reads before one has seen all parts."""
    code = compiled[3]
    assert code["cooperative"] is True
    steps = re.findall("|".join({*WAIT, READS}), code["ttir"])
    # 7 numbers of each part
    assert steps == [*WAIT, *[READS] * 7]
    before, after = code["ptx"].split("atom.global.gpu.release.add")
    # between the last sum that is stored and the number that says so
    assert before.rindex("bar.sync") > before.rindex("st.global") > 0
    # one thread reads that number again and again, and tells the others
    block = r"(?:(?!\n\$\w+:).)*?"
    loop = rf"\n(\$\w+):{block}gpu\.acquire{block}bar\.sync{block}bra\s+\1;"
    assert re.search(loop, after, re.DOTALL)


# In CUDA C++ these issue 21 to 28 instructions per element, and their issue is the limit. It is
# made for weights in pinned memory of the host, whose bus is far slower than that.
BELOW_NINE_TENTHS = {
    "CUDA expand FPI, noise bf16": 0.65,
    "CUDA expand AKI, noise bf16": 0.6,
    "CUDA expand AKI, routing, scaled bf16": 0.8,
}


def test_growth_in_bfloat16_is_bound_by_the_memory_of_an_h200():
    rows = [row for row in read(KEPT)["rows"] if row["arch"] == "sm_90" and "bf16" in row["kernel"]]
    shares = {
        row["kernel"]: row["of bandwidth"]
        for row in rows
        # those of rows that are not aligned have no estimate
        if "expand" in row["kernel"] and "no estimate" not in row
    }
    cuda = {name for name in shares if name.startswith("CUDA ")}
    assert len(shares.keys() - cuda) >= 10 and len(cuda) >= 5 and cuda >= BELOW_NINE_TENTHS.keys()
    low = {k: v for k, v in shares.items() if v < BELOW_NINE_TENTHS.get(k, 0.9)}
    assert not low


def test_the_sums_of_a_row_are_kept_by_threads():
    """On NVIDIA's chips, wherever rows begin at multiples of 16 bytes."""
    rows = [row for row in read(KEPT)["rows"] if row["kernel"].startswith("kl_mlm rows")]
    aligned = [row for row in rows if row["arch"] in ARCHS and not row["narrow"]]
    assert {row["arch"] for row in aligned} == ARCHS
    assert not [(row["kernel"], row["arch"]) for row in aligned if row["exchanges"]]
    (headline,) = (
        row["of them summing"]
        for row in aligned
        if (row["kernel"], row["arch"]) == ("kl_mlm rows linear, bf16 gradient", "sm_90")
    )
    assert headline <= 24


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
def test_the_committed_table_is_what_these_kernels_compile_to(compiled, tmp_path):
    document = read(KEPT)
    kept = {(row["kernel"], row["arch"]): row for row in document["rows"]}
    assert kept.keys() == {(row["kernel"], row["arch"]) for row in compiled[1]}, UPDATE
    # NVRTC is told by the first two numbers of its version: the third may differ in a digit
    here = {"triton": triton.__version__, "nvrtc": nvrtc.nvrtc_version()}
    if document["machine"] == here | {"nvrtc": here["nvrtc"] or document["machine"]["nvrtc"]}:
        # a fingerprint also changes with the code that reads machine code
        written, now = (
            [{k: v for k, v in row.items() if k != "fingerprint"} for row in rows]
            for rows in (document["rows"], compiled[1])
        )
        assert written == now, UPDATE


def test_the_table_says_what_it_was_made_from():
    document = read(KEPT)
    assert re.fullmatch("[0-9a-f]{7,40}", document["commit"]) and document["date"]
    assert document["dirty"] is False, f"commit the kernels first, then {UPDATE}"
    assert all(document["machine"].values()) and document["sources"]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not installed")
@pytest.mark.parametrize("name", ONE_OF_EACH)
def test_a_table_that_was_edited_is_noticed(name, compiled):
    """One row is really compiled: fingerprints alone would not notice a wrong table."""
    if name.startswith("CUDA") and nvrtc.nvrtc() is None:
        pytest.skip("no NVRTC: pip install -r requirements-dev.txt")
    (row,) = (r for r in compiled[2] if r["kernel"] == name)
    (now,) = (r for r in compiled[1] if r["fingerprint"] == row["fingerprint"])
    assert row == now


SASS = """
        /*0000*/                   LDG.E R4, desc[UR4][R2.64] ;   /* 0x0 */
        /*0010*/                   ISETP.GE.AND P0, PT, R4, RZ, PT ;   /* 0x0 */
        /*0020*/              @!P0 LDG.E.128 R8, desc[UR4][R2.64] ;   /* 0x0 */
        /*0030*/                   LDG.E.U16 R7, desc[UR4][R2.64+0x10] ;   /* 0x0 */
        /*0040*/                   MUFU.EX2 R7, R7 ;   /* 0x0 */
        /*0050*/                   STG.E.64 desc[UR4][R2.64], R8 ;   /* 0x0 */
        /*0060*/               @P0 BRA 0x20 ;   /* 0x0 */
        /*0070*/                   STG.E.128 desc[UR4][R2.64], R8 ;   /* 0x0 */
        /*0080*/                   EXIT ;   /* 0x0 */
        /*0090*/                   BRA 0x90;   /* 0x0 */
"""


def test_hot_code_is_the_loop_that_loads():
    code = read_sass(SASS)
    assert code == HotCode(5, 1, {16: 1, 2: 1}, {8: 1})
    assert code.wide_share(16) == 16 / 18
    # without the branch back: all of it
    straight = read_sass(SASS.replace("BRA 0x20", "NOP"))
    assert (straight.loads, straight.stores) == ({16: 1, 4: 1, 2: 1}, {16: 1, 8: 1})


OUT_OF_LINE = """
        /*0000*/                   LDGSTS.E.BYPASS.128 [R19], desc[UR8][R14.64] ;   /* 0x0 */
        /*0010*/              @!P0 BRA 0x0 ;   /* 0x0 */
        /*0020*/                   LDS.128 R4, [R2] ;   /* 0x0 */
        /*0030*/               @P1 BRA 0x80 ;   /* 0x0 */
        /*0040*/                   FADD R4, R4, R5 ;   /* 0x0 */
        /*0050*/               @P0 BRA 0x20 ;   /* 0x0 */
        /*0060*/                   LDG.E.U16 R8, desc[UR4][R2.64] ;   /* 0x0 */
        /*0070*/                   EXIT ;   /* 0x0 */
        /*0080*/                   MUFU.EX2 R7, R7 ;   /* 0x0 */
        /*0090*/                   BRA 0x40 ;   /* 0x0 */
        /*00a0*/                   LDS R3, [R2] ;   /* 0x0 */
        /*00b0*/               @P2 BRA 0xa0 ;   /* 0x0 */
"""


def test_hot_code_of_cuda_is_every_loop_over_columns():
    """Copies into shared memory and what reads them back. A block that was moved to the end belongs
    to its loop, and jumping back from there makes no loop of all that lies between."""
    code = read_sass(OUT_OF_LINE)
    assert code == HotCode(8, 1, {16: 1}, {}, 8)
    # so is what threads tell each other while they add up
    told = read_sass(OUT_OF_LINE.replace("FADD R4, R4, R5", "SHFL.BFLY PT, R4, R5"))
    assert (told.summing, told.exchanges) == (8, 1)
    # a copy that has become narrow is seen
    narrow = read_sass(OUT_OF_LINE.replace("BYPASS.128", "U16"))
    assert (narrow.loads, narrow.wide_share(16)) == ({2: 1}, 0.0)


def test_hot_code_of_amd():
    code = read_gcn(
        """
        s_load_dwordx4 s[0:3], s[4:5], 0x0
.LBB0_1:                    ; %Flow
        global_load_dword v1, v2, s[0:1]
        s_cbranch_scc1 .LBB0_9
.LBB0_2:                    ; =>This Inner Loop Header: Depth=1
        buffer_load_dwordx4 v[0:3], v9, s[0:3], 0 offen
        v_exp_f32_e32 v4, v4
.Ltmp7:
        v_exp_f32_e32 v4, v4
; %bb.3:                    ;   in Loop: Header=BB0_2 Depth=1
        global_load_ushort v5, v6, s[0:1]
        global_store_short v6, v5, s[0:1]
        s_cbranch_scc1 .LBB0_2
.LBB0_9:                    ; %exit
        global_store_dwordx2 v6, v[4:5], s[0:1]
"""
    )
    # without the branch, which is scalar
    assert code == HotCode(5, 2, {16: 1, 2: 1}, {2: 1})


def test_what_is_slowest_bounds_the_estimate():
    # 16 bytes for one element: 3.3 ps of an H200's memory; 4 instructions: 0.12 ps of its issue
    memory = estimate(HotCode(4, 0, {16: 1}, {}), 1, None, "sm_90")
    assert (memory["bound"], memory["of bandwidth"]) == ("memory", 1.0)
    issue = estimate(HotCode(400, 0, {16: 1}, {}), 1, None, "sm_90")
    assert (issue["bound"], issue["of bandwidth"]) == ("issue", 0.28)
    special = estimate(HotCode(8, 8, {}, {}), 1, 2.0, "sm_90")
    assert special["bound"] == "special functions"
