// The compute threads of a context, kept from one graph to the next.

#include "shim.h"

#include "ggml-backend.h"
#include "ggml-cpu.h"

namespace {

// The CPU backend may be a library of its own, chosen at run time: its functions are asked for by name.
template <typename F> F *cpu_function(const char *name) {
    auto *device = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    if (device == nullptr) {
        return nullptr;
    }
    return reinterpret_cast<F *>(ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), name));
}

}  // namespace

struct ggml_threadpool *shim_threads_new(int32_t n_threads, int32_t poll) {
    auto *make = cpu_function<decltype(ggml_threadpool_new)>("ggml_threadpool_new");
    if (make == nullptr) {
        return nullptr;
    }
    ggml_threadpool_params params = ggml_threadpool_params_default(n_threads);
    params.poll = static_cast<uint32_t>(poll);
    return make(&params);
}

void shim_threads_free(struct ggml_threadpool *threads) {
    auto *free = cpu_function<decltype(ggml_threadpool_free)>("ggml_threadpool_free");
    if (free != nullptr) {
        free(threads);
    }
}
