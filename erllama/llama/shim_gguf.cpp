// A look into a GGUF's metadata for what llama.cpp would abort on while loading or computing.
//
// llama.cpp throws on most nonsense, and asserts on the rest: llama-model.cpp (load_hparams,
// create_memory), llama-vocab.cpp (one token twice), ggml's operators (a negative epsilon).

#include "shim.h"

#include <cmath>
#include <cstdio>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <unordered_set>

#include "gguf.h"

namespace {

constexpr uint32_t MAX_LAYERS = 512;    // llama-hparams.h: LLAMA_MAX_LAYERS
constexpr uint32_t MAX_EXPERTS = 1024;  // llama-hparams.h: LLAMA_MAX_EXPERTS

struct gguf_closer {
    void operator()(struct gguf_context *gguf) const {
        gguf_free(gguf);
    }
};
using gguf_ptr = std::unique_ptr<struct gguf_context, gguf_closer>;

bool ends_with(std::string_view text, std::string_view end) {
    return text.size() >= end.size() && text.substr(text.size() - end.size()) == end;
}

class metadata_check {
   public:
    explicit metadata_check(const struct gguf_context *gguf_) : gguf(gguf_) {
        const int64_t key = gguf_find_key(gguf, "general.architecture");
        if (key >= 0 && gguf_get_kv_type(gguf, key) == GGUF_TYPE_STRING) {
            prefix = std::string(gguf_get_val_str(gguf, key)) + ".";
        }
    }

    void tokens() const {
        const int64_t key = gguf_find_key(gguf, "tokenizer.ggml.tokens");
        if (key < 0 || gguf_get_kv_type(gguf, key) != GGUF_TYPE_ARRAY || gguf_get_arr_type(gguf, key) != GGUF_TYPE_STRING) {
            return;
        }
        const size_t n = gguf_get_arr_n(gguf, key);
        std::unordered_set<std::string_view> seen;
        seen.reserve(n);
        for (size_t i = 0; i < n; ++i) {
            // As llama.cpp reads it: up to the first NUL byte; empty ones get a name of their own.
            const std::string_view token = gguf_get_arr_str(gguf, key, i);
            if (!token.empty() && !seen.insert(token).second) {
                throw std::runtime_error("token " + std::to_string(i) + " is in the vocabulary twice");
            }
        }
    }

    void layers() const {
        uint32_t n_layer = 0;
        if (!number("block_count", n_layer)) {
            return;  // llama.cpp says that it is missing
        }
        within("block_count", n_layer, 1, MAX_LAYERS);
        uint32_t n_nextn = 0;
        if (number("nextn_predict_layers", n_nextn)) {
            within("nextn_predict_layers", n_nextn, 0, n_layer);
        }
        window(n_layer - n_nextn);
    }

    void experts() const {
        uint32_t n = 0;
        uint32_t n_used = 0;
        uint32_t n_groups = 0;
        uint32_t n_groups_used = 0;
        number("expert_count", n);
        number("expert_group_count", n_groups);
        number("expert_group_used_count", n_groups_used);
        within("expert_count", n, 0, MAX_EXPERTS);
        if (number("expert_used_count", n_used)) {
            within("expert_used_count", n_used, n > 0 ? 1 : 0, n);
        }
        within("expert_group_count", n_groups, 0, n > 0 ? n - 1 : 0);
        if (n_groups > 1) {
            within("expert_group_used_count", n_groups_used, 1, n_groups - 1);
            if (n % n_groups != 0) {
                refuse("expert_group_count", std::to_string(n_groups), "a divisor of " + std::to_string(n));
            }
        }
    }

    void rope() const {
        const int64_t key = gguf_find_key(gguf, (prefix + "rope.scaling.type").c_str());
        if (key < 0 || gguf_get_kv_type(gguf, key) != GGUF_TYPE_STRING) {
            return;
        }
        const std::string_view type = gguf_get_val_str(gguf, key);
        if (type != "none" && type != "linear" && type != "yarn" && type != "longrope") {
            refuse("rope.scaling.type", std::string(type), "none, linear, yarn or longrope");
        }
    }

    void epsilons() const {
        for (int64_t key = 0; key < gguf_get_n_kv(gguf); ++key) {
            if (gguf_get_kv_type(gguf, key) != GGUF_TYPE_FLOAT32 || !ends_with(gguf_get_key(gguf, key), "epsilon")) {
                continue;
            }
            const float epsilon = gguf_get_val_f32(gguf, key);
            if (!(epsilon >= 0) || std::isinf(epsilon)) {
                const std::string name = gguf_get_key(gguf, key);
                throw std::runtime_error(name + " is " + std::to_string(epsilon) + ", expected a number of at least 0");
            }
        }
    }

   private:
    const struct gguf_context *gguf;
    std::string prefix;

    // The value of an unsigned entry; false, and `value` as it was, where there is none.
    bool number(const char *name, uint32_t &value) const {
        const int64_t key = gguf_find_key(gguf, (prefix + name).c_str());
        if (key < 0 || gguf_get_kv_type(gguf, key) != GGUF_TYPE_UINT32) {
            return false;
        }
        value = gguf_get_val_u32(gguf, key);
        return true;
    }

    void within(const char *name, uint32_t value, uint32_t low, uint32_t high) const {
        if (value < low || value > high) {
            refuse(name, std::to_string(value), std::to_string(low) + " to " + std::to_string(high));
        }
    }

    [[noreturn]] void refuse(const char *name, const std::string &value, const std::string &expected) const {
        throw std::runtime_error(prefix + name + " is " + value + ", expected " + expected);
    }

    // A sliding window that no layer has: with every n-th layer dense, and n 1, or with one layer only.
    void window(uint32_t n_layer) const {
        constexpr const char *pattern_name = "attention.sliding_window_pattern";
        uint32_t n_window = 0;
        if (!number("attention.sliding_window", n_window) || n_window == 0) {
            return;
        }
        uint32_t pattern = 0;
        if (number(pattern_name, pattern) && pattern == 1) {
            refuse(pattern_name, "1", "0 or at least 2");
        }
        const int64_t key = gguf_find_key(gguf, (prefix + pattern_name).c_str());
        if (key < 0 || gguf_get_kv_type(gguf, key) != GGUF_TYPE_ARRAY || gguf_get_arr_type(gguf, key) != GGUF_TYPE_BOOL) {
            return;
        }
        const auto *windowed = static_cast<const int8_t *>(gguf_get_arr_data(gguf, key));
        const size_t n = gguf_get_arr_n(gguf, key);
        for (size_t layer = 0; layer < n && layer < n_layer; ++layer) {
            if (windowed[layer] != 0) {
                return;
            }
        }
        refuse(pattern_name, "all false", "a layer with a window");
    }
};

}  // namespace

// False, and why, for a file that would end the process. A file that does not parse is none of them:
// loading it says what is wrong.
bool shim_gguf_check(const char *path, bool vocab_only, struct el_gguf_fault *fault) {
    struct gguf_init_params params = {};
    params.no_alloc = true;
    const gguf_ptr gguf(gguf_init_from_file(path, params));
    if (!gguf) {
        return true;
    }
    try {
        const metadata_check check(gguf.get());
        check.tokens();
        if (!vocab_only) {
            check.layers();
            check.experts();
            check.rope();
            check.epsilons();
        }
    } catch (const std::runtime_error &error) {
        snprintf(fault->message, sizeof(fault->message), "%s", error.what());
        return false;
    }
    return true;
}
