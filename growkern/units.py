"""Numbers as people read them."""


def human(number: float) -> str:
    """A number with an SI prefix: 1234567 becomes "1.23 M"."""
    for unit in ("", "k", "M", "G", "T"):
        if abs(number) < 1000:
            return f"{number:.3g} {unit}".strip()
        number /= 1000
    return f"{number:.3g} P"
