"""What llama.cpp is told, from what the user asked for and what the model says."""

from __future__ import annotations

import dataclasses
import logging
from typing import TYPE_CHECKING

from erllama import llama

from .sampling import DEFAULTS

if TYPE_CHECKING:
    from erllama.options import ContextOptions, ModelOptions

log = logging.getLogger("erllama.engine")

N_LANES = 64  # inputs that are embedded at once; more would only make its tables larger
N_SCRATCH = 1  # one sequence before those of the slots, where ranges can be copied: for saving and restoring


def sampling_defaults(sampling: llama.SamplingFacts) -> dict[str, float]:
    """What the model file says about sampling, by the names of `GenerationOptions`."""
    given = dataclasses.asdict(sampling)
    return {name: given[name] for name in DEFAULTS if given[name] is not None}


def native_params(options: ContextOptions, facts: llama.ModelFacts) -> llama.ContextParams:
    """llama.cpp's parameters for a context that is asked for by these resolved options."""
    n_ctx = options.n_ctx or facts.n_ctx_train
    unified = options.kv_unified
    assert options.n_threads is not None
    assert options.n_threads_batch is not None
    assert options.n_ubatch is not None
    return llama.ContextParams(
        n_ctx=n_ctx if unified else n_ctx * options.n_seq_max,
        n_batch=options.n_batch,
        n_ubatch=options.n_ubatch,
        n_seq_max=options.n_seq_max + (N_SCRATCH if unified else 0),
        n_outputs_max=options.n_seq_max,  # one sampled row per sequence; more would cost compute buffer
        n_threads=options.n_threads,
        n_threads_batch=options.n_threads_batch,
        flash_attn=options.flash_attn,
        type_k=options.type_k,
        type_v=options.type_v,
        kv_unified=unified,
    )


def embedding_params(options: ContextOptions, facts: llama.ModelFacts) -> llama.ContextParams:
    """llama.cpp's parameters for a context that embeds, by the same options.

    Inputs are computed side by side in as many sequences as divide its rows (see `ContextParams.n_rows`);
    where each sequence has a state, in `n_seq_max` of them.
    """
    n_ctx = min(options.n_ctx or facts.n_ctx_train, facts.n_ctx_train)
    assert options.n_threads is not None
    n_rows = min(options.n_ubatch or options.n_batch, options.n_batch)
    if facts.is_recurrent or facts.is_hybrid:
        n_lanes = min(options.n_seq_max, n_rows)
    else:
        n_lanes = max(n for n in range(1, min(N_LANES, n_rows) + 1) if n_rows % n == 0)
    return llama.ContextParams(
        n_ctx=max(n_ctx, n_rows),
        n_batch=n_rows,
        n_ubatch=n_rows,
        n_seq_max=n_lanes,
        n_threads=options.n_threads,
        n_threads_batch=options.n_threads_batch,
        flash_attn=options.flash_attn,
        type_k=options.type_k,
        type_v=options.type_v,
        kv_unified=True,
        embeddings=True,
        pooling=options.pooling,
    )


def warn_of_what_will_disappoint(
    path: str, options: ContextOptions, model: ModelOptions, facts: llama.ModelFacts
) -> None:
    """What llama.cpp accepts and the user will not like."""
    if facts.n_positions is not None and (options.n_ctx or 0) > facts.n_positions:
        log.warning(
            "%s has positions for %d tokens; n_ctx=%d is cut to that", path, facts.n_positions, options.n_ctx
        )
    elif facts.n_ctx_train and (options.n_ctx or 0) > facts.n_ctx_train:
        log.warning(
            "%s was trained for %d tokens; with n_ctx=%d, text beyond them is likely to be nonsense",
            *(path, facts.n_ctx_train, options.n_ctx),
        )
    if model.n_gpu_layers != 0 and not any(device.kind in ("gpu", "igpu") for device in llama.devices()):
        log.warning(
            "n_gpu_layers=%d has no effect: there is no GPU that this build of erllama can use",
            model.n_gpu_layers,
        )
