"""Writes the reference into docs/api.md and docs/runfile.md: `python -m docs.reference`.

It reads the signatures, docstrings and declared limits of the package. In docs/api.md it fills the
blocks between `<!-- growkern.name -->` and `<!-- /growkern.name -->`. docs/runfile.md is all its
own.
"""

import dataclasses
import importlib
import inspect
import re
import textwrap
import types
import typing
from pathlib import Path
from typing import Any

from growkern.arguments import choices
from growkern.train.run.file import Run

API, RUN_FILE = (Path(__file__).with_name(name) for name in ("api.md", "runfile.md"))
PARTS = ("Args", "Attributes", "Returns", "Yields", "Raises")
# as one of these a limit says nothing to a reader
UNBOUNDED = (2**40, 2**63 - 1)
# of the meaning of an argument: `help` shows all of it
WORDS_EACH = 12
WORDS = {str: "text", int: "integer", float: "number", bool: "boolean"}
HEAD = """# Every key of a run file

`growkern train` reads these keys from a TOML file. [Training](training.md) shows a whole file and
explains the sections. In Python each section is a class of the same fields. This page is generated
from them.

`[[growth]]` repeats the section `[growth]`, for a model that grows several times. `[[generation]]`
holds the sections of one of several runs, such as `[generation.model]`.
"""
TRAINER = """Any argument of `transformers.TrainingArguments` that no other section has. A key that
another section has is refused, and the error names it."""


# ------------------------------------------------------------------- docstrings


def parts_of(thing: Any) -> dict[str, str]:
    """The parts of a docstring by their headings; the text before them is ''."""
    heads = rf"^({'|'.join(PARTS)}):\n"
    first, *rest = re.split(heads, inspect.getdoc(thing) or "", flags=re.M)
    found = {"": first}
    for head, text in zip(rest[::2], rest[1::2], strict=True):
        # text at the margin is no longer of the part
        body, *after = re.split(r"\n\n(?=\S)", text, maxsplit=1)
        found[head] = textwrap.dedent(body)
        found[""] = "\n\n".join((found[""].rstrip(), *after))
    return {head: text.strip() for head, text in found.items()}


def entries(text: str) -> dict[str, str]:
    """The meaning of each name in a list of arguments."""
    _, *found = re.split(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*):\s", text, flags=re.M)
    pairs = zip(found[::2], found[1::2], strict=True)
    return {name.lstrip("*"): x for names, x in pairs for name in names.split(", ")}


def meanings(cls: type) -> dict[str, str]:
    """The meaning of each field of a class, those of the classes above it included."""
    found: dict[str, str] = {}
    for one in reversed(cls.__mro__[:-1]):
        parts = parts_of(one) if one.__doc__ else {}
        found |= entries(parts.get("Args", "")) | entries(parts.get("Attributes", ""))
    return found


def plain(text: str) -> str:
    """A text in one line of Markdown, with nothing that ends a cell of a table."""
    line = " ".join(text.split()).replace("|", "\\|")
    # the even pieces are not code
    pieces = re.split(r"(`+[^`]*`+)", line)
    return "".join(x if i % 2 else x.replace("<", "&lt;") for i, x in enumerate(pieces))


def brief(line: str) -> str:
    """The first sentences of a line, of about `WORDS_EACH` words or one sentence."""
    sentences = re.split(r"(?<=[.:;]) (?=[A-Z])", line)
    kept = sentences[:1]
    for sentence in sentences[1:]:
        if len(" ".join([*kept, sentence]).split()) > WORDS_EACH:
            break
        kept.append(sentence)
    return " ".join(kept)


# -------------------------------------------------------------------- run files


def kind_of(kind: Any, limit: Any) -> str:
    """The type of a key in words, with its limits."""
    if known := choices(kind):
        words = ", ".join(f'`"{x}"`' for x in known)
    elif typing.get_origin(kind) is tuple:
        words = f"list: {kind_of(typing.get_args(kind)[0], None)}"
    elif typing.get_origin(kind) is dict:
        words = "table"
    elif given := [x for x in typing.get_args(kind) if x is not type(None)]:
        words = " or ".join(kind_of(x, None) for x in given)
    else:
        words = WORDS[kind]
    if limit:
        must = re.sub("^(lie|be) ", "", limit.must).removesuffix(", and finite")
        lowest = re.sub(rf"in (\d+) \.\. ({'|'.join(map(str, UNBOUNDED))})$", r"\1 or more", must)
        words += f", {lowest}"
    return words


def written(value: Any) -> str:
    """A default as TOML has it."""
    if value is dataclasses.MISSING:
        return "required"
    if value is None or value == ():
        return "none"
    return (
        f"`{str(value).lower()}`" if isinstance(value, bool) else f"`{value!r}`".replace("'", '"')
    )


def section(name: str, cls: type) -> str:
    """The keys of a section as a table."""
    kinds, meaning = typing.get_type_hints(cls), meanings(cls)
    rows = [
        f"| `{x.name}` | {kind_of(kinds[x.name], getattr(cls, 'LIMITS', {}).get(x.name))} "
        f"| {written(x.default)} | {plain(meaning[x.name])} |"
        for x in dataclasses.fields(cls)
    ]
    table = ["| key | type and limits | default | meaning |\n|---|---|---|---|", *rows]
    text = f"In Python: `{cls.__name__}`. {parts_of(cls)['']}"
    return f"## `[{name}]`\n\n{text}\n\n" + "\n".join(table)


def sections() -> dict[str, type]:
    """The class of each section of a run file."""
    kinds = typing.get_type_hints(Run)
    found = {}
    for field in dataclasses.fields(Run):
        kind = kinds[field.name]
        classes = [x for x in (kind, *typing.get_args(kind)) if dataclasses.is_dataclass(x)]
        found |= {field.name: classes[0]} if classes else {}
    return found


