"""Write the tables of docs/reference/ from the code: options with their checks, errors with their reasons.

    python tools/reference.py          rewrite the tables
    python tools/reference.py --check  say which file is out of date; exit status 1 if any

A table stands between two marker comments; the text around it is written by hand. What a field means
is told here, beside its name: a new option without a meaning is an error.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path
from typing import Any

from erllama import errors, options
from erllama.chat.options import ChatOptions

DOCS = Path(__file__).resolve().parent.parent / "docs" / "reference"
BEGIN, END = "<!-- {}: written by tools/reference.py -->", "<!-- end of {} -->"

MEANINGS: dict[type, dict[str, str]] = {
    options.ModelOptions: {
        "n_gpu_layers": "layers to put on the GPU; -1 is all",
        "split_mode": "how several GPUs share the model: not, by layer, or by row of each matrix",
        "main_gpu": "the GPU that is used when the model is not split",
        "tensor_split": "share of the model per GPU, in any unit",
        "load_mode": "how the file gets into memory; `auto` lets llama.cpp choose",
        "use_mmap": "older spelling of `load_mode`; give one or the other",
        "use_mlock": "older spelling of `load_mode`: keep the weights from being swapped out",
        "vocab_only": "read the vocabulary and no weights",
    },
    options.ContextOptions: {
        "n_ctx": "tokens one request may use, prompt and answer together; None: as many as in training",
        "n_batch": "rows of one step at most",
        "n_ubatch": "rows that are computed at once; None: `n_batch`",
        "n_seq_max": "requests that run at the same time",
        "n_threads": "CPU threads of a decode step; None: physical cores, at most the usable CPUs, and "
        "fewer while other programs want them",
        "n_threads_batch": "CPU threads of a prefill step; None: `n_threads`",
        "flash_attn": "fused attention; `auto` uses it where the backend has it",
        "type_k": "element type of the cached keys; `q8_0` halves them",
        "type_v": "element type of the cached values",
        "kv_unified": "one cache for all sequences (prefixes can be shared) instead of one each",
        "embeddings": "whether `embed` can be asked; see [embeddings](../guides/embeddings.md)",
        "pooling": "how the vectors of an input's tokens become one; None: as the model says",
        "prefill_chunk_size": "prompt tokens of one request per step; `math.inf`: no limit; None: half "
        "of `n_batch` for a prompt that runs alone on memory that can be cut anywhere, else a quarter, in "
        "multiples of 64",
        "step_target_s": "how long a step should take while others wait for a token, with one prompt to "
        "compute; twice that with two, at most four times; only prompts that have a slot count, not queued "
        "ones",
        "decode_budget_s": "how long a step may take before it is aborted; None: chosen from measured steps, "
        "and no limit for a call that embeds; 0: no limit",
    },
    options.GenerationOptions: {
        "max_tokens": "tokens to generate at most; the context ends an answer too, so larger numbers than "
        "fit do no harm",
        "temperature": "0 always takes the likeliest token; None: the model's own, else 0.8",
        "top_k": "choose among the K likeliest, 0 is all; None: the model's own, else 40",
        "top_p": "choose among the likeliest that sum up to P; None: the model's own, else 0.95",
        "min_p": "drop what is less likely than P × the likeliest; None: the model's own, else 0.05",
        "repetition_penalty": "above 1 avoids tokens that were there before; None: the model's own, else 1.0",
        "seed": "the same seed draws the same way; None: one is drawn, and `Completion.seed` tells it",
        "grammar": "GBNF text; the answer can only be what it allows",
        "json_schema": "a JSON schema that the answer satisfies",
        "thinking": "tell text between the model's `thinking_markers` apart; chats have `reasoning`",
        "thinking_budget_tokens": "thinking tokens before the block is ended; 0 or less: no limit",
        "grammar_first": "apply the grammar before the other samplers: slower, and no likely token is lost",
        "stop": "texts before which the answer ends",
        "logit_bias": "token id → number added to its logit; `-math.inf` forbids it",
        "logprobs": "report the log-probability of each token and of this many alternatives",
        "cache": '`"on"`; `"read"`: reuse, but keep nothing of this request; `"off"`: neither',
        "salt": "whose KV this is: requests with different salts share none; empty: all without one share it",
        "middleware": "`async (call, next) -> result` around this call, inside of the engine's",
        "session_id": "whose turn this is; its sequence is held for the next turn. A second request while "
        "one is in flight raises `StickyBusy`",
        "parent_key": "the `finish_key` this prompt goes on from; a hint, worth a short wait while that is "
        "being saved",
        "prefix_checkpoint_len": "where the prompt's head (system and tools) ends: what is stored up to "
        "there is pinned",
        "on_full": "when every sequence is busy: wait in line, or raise `SeqCapacity`",
        "exact": '`"session"`: as if nothing had ever been dropped; `"cold"`: bit for bit the answer of a '
        "fresh context, computed alone; None: what `load_model` was told",
    },
    ChatOptions: {
        "tools": "what the model may call, in the shape OpenAI gave tools",
        "tool_choice": "`auto`, `none`, `required`, or the one that must be called",
        "parallel_tool_calls": "whether one answer may have several calls, where the template can",
        "response_format": "`text`, `json_object` or `json_schema`, in the shape OpenAI gave it",
        "lazy_tool_grammar": "a grammar begins with a call that may be made; `strict` tools always have it",
        "reasoning": "`auto`: told apart; `off`: asked not to; `inline`: left in the content",
        "template_kwargs": "variables of the template",
        "add_generation_prompt": "end the prompt where the answer begins; `chat` always does",
    },
    options.EngineConfig: {
        "stream_buffer_events": "events that wait for a slow reader before its request pauses",
        "tiers": "where KV is kept besides RAM: `DiskTier`, `RamFileTier`",
        "ram_max_bytes": "budget of the RAM tier, index included",
        "ram_spill": "name of the tier that gets what the RAM tier has no room for; None: it is dropped",
        "lookup_log": "a file that `kvc sim` replays under other budgets; it holds prompts",
        "writer_max_concurrent": "saves written to files at once",
        "evict_save_timeout_s": "seconds an unload waits for what is still to be saved",
        "chat_cache_size": "parsed chat templates that are kept, one a model",
        "middleware": "`async (call, next) -> result` around every call of all models, the first outermost",
        "thinking_signing_key": "signs the end of thinking blocks; None: signatures are empty",
    },
}


# Classes that exist so that programs can name them, and that nothing in this version raises.
NOT_RAISED = {
    "ModelCrashed",
    "ModelLoading",
}


def option_tables() -> str:
    """A section per option class: its sentence, then name, default, accepted values, meaning."""
    return "\n".join(_option_table(kind, meanings) for kind, meanings in MEANINGS.items())


def _option_table(kind: Any, meanings: dict[str, str]) -> str:
    fields = dataclasses.fields(kind)
    names = {field.name for field in fields}
    if names != set(meanings):
        raise SystemExit(f"{kind.__name__}: no meaning in {__file__} for {sorted(names ^ set(meanings))}")
    lines = [f"## {kind.__name__}", "", (kind.__doc__ or "").splitlines()[0], ""]
    lines += ["| option | default | accepted | meaning |", "|---|---|---|---|"]
    for field in fields:
        accepted = _expectation(field.metadata["check"])
        lines.append(f"| `{field.name}` | `{field.default!r}` | {accepted} | {meanings[field.name]} |")
    return "\n".join([*lines, ""])


class Unacceptable:
    """No number, no text, no mapping, not even hashable."""

    __hash__ = None  # type: ignore[assignment]  # the documented way to forbid hashing


def _expectation(check: options.Check) -> str:
    """What a check says it wants."""
    try:
        check(Unacceptable())
    except options.Rejected as why:
        return str(why).replace("|", "\\|")
    raise AssertionError("a check accepted anything")


def error_table() -> str:
    """Every error class by branch: reason, HTTP status, first sentence."""
    lines = ["| class | reason | HTTP status | when |", "|---|---|---|---|"]
    for branch in (errors.RequestError, errors.Overloaded, errors.EngineError):
        lines.append(
            f"| **`{branch.__name__}`** | `{branch.reason}` | {branch.http_status} | {_first(branch)} |"
        )
        lines += [
            f"| `{kind.__name__}` | `{kind.reason}` | {kind.http_status} | {_first(kind)} |"
            for kind in sorted(branch.__subclasses__(), key=lambda kind: kind.__name__)
            if kind.__module__ == errors.__name__  # others are told apart inside only
        ]
    return "\n".join([*lines, ""])


def _first(kind: type) -> str:
    sentence = " ".join((kind.__doc__ or "").split("\n\n")[0].split())
    return f"{sentence} *Not raised yet.*" if kind.__name__ in NOT_RAISED else sentence


TABLES = {"options.md": ("options", option_tables), "errors.md": ("errors", error_table)}


def with_table(text: str, name: str, table: str) -> str:
    """`text` with what stands between the markers of `name` replaced."""
    begin, end = BEGIN.format(name), END.format(name)
    head, rest = text.split(begin)
    _, tail = rest.split(end)
    return f"{head}{begin}\n\n{table}\n{end}{tail}"


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description="Write the tables of docs/reference/ from the code.")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a table is out of date")
    check = parser.parse_args(argv).check
    stale = False
    for file, (name, make) in TABLES.items():
        path = DOCS / file
        old = path.read_text()
        new = with_table(old, name, make())
        if new != old and check:
            print(f"{path} is out of date; run: python tools/reference.py")
            stale = True
        elif new != old:
            path.write_text(new)
            print(f"{path}: rewritten")
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
