// Many rows of one decode sampled in one call, also the one that decodes, and the two frequent chains without
// the whole vocabulary.
//
// Rule 1: a row gets the token that `shim_sampling_next` would give it; what is not certain to, goes there.
// Rule 2: an exception is the row's own.

#include "shim.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <exception>
#include <functional>
#include <new>
#include <vector>

namespace {

constexpr int32_t NO_LOGITS = -1;        // as in shim_sampling.cpp
constexpr int32_t NOTHING_ALLOWED = -2;
constexpr int32_t UNDECIDED = -100;      // there are NaNs: the ordinary way says which
constexpr int32_t BLOCK = 512;           // logits looked at together
constexpr int32_t LANES = 16;
// llama-sampler.cpp, partial_sort_inplace: up to here std::partial_sort, beyond it buckets, which order equal
// logits by what else there is.
constexpr int32_t MAX_TOP_K = 128;

struct extremes {
    float top = -INFINITY;
    bool has_nan = false;
};

// In lanes, so that the compiler makes vectors of it.
extremes look_at(const float *x, int32_t n) {
    std::array<float, LANES> top;
    std::array<int32_t, LANES> nan{};
    top.fill(-INFINITY);
    int32_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        for (int32_t lane = 0; lane < LANES; ++lane) {
            const auto at = static_cast<size_t>(lane);
            const float value = x[i + lane];
            top[at] = value > top[at] ? value : top[at];
            nan[at] |= value != value ? 1 : 0;
        }
    }
    extremes found;
    for (; i < n; ++i) {
        found.top = x[i] > found.top ? x[i] : found.top;
        found.has_nan |= x[i] != x[i];
    }
    for (int32_t lane = 0; lane < LANES; ++lane) {
        const auto at = static_cast<size_t>(lane);
        found.top = top[at] > found.top ? top[at] : found.top;
        found.has_nan |= nan[at] != 0;
    }
    return found;
}

// A row's logits with its biases added, from the first to the last; llama.cpp's own stay as they are.
class biased_logits {
   public:
    biased_logits(const float *logits_, const el_row &row)
        : logits(logits_), bias(row.bias), end(row.bias + row.n_bias) {}

    // Logits [start, start + n), n at most BLOCK, valid until the next call; each begins where the last ended.
    const float *next(int32_t start, int32_t n) {
        const float *block = logits + start;
        if (bias == end || bias->token >= start + n) {
            return block;
        }
        std::memcpy(copy.data(), block, static_cast<size_t>(n) * sizeof(float));
        for (; bias != end && bias->token < start + n; ++bias) {
            copy[static_cast<size_t>(bias->token - start)] += bias->bias;
        }
        return copy.data();
    }

   private:
    const float *logits;
    const llama_logit_bias *bias;
    const llama_logit_bias *end;
    std::array<float, BLOCK> copy;
};

// The first of the largest: llama_sampler_greedy_apply takes a later one only if it is larger.
int32_t first_of_the_largest(const float *logits, int32_t n_vocab, const el_row &row) {
    biased_logits biased(logits, row);
    float top = -INFINITY;
    int32_t token = NOTHING_ALLOWED;
    for (int32_t start = 0; start < n_vocab; start += BLOCK) {
        const int32_t n = std::min(BLOCK, n_vocab - start);
        const float *x = biased.next(start, n);
        const extremes found = look_at(x, n);
        if (found.has_nan) {
            return UNDECIDED;
        }
        if (found.top > top) {
            top = found.top;
            token = start + static_cast<int32_t>(std::find(x, x + n, top) - x);
        }
    }
    return token;
}

// The candidates that std::partial_sort would look at twice: its first k, and every later one that is larger
// than the k-th largest before it. Leaving out the others changes neither the k best nor their order.
bool contenders(const float *logits, int32_t n_vocab, const el_row &row, std::vector<llama_token_data> &out) {
    const int32_t k = std::min(row.top_k, n_vocab);
    biased_logits biased(logits, row);
    std::array<float, MAX_TOP_K> heap;  // the k largest so far, the least of them first
    const auto begin = heap.begin();
    const auto end = begin + k;
    out.clear();
    const float *first = biased.next(0, k);
    bool has_nan = look_at(first, k).has_nan;
    for (int32_t id = 0; id < k; ++id) {
        heap[static_cast<size_t>(id)] = first[id];
        out.push_back({id, first[id], 0.0f});
    }
    if (has_nan) {
        return false;
    }
    std::make_heap(begin, end, std::greater<float>());
    for (int32_t start = k; start < n_vocab && !has_nan; start += BLOCK) {
        const int32_t n = std::min(BLOCK, n_vocab - start);
        const float *x = biased.next(start, n);
        const extremes found = look_at(x, n);
        has_nan = found.has_nan;
        if (!(found.top > *begin)) {
            continue;
        }
        for (int32_t i = 0; i < n; ++i) {
            if (x[i] > *begin) {
                out.push_back({start + i, x[i], 0.0f});
                std::pop_heap(begin, end, std::greater<float>());
                *(end - 1) = x[i];
                std::push_heap(begin, end, std::greater<float>());
            }
        }
    }
    return !has_nan;
}

