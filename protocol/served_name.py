"""The name under which a model is served: a metric label on every series, so not every name will do.

Engine and frontend judge it by the same rule, because they must agree on it.
"""

FORBIDDEN = "\"'\\{}"


def check_served_model_name(name: str) -> str:
    """Return `name`, or raise ValueError: metric readers split lines at blanks and would read 0 for every counter."""
    bad = [
        character for character in name if character.isspace() or not character.isprintable() or character in FORBIDDEN
    ]
    if not name or bad:
        what = f"contains {bad[0]!r}" if bad else "is empty"
        raise ValueError(
            f"--served-model-name {name!r} {what}: the name is a metric label, and bench clients, which split metric "
            "lines at blanks and quotes, would read 0 for every counter"
        )
    return name
