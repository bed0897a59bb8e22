"""Short names of layers: `blocks.0-3, head` for the parameters of a collective."""

from collections.abc import Iterable

MOST_PARTS = 4
"""Most parts of a list of layers that are written out."""


def layer_range(parameters: Iterable[str]) -> str:
    """Layers of these parameters, in the order of the model; consecutive numbers are joined.

    A layer is the part of the name up to its first number (`encoder.layers.5` of `encoder.layers.5.attention.weight`),
    otherwise the outermost module (`head`); a parameter of the model itself counts as a layer.
    """
    numbers: dict[str, list[int]] = {}
    for name in parameters:
        parts = name.split(".")
        place = next((i for i, part in enumerate(parts[:-1]) if part.isdecimal()), None)
        if place is None:
            numbers.setdefault(parts[0], [])
        else:
            numbers.setdefault(".".join([*parts[:place], ""]), []).append(int(parts[place]))
    found = [f"{prefix}{run}" for prefix, own in numbers.items() for run in (_runs(own) if own else [""])]
    if len(found) > MOST_PARTS:
        found = [*found[: MOST_PARTS - 1], f"{len(found) - MOST_PARTS + 1} more"]
    return ", ".join(found)


def _runs(numbers: Iterable[int]) -> list[str]:
    """Numbers as `0-3`, `7`."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return [str(first) if first == last else f"{first}-{last}" for first, last in runs]
