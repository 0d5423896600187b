"""The launches of `aot_cases`, as sources to compile."""

from typing import Any

from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.launches.aot_cases import AotCase, listed
from growkern.ops.loss.rows.on_triton import lanes_of
from growkern.ops.loss.rows.once_on_triton import rows_once_kernel

TARGETS = {f"sm_{sm}": GPUTarget("cuda", sm, 32) for sm in (80, 90, 100, 120)}
TARGETS["gfx942"] = GPUTarget("hip", "gfx942", 64)
RAGGED_NAME = ", V 30522"
RAGGED = "rows are not aligned, because the vocabulary is no multiple of 16"


def ragged(case: AotCase) -> AotCase:
    """The same launch for a vocabulary that is no multiple of 16."""
    name = case.name + RAGGED_NAME
    if case.padded:
        return case._replace(name=name, unaligned=(*case.unaligned, "V"))
    constants = dict(case.constexprs)
    if "LANES" in constants:
        constants["LANES"] = lanes_of(constants["BLOCK_V"], case.num_warps, 1)
    return case._replace(
        name=name,
        constexprs=constants,
        unaligned=(*case.unaligned, *sorted({"V", "strides"} & case.signature.keys())),
        narrow=case.narrow or RAGGED,
        narrow_stores=RAGGED,
    )


def all_cases() -> list[AotCase]:
    """The launches of all Triton kernels of the library."""
    cases = listed()
    return cases + [
        ragged(case)
        for case in cases
        if "V" in case.signature and case.kernel is not rows_once_kernel
    ]


def _places(kind: Any) -> list[tuple[tuple[int, ...], Any]]:
    """The members of a tuple argument, each with its path. Other arguments have one empty path."""
    if isinstance(kind, tuple):
        return [((j,), member) for j, member in enumerate(kind)]
    return [((), kind)]


def _typed(kind: Any) -> Any:
    if isinstance(kind, tuple):
        return tuple(_typed(member) for member in kind)
    return kind if isinstance(kind, str) else "constexpr"


def source_of(case: AotCase) -> ASTSource:
    """The specialised source of a case."""
    names = case.kernel.arg_names
    given = {**case.signature, **case.constexprs}
    if sorted(given) != sorted(names):
        wrong = sorted(set(given) ^ set(names))
        raise ValueError(f"{case.name}: these arguments are missing or unknown: {wrong}")
    signature = {name: _typed(case.signature.get(name)) for name in names}
    constants, attrs = dict(case.constexprs), {}
    for name, kind in case.signature.items():
        for place, member in _places(kind):
            path = (names.index(name), *place)
            if not isinstance(member, str):
                constants[path] = member
            elif member[0] in "*i" and name not in case.unaligned:
                attrs[path] = [["tt.divisibility", 16]]
    return ASTSource(case.kernel, signature, constants, attrs)


def options_of(case: AotCase) -> dict[str, Any]:
    """The options of the compiler with which a case is launched."""
    # Triton's launcher sets enable_fp_fusion. From Triton 3.9 on it has no default elsewhere.
    given = {"num_warps": case.num_warps, "maxnreg": case.maxnreg, "enable_fp_fusion": True}
    return given | dict(case.options)


def is_same(case: AotCase, source: ASTSource, launched: ASTSource, metadata: Any) -> bool:
    """Whether a case, specialised to `source`, is what Triton's launcher made of a call."""
    # Triton for AMD does not know all of them
    if any(getattr(metadata, name, value) != value for name, value in options_of(case).items()):
        return False

    def parts(of: ASTSource) -> tuple[Any, ...]:
        # the launcher lists arguments without an attribute, too
        attributes = {path: values for path, values in of.attrs.items() if values}
        constants = {path: str(value) for path, value in of.constants.items()}
        return {k: str(v) for k, v in of.signature.items()}, constants, attributes

    return source.fn is launched.fn and parts(source) == parts(launched)
