"""What tests check of an error: its type, by pytest, and the values that it names."""


def names(error, *values):
    """Whether the one line of `error` (pytest's ExceptionInfo) names all of these, as text."""
    line = str(error.value)
    missing = [value for value in map(str, values) if value not in line]
    assert not missing, f"{line!r} does not name {missing}"
    assert "\n" not in line, "an error is one line"
    return True
