"""Wrong uses of the `growkern` command, and the words that name what is wrong and what to do.

Each command ends with exit code 2 and one line on stderr, prints nothing else and leaves no file.
Names in braces stand for:

    {bert} {gpt2} {llama} {t5}   tiny checkpoints
    {large}                      {bert}, grown to twice the width
    {text}                       a text file
    {run}                        a run file that trains {bert} on {text}
    {new}                        a path that does not exist yet
    {empty}                      an empty directory
    {trained}                    a directory that holds something else
    {nothing}                    an empty file
    {binary}                     a file that is not text
    {noweights} {notype} {cut}   {llama} without weights, without "model_type", with half a file
    {wide}                       {llama} whose config has another size
    {extra} {lack}               {llama} with a tensor more or less
"""

from typing import NamedTuple


class Use(NamedTuple):
    """A wrong command.

    Attributes:
        line: what is typed after `growkern`.
        words: that the message has.
        edit: lines of {run} that are changed first, and what they are changed to.
    """

    line: str
    words: tuple[str, ...]
    edit: tuple[str, str] = ("", "")


WIDE = "--hidden-size 24 --intermediate-size 40 --num-attention-heads 6"

COMMANDS = [
    Use("gorw {bert} {new}", ("gorw", "grow")),
    Use("plan", ("SRC",)),
    Use("grow {bert}", ("Missing argument 'DST'; see growkern grow --help",)),
    Use("grow {bert} {new} {new}", ("unexpected",)),
    Use("plan {bert} --hiden-size 24", ("--hiden-size", "--hidden-size")),
    # in the words of the model, and of most models where it is not known
    Use("plan {bert} --layers 4", ("did you mean --num-hidden-layers?",)),
    Use("plan {gpt2} --layers 4", ("did you mean --n-layer?",)),
    Use("plan {t5} --layers 4", ("did you mean --num-layers, --num-decoder-layers?",)),
    Use("plan a/model --layers 4", ("did you mean --num-hidden-layers?", "families.md")),
    Use("plan {bert} --width 24", ("did you mean --hidden-size?",)),
    Use("plan {gpt2} --width=24", ("did you mean --n-embd?",)),
    Use("plan {bert} --hidden-size", ("--hidden-size", "argument")),
    Use("plan {bert} --hidden-size wide", ("--hidden-size", "integer")),
    Use("grow '' {new} --hidden-size 24", ("argument 2 is empty",)),
]

SOURCES = [
    Use("plan not/there/at/all --hidden-size 24", ("not/there/at/all",)),
    Use("plan {text} --hidden-size 24", ("directory",)),
    Use("plan {empty} --hidden-size 24", ("config.json",)),
    Use("grow {noweights} {new} --hidden-size 24", ("without weights", "safetensors")),
    Use("plan {notype} --hidden-size 24", ("model_type", "copy the config.json")),
    Use("plan {cut} --hidden-size 24", ("model.safetensors", "truncated", "again")),
    Use("plan {wide} --hidden-size 24", ("shape", "config.json and the weights")),
    Use(f"plan {'a' * 300} --hidden-size 24", ("growkern: aaa", "a: File name too long")),
    Use("plan {odd} --hidden-size 24", ("odd/config.json: The hidden size (12)",)),
    Use("plan {extra} --hidden-size 24", ("foo.bar", "save it again")),
    Use("plan {lack} --hidden-size 24", ("is missing", "config.json and the weights")),
    Use("plan https://example.org/me/small", ("its name alone, me/small",)),
    Use("plan https://example.org/me/small/tree/main", ("its name alone, me/small",)),
    Use("plan me/small@main", ("give me/small --revision main",)),
    Use("verify {bert} {large} --text {binary}", ("binary", "saved as UTF-8")),
    Use("grow {trained} {new} --hidden-size 24", ("config.json",)),
    Use("verify {bert} {new}", ("new",)),
    Use("verify {bert} {gpt2}", ("lineage.json", "give a grown checkpoint", "--lineage")),
    Use("verify {bert} {gpt2} --lineage none.json", ("--lineage", "none.json")),
    Use("verify {large} {bert}", ("bert is no grown checkpoint", "give the source first")),
    Use("verify {bert} {large} --checksums --text {text}", ("--text has no effect",)),
]