// The chain over the contenders; its first part, the biases, is in them already.
int32_t one_of_the_best(const float *logits, int32_t n_vocab, const el_row &row, std::vector<llama_token_data> &scratch) {
    if (!contenders(logits, n_vocab, row, scratch)) {
        return UNDECIDED;
    }
    llama_token_data_array array = {scratch.data(), scratch.size(), -1, false};
    for (int32_t i = row.n_bias > 0 ? 1 : 0; i < llama_sampler_chain_n(row.chain); ++i) {
        llama_sampler_apply(llama_sampler_chain_get(row.chain, i), &array);
    }
    if (array.selected < 0 || array.selected >= static_cast<int64_t>(array.size)) {
        return NOTHING_ALLOWED;
    }
    const llama_token_data &chosen = array.data[array.selected];
    return chosen.logit > -INFINITY ? chosen.id : NOTHING_ALLOWED;
}

int32_t sample(struct llama_context *ctx, int32_t n_vocab, const el_row &row, std::vector<llama_token_data> &scratch) {
    int32_t token = UNDECIDED;
    const bool few = row.top_k > 0 && row.top_k <= MAX_TOP_K;
    if (row.is_greedy || few) {
        const float *logits = llama_get_logits_ith(ctx, row.output);
        if (logits == nullptr) {
            return NO_LOGITS;
        }
        token = row.is_greedy ? first_of_the_largest(logits, n_vocab, row) : one_of_the_best(logits, n_vocab, row, scratch);
    }
    if (token == UNDECIDED) {
        return shim_sampling_next(row.sampler, ctx, row.output);
    }
    if (token >= 0) {
        llama_sampler_accept(row.chain, token);
    }
    return token;
}

double seconds_of(clockid_t clock) {
    timespec now{};
    clock_gettime(clock, &now);
    return static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9;
}

void report(el_row &row, int32_t kind, const char *text) {
    row.error.kind = kind;
    snprintf(row.error.message, sizeof(row.error.message), "%s", text);
}

}  // namespace

void shim_sample_rows(struct llama_context *ctx, int32_t n_vocab, struct el_row **rows, int32_t n_rows) {
    std::vector<llama_token_data> scratch;
    for (int32_t i = 0; i < n_rows; ++i) {
        el_row &row = *rows[i];
        row.error.kind = 0;
        try {
            row.token = sample(ctx, n_vocab, row, scratch);
        } catch (const std::bad_alloc &) {
            report(row, 1, "out of memory");
        } catch (const std::exception &error) {
            report(row, 2, error.what());
        } catch (...) {
            report(row, 2, "an exception that is not a std::exception");
        }
    }
}

int32_t shim_decode_rows(struct llama_context *ctx, const struct llama_batch *batch, const struct el_batch_limits *limits, llama_memory_t mem, struct el_batch_fault *fault, struct el_abort *abort, double seconds, struct el_row **rows, int32_t n_rows, struct el_step_times *times) {
    *times = {0.0, 0.0, 0.0};
    const double began = seconds_of(CLOCK_MONOTONIC);
    const double cpu_began = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    const int32_t rc = shim_decode_checked(ctx, batch, limits, mem, fault, abort, seconds);
    const double computed = seconds_of(CLOCK_MONOTONIC);
    times->compute_s = computed - began;
    times->cpu_s = seconds_of(CLOCK_PROCESS_CPUTIME_ID) - cpu_began;
    if (rc == 0) {
        shim_sample_rows(ctx, limits->n_vocab, rows, n_rows);
        times->sample_s = seconds_of(CLOCK_MONOTONIC) - computed;
    }
    return rc;
}