def run_file() -> str:
    """The page of all keys."""
    parts = [section(name, cls) for name, cls in sections().items()]
    return "\n\n".join((HEAD.strip(), *parts, f"## `[trainer]`\n\n{TRAINER}")) + "\n"


# ------------------------------------------------------------------- signatures


def annotation_of(kind: Any) -> str:
    """A type as code, without the names of modules."""
    text = kind if isinstance(kind, str) else inspect.formatannotation(kind)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z])", "", text).strip("'\"")


def signature(thing: Any, name: str) -> str:
    """The signature of a function or class, as code. Types are in the meanings, and in editors."""
    if isinstance(thing, property):
        return f"{name}: {annotation_of(inspect.signature(thing.fget).return_annotation)}"
    try:
        found = inspect.signature(thing)
    except ValueError:
        return f"class {name}"
    written, star = [], False
    for x in found.parameters.values():
        if x.name in ("self", "cls"):
            continue
        stars = {x.VAR_POSITIONAL: "*", x.VAR_KEYWORD: "**"}.get(x.kind, "")
        if x.kind is x.KEYWORD_ONLY and not star:
            written.append("*")
        star |= x.kind in (x.KEYWORD_ONLY, x.VAR_POSITIONAL)
        default = getattr(x.default, "__name__", None) or repr(x.default)
        written.append(f"{stars}{x.name}" + ("" if x.default is x.empty else f"={default}"))
    end = ""
    if not isinstance(thing, type) and found.return_annotation is not found.empty:
        end = f" -> {annotation_of(found.return_annotation)}"
    head = "class" if isinstance(thing, type) else "def"
    line = f"{head} {name}({', '.join(written)}){end}"
    return "\n".join(textwrap.wrap(line, 100, subsequent_indent="    "))


def link_to(section_name: str) -> str:
    """A section of a run file, as a link to its keys."""
    return f"[`[{section_name}]`](runfile.md#{section_name})"


def table_of(found: dict[str, str], name: str, said: dict[Any, str]) -> str:
    """The meaning of each argument. What another entry says of it already is not said again.

    `said` has, for each argument with its meaning, the entry or section that says it first.
    """
    rows: dict[str, list[str]] = {}
    for argument, text in found.items():
        meaning = brief(plain(text))
        first = said.setdefault((argument, meaning), f"`{name}`")
        if first != f"`{name}`" and len(meaning.split()) > len(f"as in {first}.".split()):
            meaning = f"as in {first}."
        rows.setdefault(meaning, []).append(f"`{argument}`")
    lines = (f"| {', '.join(names)} | {meaning} |" for meaning, names in rows.items())
    return "\n".join(("| name | meaning |\n|---|---|", *lines))


def described(thing: Any, name: str, of: dict[type, str], said: dict[Any, str]) -> str:
    """A signature, the text of its docstring, and the meaning of each argument."""
    parts = parts_of(thing)
    text = [f"```text\n{signature(thing, name)}\n```", parts[""]]
    if thing in of:
        return (
            f"{parts[''].splitlines()[0]} The fields are the keys of {link_to(of[thing])}, "
            "which says more."
        )
    if found := {k: x for part in PARTS[:2] for k, x in entries(parts.get(part, "")).items()}:
        text.append(table_of(found, name, said))
    # what is raised is a GrowthError, and says itself what is wrong
    for part in PARTS[2:4]:
        if part in parts and said.setdefault((part, parts[part]), name) == name:
            text.append(f"{part}: {plain(parts[part])}")
    return "\n\n".join(filter(None, text))


def members(cls: type) -> list[tuple[str, Any]]:
    """The documented public methods and properties that a class adds to those of its bases."""
    found = ((name, getattr(x, "__func__", x)) for name, x in vars(cls).items())
    kinds = (property, types.FunctionType)
    known = {name for base in cls.__mro__[1:] for name in vars(base)}
    return [
        (name, x)
        for name, x in found
        if isinstance(x, kinds) and x.__doc__ and name[0] != "_" and name not in known
    ]


def block(path: str, of: dict[type, str], said: dict[Any, str]) -> str:
    """The entry of a public object, `path` being its dotted name."""
    module, name = path.rsplit(".", 1)
    thing = getattr(importlib.import_module(module), name)
    if isinstance(thing, type) and issubclass(thing, BaseException):
        return f"### `{path}`\n\n{inspect.getdoc(thing)}"
    text = [f"### `{path}`", described(thing, name, of, said)]
    rows = []
    for member, x in members(thing) if isinstance(thing, type) and thing not in of else ():
        parts = parts_of(x)
        says = " ".join((parts[""], *(f"{k}: {y}" for k, y in parts.items() if k in ("Returns",))))
        line = re.sub("^def ", "", signature(x, member)).replace("|", "\\|")
        rows.append(f"| `{line}` | {plain(says)} |")
    if rows:
        text.append("\n".join(("| member | meaning |\n|---|---|", *rows)))
    return "\n\n".join(text)


def api(page: str) -> str:
    """The page of all signatures.

    Args:
        page: its present text.
    """
    of = {cls: name for name, cls in sections().items()}
    marks = r"(<!-- (growkern\S+) -->\n).*?(<!-- /\2 -->)"
    said: dict[Any, str] = {}
    for name in ("loss", "inheritance"):
        for argument, meaning in meanings(sections()[name]).items():
            said.setdefault((argument, brief(plain(meaning))), link_to(name))
    return re.sub(marks, lambda m: f"{m[1]}{block(m[2], of, said)}\n{m[3]}", page, flags=re.S)


if __name__ == "__main__":
    API.write_text(api(API.read_text()))
    RUN_FILE.write_text(run_file())
