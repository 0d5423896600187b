"""Names from files cannot control the terminal: no escape code reaches it."""

import io
import json
import struct
import sys
import warnings

import pytest
import torch
from rich.console import Console
from rich.table import Table

import growkern
from growkern import GrowthError, errors
from growkern.cli import main
from growkern.errors import GrowthWarning, clean
from growkern.growth.plan.table import as_text
from growkern.train.run.banner import print_lines
from testbed.models import LLAMA, random_model

# a title, a cleared screen, eight-bit codes, another direction of writing, a new line
NAMES = ["\x1b]0;title\x07", "\x1b[2Jred", "\x9b31m", "\u202eevil", "a\rb\x08\x7f", "a\u2028b"]
LETTERS = "größer 漢字 é ✓ \udcf6"


def is_clean(text):
    codes = [ord(c) for c in text.replace("\n", "")]
    return not any(n < 32 or 127 <= n < 160 or n in (0x202E, 0x2028) for n in codes)


@pytest.fixture
def source(tmp_path):
    """A checkpoint with a tensor of some name, and a function that writes it."""
    random_model("LlamaForCausalLM", LLAMA, dtype=torch.float32).save_pretrained(tmp_path / "s")
    file = tmp_path / "s" / "model.safetensors"
    data = file.read_bytes()
    start = 8 + struct.unpack("<Q", data[:8])[0]

    def write(name):
        head = json.loads(data[8:start])
        head[name] = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
        text = json.dumps(head).encode()
        file.write_bytes(struct.pack("<Q", len(text)) + text + data[start:])
        return tmp_path / "s"

    return write


@pytest.mark.parametrize("name", NAMES)
def test_an_error_of_a_command_is_clean(source, tmp_path, monkeypatch, capfd, name):
    for command in ("plan", "grow", "verify"):
        more = [] if command == "plan" else [str(tmp_path / "large")]
        size = [] if command == "verify" else ["--num-hidden-layers", "4"]
        monkeypatch.setattr(sys, "argv", ["growkern", command, str(source(name)), *more, *size])
        with pytest.raises(SystemExit) as ended:
            main.main()
        out, err = capfd.readouterr()
        assert ended.value.code == 2 and is_clean(out + err) and err.count("\n") == 1, command
        assert command == "verify" or clean(name, kept="")[:6] in err


@pytest.mark.parametrize("name", NAMES)
def test_errors_and_warnings_are_clean_in_python_too(source, name):
    with pytest.raises(GrowthError) as refused:
        growkern.plan(source(name), num_hidden_layers=4)
    assert is_clean(str(refused.value))
    with pytest.warns(GrowthWarning) as warned:
        warnings.warn(f"the file {name}", GrowthWarning, stacklevel=1)
    assert is_clean(str(warned[0].message))
    for category in (GrowthWarning, UserWarning):
        assert is_clean(main._format_warning(f"the file {name}", category, "a.py", 1, line=""))


@pytest.mark.parametrize("name", [*NAMES, "[/x]", "[red]x"])
def test_lines_and_tables_are_clean(capsys, name):
    table = Table(title=name)
    table.add_column(name)
    table.add_row(name)
    errors.say(f"changed: {name}")
    print_lines({"model": name})
    for text in (as_text(table), *capsys.readouterr()):
        assert is_clean(text)
    stream = io.StringIO()
    errors.print_table(table, Console(file=stream, markup=False))
    assert is_clean(stream.getvalue())
    if name.startswith("["):
        assert stream.getvalue().count(name) == 3


def test_colours_of_ours_and_letters_stay(capsys):
    stream = io.StringIO()
    table = Table()
    table.add_column("a", style="red")
    table.add_row(LETTERS[:-1])
    errors.print_table(table, Console(file=stream, force_terminal=True, color_system="standard"))
    assert "\x1b[31m" in stream.getvalue() and LETTERS[:-2] in stream.getvalue()
    assert clean(LETTERS) == LETTERS and clean("a\nb\tc") == "a\nb\tc"
