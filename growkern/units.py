"""Numbers as people read them."""

PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z", "Y")


def human(number: float) -> str:
    """A number with an SI prefix: 1234567 becomes "1.23 M"."""
    for prefix in PREFIXES:
        text = f"{number:.3g}"
        # as it is printed: 999.7 has the next prefix
        if abs(float(text)) < 1000 or prefix == PREFIXES[-1]:
            break
        number /= 1000
    return f"{text} {prefix}".strip()
