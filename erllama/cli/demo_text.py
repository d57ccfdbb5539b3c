"""Long prompts for the demo: house rules of a museum, as many rooms as asked for, no two sentences alike."""

from __future__ import annotations

import random
from typing import Final

THINGS: Final = (
    "brass clocks", "painted maps", "whale bones", "glass lamps", "ship models", "wooden masks", "old coins",
    "silk robes", "stone tools", "letters of sailors", "stuffed owls", "early radios", "tin toys", "globes",
)  # fmt: skip
PLACES: Final = (
    "Oslo", "Lisbon", "Cairo", "Kyoto", "Lima", "Dublin", "Tallinn", "Naples", "Bergen", "Accra", "Riga",
)  # fmt: skip
KEEPERS: Final = (
    "Mrs Lind", "Mr Okoro", "Ana", "old Tomas", "the night guard", "Doctor Weiss", "Priya", "the twins",
)  # fmt: skip
DUTIES: Final = (
    "{who} dusts them on {day} before the doors open",
    "nobody may touch them, not even {who}",
    "{who} counts them every {day} and writes the number on the board",
    "since the flood {who} keeps them under a cloth until {day}",
    "school classes draw them on {day}, and {who} lends out the pencils",
    "{who} knows the story behind each of them and tells it when it rains",
)
DAYS: Final = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
ASIDES: Final = (
    "The light there is switched off by hand.",
    "Its window faces the harbour and has to stay shut in a storm.",
    "The door sticks a little; lift it while you pull.",
    "Visitors often ask for the way out from here: it is behind the curtain.",
    "One of the floor boards is loose, third from the left.",
)


def house_rules(n_rooms: int, seed: int, *, changed_room: int | None = None) -> str:
    """About 32 tokens a room. Another seed is another house; a changed room leaves the others as they are."""
    opening = f"House rules of museum number {seed}. Read them once, then keep them in mind.\n"
    return opening + "\n".join(_room(n, seed, is_changed=n == changed_room) for n in range(1, n_rooms + 1))


def _room(number: int, seed: int, *, is_changed: bool) -> str:
    if is_changed:
        return f"Room {number} is closed this year, because the roof is being repaired."
    draw = random.Random(1000 * seed + number)  # a room looks the same, however many there are
    duty = draw.choice(DUTIES).format(who=draw.choice(KEEPERS), day=draw.choice(DAYS))
    sentence = (
        f"Room {number} shows {draw.randint(3, 90)} {draw.choice(THINGS)} from {draw.choice(PLACES)}; {duty}."
    )
    return f"{sentence} {draw.choice(ASIDES)}" if number % 3 == 0 else sentence
