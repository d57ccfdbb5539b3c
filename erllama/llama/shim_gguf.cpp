// A look into a GGUF's metadata for what llama.cpp would abort on while loading.

#include "shim.h"

#include <memory>
#include <string_view>
#include <unordered_set>

#include "gguf.h"

namespace {

struct gguf_closer {
    void operator()(struct gguf_context *gguf) const {
        gguf_free(gguf);
    }
};

}  // namespace

// The index of the first token that the vocabulary has twice, -1 if there is none. A file that does
// not parse has none: loading it says what is wrong.
int64_t shim_gguf_duplicate_token(const char *path) {
    struct gguf_init_params params = {};
    params.no_alloc = true;
    const std::unique_ptr<struct gguf_context, gguf_closer> gguf(gguf_init_from_file(path, params));
    if (!gguf) {
        return -1;
    }
    const int64_t key = gguf_find_key(gguf.get(), "tokenizer.ggml.tokens");
    if (key < 0 || gguf_get_kv_type(gguf.get(), key) != GGUF_TYPE_ARRAY || gguf_get_arr_type(gguf.get(), key) != GGUF_TYPE_STRING) {
        return -1;
    }
    const size_t n = gguf_get_arr_n(gguf.get(), key);
    std::unordered_set<std::string_view> seen;
    seen.reserve(n);
    for (size_t i = 0; i < n; ++i) {
        // As llama.cpp reads it: up to the first NUL byte; empty ones get a name of their own.
        const std::string_view token = gguf_get_arr_str(gguf.get(), key, i);
        if (!token.empty() && !seen.insert(token).second) {
            return static_cast<int64_t>(i);
        }
    }
    return -1;
}