SIZES = [
    Use("plan {bert} --hidden-size 4", ("hidden_size", "12", "smaller")),
    Use("plan {bert} --hidden-size 25", ("hidden_size", "25")),
    Use("plan {bert} --hidden-size 24 --num-attention-heads 7", ("num_attention_heads", "7")),
    Use("plan {bert} --hidden-size -1", ("hidden_size", "-1")),
    Use("plan {bert} --num-hidden-layers 1", ("num_hidden_layers", "smaller")),
    Use("plan {bert} --n-embd 24", ("n_embd", "hidden_size")),
    Use("plan {bert} --num-key-value-heads 2", ("num_key_value_heads",)),
    Use("plan {llama} --num-attention-heads 6 --num-key-value-heads 4", ("num_key_value_heads",)),
    Use("plan {bert} --vocab-size 3", ("vocab_size", "smaller")),
    Use("plan {bert} --pad-vocab-to-multiple-of 0", ("pad", "0")),
    Use("plan {t5} --num-decoder-layers 0", ("num_decoder_layers",)),
]

OPTIONS = [
    Use(f"plan {{bert}} {WIDE} --method fip", ("fip", "fpi")),
    Use(f"plan {{bert}} {WIDE} --depth stacked", ("stacked", "stack")),
    Use(f"plan {{bert}} {WIDE} --scheme papers", ("papers", "paper")),
    Use(f"plan {{bert}} {WIDE} --symmetry noisy", ("noisy", "noise")),
    Use(f"plan {{bert}} {WIDE} --noise 9", ("noise", "9")),
    Use(f"plan {{bert}} {WIDE} --symmetry none --noise 0.3", ("noise", "give symmetry='noise'")),
    Use(f"plan {{bert}} {WIDE} --routing outputs,hidden", ("routing",)),
    Use(f"plan {{bert}} {WIDE} --carry 0.01", ("carry=0.01 has no effect", "leave it out")),
    Use("plan {llama} --hidden-size 20 --carry 0.01", ("carry=0.01 has no effect",)),
    Use(f"plan {{bert}} {WIDE} --tokens nan", ("tokens=nan",)),
    Use(f"plan {{bert}} {WIDE} --tokens -5 --json", ("tokens=-5",)),
    Use(f"plan {{bert}} {WIDE} --tokens 1e9 --source-tokens inf", ("source_tokens=inf",)),
    Use(f"plan {{bert}} {WIDE} --source-tokens 100B", ("'100B'", "1e11")),
    Use(f"plan {{bert}} {WIDE} --source-tokens 1e9", ("without tokens (--tokens)",)),
    Use(f"plan {{bert}} {WIDE} --ranks 0", ("--ranks", "1")),
    Use(f"plan {{bert}} {WIDE} --identity-gain 0", ("identity_gain", "(0, 1]")),
    Use(f"plan {{bert}} {WIDE} --seed -1", ("seed is -1", "0 .. ")),
    Use(f"grow {{bert}} {{new}} {WIDE} --seed 9223372036854775808", ("seed", str(2**63 - 1))),
]

WRITING = [
    Use(f"grow {{bert}} {{bert}} {WIDE}", ("bert", "exists")),
    Use(f"grow {{bert}} {{text}}/new {WIDE}", ("text is a file: give another directory",)),
    Use(f"grow {{bert}} {{trained}} {WIDE}", ("trained", "exists")),
    Use(f"grow {{bert}} {{trained}} {WIDE} --overwrite", ("trained", "another directory")),
    Use(f"grow {{bert}} {{new}} {WIDE} --dtype float12", ("float12", "float32")),
    Use(f"grow {{bert}} {{new}} {WIDE} --max-shard-size huge", ("huge", "512MB")),
    Use(f"grow {{bert}} {{new}} {WIDE} --memory-limit 1KB", ("memory_limit", "at least")),
    Use(f"grow {{bert}} {{new}} {WIDE} --optimizer not-there.pt", ("not-there.pt",)),
    Use(f"grow {{bert}} {{new}} {WIDE} --moments reset", ("moments", "optimizer")),
    Use(f"grow {{bert}} {{new}} {WIDE} --moments grow", ("--moments", "give --optimizer")),
    Use("verify {bert} {large} --lineage {text}", ("text", "growth record")),
    Use("verify {bert} {large} --lineage {bert}/config.json", ("growth record",)),
    Use("verify {bert} {large} --lineage none.json", ("--lineage", "none.json")),
]

