// Abort flag, load progress, batch check and memory read-out.

#include "shim.h"

#include <array>
#include <chrono>
#include <new>
#include <stdexcept>

// llama_get_memory_breakdown is exported by libllama but only declared next to its sources.
#include "../src/llama-ext.h"

#ifndef ERLLAMA_BUILD_STAMP
#error "build_binding defines ERLLAMA_BUILD_STAMP"
#endif

namespace {

constexpr int32_t FIRED_CANCEL = 1;
constexpr int32_t FIRED_DEADLINE = 2;

int64_t now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

// Called by ggml's compute threads between graph nodes; true stops the graph.
bool abort_callback(void *data) {
    auto *state = static_cast<el_abort *>(data);
    if (__atomic_load_n(&state->cancel, __ATOMIC_RELAXED) != 0) {
        __atomic_store_n(&state->fired, FIRED_CANCEL, __ATOMIC_RELAXED);
        return true;
    }
    const int64_t deadline_ns = __atomic_load_n(&state->deadline_ns, __ATOMIC_RELAXED);
    if (deadline_ns != 0 && now_ns() >= deadline_ns) {
        __atomic_store_n(&state->fired, FIRED_DEADLINE, __ATOMIC_RELAXED);
        return true;
    }
    return false;
}

bool progress_callback(float fraction, void *data) {
    auto *progress = static_cast<el_load_progress *>(data);
    __atomic_store(&progress->fraction, &fraction, __ATOMIC_RELAXED);
    if (__atomic_load_n(&progress->cancel, __ATOMIC_RELAXED) != 0) {
        __atomic_store_n(&progress->cancelled, 1, __ATOMIC_RELAXED);
        return false;
    }
    return true;
}

enum batch_fault : int32_t {
    FAULT_NONE = 0,
    FAULT_EMPTY = 1,
    FAULT_ROWS = 2,
    FAULT_TOKEN = 3,
    FAULT_SEQ = 4,
    FAULT_OUTPUTS = 5,
    FAULT_MEMORY_POS = 6,
    FAULT_BATCH_POS = 7,
};

bool refuse(el_batch_fault *fault, batch_fault code, int32_t row, int64_t value, int64_t limit) {
    *fault = {code, row, value, limit};
    return false;
}

}  // namespace

const char *shim_stamp(void) {
    return ERLLAMA_BUILD_STAMP;
}

void shim_test_throw(int32_t kind) {
    switch (kind) {
        case 1: throw std::bad_alloc();
        case 2: throw std::runtime_error("thrown by the test hook");
        case 3: throw kind;
        default: return;
    }
}

struct llama_model *shim_model_load(const char *path, struct llama_model_params params, struct el_load_progress *progress) {
    params.progress_callback = progress_callback;
    params.progress_callback_user_data = progress;
    return llama_model_load_from_file(path, params);
}

void shim_context_set_abort(struct llama_context *ctx, struct el_abort *state) {
    llama_set_abort_callback(ctx, state != nullptr ? abort_callback : nullptr, state);
}

void shim_context_memory_use(const struct llama_context *ctx, struct el_memory_use *out) {
    *out = {0, 0, 0};
    for (const auto &entry : llama_get_memory_breakdown(ctx)) {
        out->model_bytes += entry.second.model;
        out->context_bytes += entry.second.context;
        out->compute_bytes += entry.second.compute;
    }
}

void shim_abort_raise(struct el_abort *state) {
    __atomic_store_n(&state->cancel, 1, __ATOMIC_RELAXED);
}

void shim_abort_arm(struct el_abort *state, double seconds) {
    // At least 1: zero means "no deadline".
    constexpr double FOR_EVER_S = 1e9;  // thirty years; more would not fit into the nanoseconds
    const double left_s = seconds < FOR_EVER_S ? seconds : FOR_EVER_S;
    const int64_t deadline_ns = seconds < 0 ? 0 : now_ns() + static_cast<int64_t>(left_s * 1e9) + 1;
    __atomic_store_n(&state->deadline_ns, deadline_ns, __ATOMIC_RELAXED);
}

void shim_abort_clear(struct el_abort *state) {
    __atomic_store_n(&state->cancel, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&state->deadline_ns, static_cast<int64_t>(0), __ATOMIC_RELAXED);
    __atomic_store_n(&state->fired, 0, __ATOMIC_RELAXED);
}

// Everything llama_decode would assert on or log an error about, found before it is called.
bool shim_batch_check(const struct llama_batch *batch, const struct el_batch_limits *limits, llama_memory_t mem, struct el_batch_fault *fault) {
    constexpr llama_pos UNSEEN = -1;
    std::array<llama_pos, 256> last_pos;  // llama.cpp: LLAMA_MAX_SEQ is 256
    last_pos.fill(UNSEEN);

    if (batch->n_tokens < 1) {
        return refuse(fault, FAULT_EMPTY, 0, batch->n_tokens, 1);
    }
    if (batch->n_tokens > limits->n_batch) {
        return refuse(fault, FAULT_ROWS, 0, batch->n_tokens, limits->n_batch);
    }
    const int32_t n_seq_max = limits->n_seq_max < 256 ? limits->n_seq_max : 256;
    int32_t n_outputs = 0;
    for (int32_t row = 0; row < batch->n_tokens; ++row) {
        if (batch->token[row] < 0 || batch->token[row] >= limits->n_vocab) {
            return refuse(fault, FAULT_TOKEN, row, batch->token[row], limits->n_vocab);
        }
        const llama_seq_id seq = batch->seq_id[row][0];
        if (seq < 0 || seq >= n_seq_max) {
            return refuse(fault, FAULT_SEQ, row, seq, n_seq_max);
        }
        const llama_pos pos = batch->pos[row];
        auto &last = last_pos[static_cast<size_t>(seq)];
        if (last == UNSEEN) {
            const llama_pos stored = mem != nullptr ? llama_memory_seq_pos_max(mem, seq) : -1;
            if (pos < 0 || (stored >= 0 && pos != stored + 1)) {
                return refuse(fault, FAULT_MEMORY_POS, row, pos, stored + 1);
            }
        } else if (pos != last + 1) {
            return refuse(fault, FAULT_BATCH_POS, row, pos, last + 1);
        }
        last = pos;
        n_outputs += batch->logits[row] != 0 ? 1 : 0;
    }
    if (n_outputs > limits->n_outputs_max) {
        return refuse(fault, FAULT_OUTPUTS, 0, n_outputs, limits->n_outputs_max);
    }
    return true;
}

int32_t shim_decode_checked(struct llama_context *ctx, const struct llama_batch *batch, const struct el_batch_limits *limits, llama_memory_t mem, struct el_batch_fault *fault, struct el_abort *abort, double seconds) {
    fault->code = FAULT_NONE;
    if (!shim_batch_check(batch, limits, mem, fault)) {
        return -1;
    }
    if (seconds == seconds) {
        shim_abort_arm(abort, seconds);
    }
    return llama_decode(ctx, *batch);
}
