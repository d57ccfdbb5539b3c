// One sampling step per call: logits, chain, grammar, accept.

#include "shim.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <exception>
#include <memory>
#include <string>
#include <vector>

#include "common.h"
#include "reasoning-budget.h"

namespace {

constexpr int32_t NO_LOGITS = -1;
constexpr int32_t NOTHING_ALLOWED = -2;
constexpr int32_t REFUSED_BY_GRAMMAR = -3;
constexpr int32_t NOT_A_NUMBER = -4;

std::atomic<int32_t> n_samplers{0};

// A lazy grammar's triggers that are one token each: a model may also spell their text in several, which
// llama.cpp, asked for the token, does not see. Searched by pattern it would look at all of the answer each time.
class spelled_triggers {
   public:
    void watch(const struct llama_vocab *vocab_, const llama_token *tokens, int32_t n) {
        vocab = vocab_;
        triggers.assign(tokens, tokens + n);
        for (const llama_token token : triggers) {
            texts.push_back(common_token_to_piece(vocab, token, true));
            longest = std::max(longest, texts.back().size());
        }
        reset();
    }

    void reset() {
        waiting = !triggers.empty();
        tail.clear();
    }

    // Tells the grammar of a trigger whose last characters this token brought.
    void accepted(struct llama_sampler *grammar, llama_token token) {
        if (!waiting) {
            return;
        }
        if (std::find(triggers.begin(), triggers.end(), token) != triggers.end()) {
            waiting = false;
            return;
        }
        tail += common_token_to_piece(vocab, token, true);
        for (size_t i = 0; i < triggers.size() && waiting; ++i) {
            const size_t at = texts[i].empty() ? std::string::npos : tail.find(texts[i]);
            if (at != std::string::npos) {
                begin(grammar, triggers[i], tail.substr(at + texts[i].size()));
            }
        }
        if (tail.size() >= longest) {
            tail.erase(0, tail.size() - longest + 1);
        }
    }

   private:
    const struct llama_vocab *vocab = nullptr;
    std::vector<llama_token> triggers;
    std::vector<std::string> texts;
    size_t longest = 0;
    std::string tail;
    bool waiting = false;

    void begin(struct llama_sampler *grammar, llama_token trigger, const std::string &rest) {
        const auto tokens = common_tokenize(vocab, rest, false, false);
        std::string spelled;
        for (const llama_token token : tokens) {
            spelled += common_token_to_piece(vocab, token, true);
        }
        // A tokenizer that adds to what it is given, or words that are no call: the answer stays free.
        if (spelled != rest || !takes(grammar, trigger, tokens)) {
            return;
        }
        waiting = false;
        feed(grammar, trigger, tokens);
    }

    static void feed(struct llama_sampler *grammar, llama_token trigger, const llama_tokens &rest) {
        llama_sampler_accept(grammar, trigger);
        for (const llama_token token : rest) {
            llama_sampler_accept(grammar, token);
        }
    }

    static bool takes(struct llama_sampler *grammar, llama_token trigger, const llama_tokens &rest) {
        const std::unique_ptr<struct llama_sampler, decltype(&llama_sampler_free)> copy(llama_sampler_clone(grammar), &llama_sampler_free);
        try {
            feed(copy.get(), trigger, rest);
        } catch (const std::exception &) {
            return false;
        }
        return true;
    }
};

}  // namespace

struct el_sampler {
    int32_t n_vocab;
    bool lazy;
    bool grammar_first;
    struct llama_sampler *chain;
    struct llama_sampler *grammar;   // null without one
    struct llama_sampler *thinking;  // null unless it is watched where a thinking block begins and ends
    std::vector<llama_token_data> candidates;
    spelled_triggers spelled;

    el_sampler(int32_t n_vocab_, struct llama_sampler *chain_, struct llama_sampler *grammar_, struct llama_sampler *thinking_, bool lazy_, bool grammar_first_)
        : n_vocab(n_vocab_), lazy(lazy_), grammar_first(grammar_first_), chain(chain_), grammar(grammar_), thinking(thinking_) {
        candidates.reserve(static_cast<size_t>(n_vocab));
        n_samplers.fetch_add(1);
    }
    el_sampler(const el_sampler &) = delete;
    el_sampler &operator=(const el_sampler &) = delete;
    ~el_sampler() {
        llama_sampler_free(chain);
        if (grammar != nullptr) {
            llama_sampler_free(grammar);
        }
        if (thinking != nullptr) {
            llama_sampler_free(thinking);
        }
        n_samplers.fetch_sub(1);
    }

    bool is_thinking() const {
        if (thinking == nullptr) {
            return false;
        }
        const auto state = common_reasoning_budget_get_state(thinking);
        return state != REASONING_BUDGET_IDLE && state != REASONING_BUDGET_DONE;
    }

    // A lazy grammar is about tool calls: the same words in a thinking block are none.
    bool grammar_applies() const {
        return grammar != nullptr && !(lazy && is_thinking());
    }

    bool fill(const float *logits) {
        candidates.resize(static_cast<size_t>(n_vocab));
        bool is_number = true;
        for (int32_t id = 0; id < n_vocab; ++id) {
            is_number &= logits[id] == logits[id];
            candidates[static_cast<size_t>(id)] = {id, logits[id], 0.0f};
        }
        return is_number;
    }

    llama_token_data_array view() {
        return {candidates.data(), candidates.size(), -1, false};
    }