TRAINING = [
    Use("train not-there.toml", ("/not-there.toml", "such as")),
    Use("train {text}", ("text", "TOML")),
    Use("train {bert}", ("directory", "TOML")),
    Use("train {run}", ("'stepz'", "'steps'"), ("steps = 2", "stepz = 2")),
    Use("train {run}", ("steps", "0"), ("steps = 2", "steps = 0")),
    Use("train {run}", ("steps", "two"), ("steps = 2", 'steps = "two"')),
    Use("train {run}", ("'trainnig'", "'training'"), ("[training]", "[trainnig]")),
    Use("train {run}", ("data.train: no file", "nowhere"), ("text", "nowhere")),
    Use(
        "train {run}", ("no key 'steps': it belongs to [training]",), ("[data]", "[data]\nsteps=2")
    ),
    Use(
        "train {run}",
        ("[data] has no key 'teacher'", "[teacher]"),
        ("[data]", '[data]\nteacher = "small"'),
    ),
    Use(
        "train {run}",
        ("teacher]", 'paths = ["DIRECTORY"]'),
        ("[data]", '[teacher]\npath="b"\n[data]'),
    ),
    Use(
        "train {run}",
        ("data.train is 'text'", "write ['text']"),
        ('train = ["text"]', 'train = "text"'),
    ),
    Use("train {run}", ("text is a file",), ('directory = "out"', 'directory = "text/out"')),
    Use("train {run}", ("positions",), ("sequence_length = 8", "sequence_length = 9999")),
    Use(
        "train {run}", ("layers_per_block", "99"), ("layers_per_block = 1", "layers_per_block = 99")
    ),
    Use(
        "train {run}",
        ("teacher", "inheritance"),
        ("[output]", "[inheritance]\nend_step = 1\n[output]"),
    ),
    Use("train {run}", ("training.seed is -1", "0 .. "), ("steps = 2", "steps = 2\nseed = -1")),
    Use(
        "train {run}",
        ("training.warmup_steps is 50", "2 training.steps"),
        ("steps = 2", "steps = 2\nwarmup_steps = 50"),
    ),
    Use("train {run}", ("data.train", "more data"), ('train = ["text"]', 'train = ["nothing"]')),
    Use(
        "train {run}",
        ("give http://localhost:8000",),
        (
            "[output]",
            '[inheritance]\nend_step = 1\n[teacher]\nurl = "localhost:8000"\nk = 2\n[output]',
        ),
    ),
    Use("train {run}", ("dir",), ('directory = "out"', 'directory = "bert"')),
    Use("export {trained} {new}", ("trained", "checkpoint", "give the output directory of a run")),
]

CACHE = "cache-teacher {bert} {text} --out {new} --k 2 --sequence-length"
EVAL = "eval {bert} --text {text}"
MEASURING = [
    Use(f"{CACHE} 9999 --temperature 1", ("positions",)),
    Use(f"{CACHE} 8 --temperature 0", ("temperature",)),
    Use(f"{CACHE} 8 --temperature 1 --masking-probability 2", ("(0, 1]",)),
    Use(f"{EVAL} --sequence-length 9999", ("positions", "--sequence-length")),
    Use(f"{EVAL} --batch-size 0", ("batch_size is 0",)),
    Use(f"{EVAL} --masking-probability 2", ("masking_probability is 2",)),
    Use(
        "cache-teacher {bert} {text} --out {new} --k 99 --temperature 1 --sequence-length 8",
        ("k is 99",),
    ),
    Use(
        "cache-teacher localhost:8000 {text} --out {new} --k 2 --temperature 1",
        ("give http://localhost:8000",),
    ),
    Use("cache-teacher {bert} {text} --out {new} --k 2", ("--temperature", "--run")),
    Use("cache-teacher {bert} --out {new} --k 2 --temperature 1", ("TEXT", "--run")),
    Use(
        "cache-teacher {bert} {text} --out {trained} --k 2 --temperature 1 --sequence-length 8",
        ("trained", "exists"),
    ),
    Use(
        "cache-teacher http://127.0.0.1:9 {text} --out {new} --k 2 --temperature 1",
        ("--tokenizer",),
    ),
    Use(
        "cache-teacher http://127.0.0.1:9 {text} --out {new} --k 2 --temperature 1 "
        "--tokenizer {llama}",
        ("http://127.0.0.1:9", "is the server running"),
    ),
    Use("eval {bert}", ("--text",)),
    Use("eval {bert} --text none-*.txt", ("none-*.txt",)),
    Use("eval {bert} --text {text} --confidence 95", ("confidence", "0.95")),
    Use("eval me/small@main --text {text}", ("me/small",)),
    Use("eval not/there/at/all --text {text}", ("not/there/at/all", "no such directory")),
    Use("plot {trained}", ("trained", "directory of a run")),
    Use("eval {bert} --text {text} --sequence-length 8 --seed -1", ("seed is -1", "0 .. ")),
]

USES = [*COMMANDS, *SOURCES, *SIZES, *OPTIONS, *WRITING, *TRAINING, *MEASURING]
