"""The error a user can act on."""


class GrowthError(ValueError):
    """Input that cannot be used: names the tensor or field, what was found and how to mend it."""