    // True when the grammar would take this one token next.
    bool allows(llama_token token) const {
        llama_token_data one = {token, 1.0f, 0.0f};
        llama_token_data_array array = {&one, 1, -1, false};
        llama_sampler_apply(grammar, &array);
        return array.data[0].logit != -INFINITY;
    }

    int32_t pick(bool with_grammar) {
        auto array = view();
        if (thinking != nullptr) {
            llama_sampler_apply(thinking, &array);
        }
        if (with_grammar) {
            llama_sampler_apply(grammar, &array);
            bool any = false;
            for (size_t k = 0; k < array.size && !any; ++k) {
                any = array.data[k].logit != -INFINITY;
            }
            if (!any) {
                return NOTHING_ALLOWED;
            }
        }
        llama_sampler_apply(chain, &array);
        if (array.selected < 0 || array.selected >= static_cast<int64_t>(array.size)) {
            return NOTHING_ALLOWED;
        }
        const llama_token_data &chosen = array.data[array.selected];
        // Nor NaN: what an infinite bias makes of a token that the grammar has forbidden.
        return chosen.logit > -INFINITY ? chosen.id : NOTHING_ALLOWED;
    }

    // The end of a thinking block may be what triggers the grammar, so it is told of it afterwards.
    void accept(llama_token token) {
        const bool to_grammar = grammar_applies();
        if (thinking != nullptr) {
            llama_sampler_accept(thinking, token);
        }
        if (to_grammar) {
            llama_sampler_accept(grammar, token);
            spelled.accepted(grammar, token);
        } else if (grammar != nullptr && !is_thinking()) {
            if (const auto *end = common_reasoning_budget_get_end_match(thinking)) {
                for (const llama_token end_token : *end) {
                    llama_sampler_accept(grammar, end_token);
                }
            }
        }
        llama_sampler_accept(chain, token);
    }
};

struct llama_sampler *shim_thinking_new(const struct llama_vocab *vocab, const llama_token *start, int32_t n_start, const llama_token *ends, const int32_t *end_lengths, int32_t n_ends, const llama_token *forced, int32_t n_forced, int32_t budget) {
    std::vector<llama_tokens> end_sequences;
    for (int32_t i = 0; i < n_ends; ++i) {
        end_sequences.emplace_back(ends, ends + end_lengths[i]);
        ends += end_lengths[i];
    }
    return common_reasoning_budget_init(vocab, {llama_tokens(start, start + n_start)}, end_sequences, llama_tokens(forced, forced + n_forced), budget);
}

// Owns its parts once it has returned; when it throws, the caller still does.
struct el_sampler *shim_sampling_new(int32_t n_vocab, struct llama_sampler *chain, struct llama_sampler *grammar, struct llama_sampler *thinking, bool lazy, bool grammar_first) {
    return new el_sampler(n_vocab, chain, grammar, thinking, lazy, grammar_first);
}

void shim_sampling_watch(struct el_sampler *sampler, const struct llama_vocab *vocab, const llama_token *triggers, int32_t n) {
    sampler->spelled.watch(vocab, triggers, n);
}

void shim_sampling_free(struct el_sampler *sampler) {
    delete sampler;
}

int32_t shim_sampling_count(void) {
    return n_samplers.load();
}

// The grammar looks at one candidate only, and at the whole vocabulary when it rejects that one:
// applied to the vocabulary each time it would cost milliseconds per token.
int32_t shim_sampling_next(struct el_sampler *sampler, struct llama_context *ctx, int32_t i) {
    const float *logits = llama_get_logits_ith(ctx, i);
    if (logits == nullptr) {
        return NO_LOGITS;
    }
    if (!sampler->fill(logits)) {
        return NOT_A_NUMBER;
    }
    const bool constrained = sampler->grammar_applies();
    int32_t token = sampler->pick(constrained && sampler->grammar_first);
    if (token >= 0 && constrained && !sampler->grammar_first && !sampler->allows(token)) {
        sampler->fill(logits);
        token = sampler->pick(true);
    }
    if (token >= 0) {
        try {
            sampler->accept(token);
        } catch (const std::exception &) {  // a trigger inside a token whose rest the grammar does not take
            return REFUSED_BY_GRAMMAR;
        }
    }
    return token;
}

// Asked before it is told: an end token in the middle of a grammar would abort the process.
int32_t shim_sampling_accept(struct el_sampler *sampler, int32_t token) {
    if (sampler->grammar_applies() && !sampler->allows(token)) {
        return REFUSED_BY_GRAMMAR;
    }
    sampler->accept(token);
    return 0;
}

int32_t shim_sampling_prefill(struct el_sampler *sampler, int32_t token, bool with_grammar) {
    if (sampler->thinking != nullptr) {
        llama_sampler_accept(sampler->thinking, token);
    }
    if (with_grammar && sampler->grammar != nullptr) {
        if (!sampler->allows(token)) {
            return REFUSED_BY_GRAMMAR;
        }
        llama_sampler_accept(sampler->grammar, token);
    }
    return 0;
}

void shim_sampling_reset(struct el_sampler *sampler) {
    llama_sampler_reset(sampler->chain);
    if (sampler->grammar != nullptr) {
        llama_sampler_reset(sampler->grammar);
        sampler->spelled.reset();
    }
    if (sampler->thinking != nullptr) {
        llama_sampler_reset(sampler->thinking);
    }
}
