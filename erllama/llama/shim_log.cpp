// Every log line of llama.cpp, ggml and llama-common: queued for Python's logging, never on stderr.
//
// Rule 1: no line calls Python. A Python thread takes lines out with shim_log_wait.
// Rule 2: the queue is bounded; when it is full the oldest line goes and is counted.
// Rule 3: the state is never destroyed, so a line logged while the process exits finds it alive.

#include "shim.h"

#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <pthread.h>
#endif

#include "log.h"

namespace {

constexpr size_t MAX_QUEUED_LINES = 4096;
constexpr size_t MAX_CAPTURED_BYTES = 64 * 1024;

struct queued_line {
    int32_t level;
    uint64_t thread_id;
    std::string text;
};

struct log_state {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<queued_line> lines;
    uint64_t n_dropped = 0;
    int32_t min_level = GGML_LOG_LEVEL_INFO;
    bool open = false;
};

log_state &state() {
    static auto *instance = new log_state;
    return *instance;
}

// What one thread is in the middle of: an unfinished line, and the lines of its current call.
struct thread_log {
    std::string partial;
    int32_t partial_level = GGML_LOG_LEVEL_INFO;
    bool capturing = false;
    bool quiet = false;  // whatever is said is for developers
    std::string captured;
};

// Rule 3 holds for these too: both are plain data, so they outlive the destructors of their thread.
thread_local thread_log *mine = nullptr;
thread_local bool thread_ended = false;

struct thread_end {
    ~thread_end() {
        delete mine;
        mine = nullptr;
        thread_ended = true;
    }
};

// Null while the thread ends: its lines are then passed on whole, and not captured.
thread_log *here() {
    if (mine == nullptr && !thread_ended) {
        static thread_local thread_end at_end;
        static_cast<void>(at_end);
        mine = new thread_log;
    }
    return mine;
}

uint64_t thread_id() {
#if defined(__linux__)
    return static_cast<uint64_t>(syscall(SYS_gettid));
#else
    uint64_t id = 0;
    pthread_threadid_np(nullptr, &id);
    return id;
#endif
}

void finish_line(int32_t level, std::string text) {
    if (text.find_first_not_of(" .\t\r") == std::string::npos) {
        return;  // progress dots and blank lines
    }
    thread_log *thread = here();
    if (thread != nullptr && thread->capturing) {
        auto &captured = thread->captured;
        captured += static_cast<char>('0' + level);
        captured += text;
        captured += '\n';
        if (captured.size() > MAX_CAPTURED_BYTES) {
            captured.erase(0, captured.find('\n', captured.size() - MAX_CAPTURED_BYTES / 2) + 1);
        }
    }
    auto &log = state();
    const std::lock_guard<std::mutex> lock(log.mutex);
    if (!log.open || level < log.min_level) {
        return;
    }
    if (log.lines.size() >= MAX_QUEUED_LINES) {
        log.lines.pop_front();
        ++log.n_dropped;
    }
    log.lines.push_back({level, thread_id(), std::move(text)});
    log.changed.notify_one();
}

void add_text(thread_log &thread, int32_t level, const char *text) {
    if (level == GGML_LOG_LEVEL_CONT) {
        level = thread.partial_level;
    } else if (!thread.partial.empty()) {
        finish_line(thread.partial_level, std::move(thread.partial));
        thread.partial.clear();
    }
    thread.partial_level = level == GGML_LOG_LEVEL_NONE ? GGML_LOG_LEVEL_INFO : level;
    thread.partial += text;
    for (size_t end; (end = thread.partial.find('\n')) != std::string::npos;) {
        std::string line = thread.partial.substr(0, end);
        thread.partial.erase(0, end + 1);
        finish_line(thread.partial_level, std::move(line));
    }
}

void add_text_while_ending(int32_t level, std::string text) {
    const bool has_level = level != GGML_LOG_LEVEL_CONT && level != GGML_LOG_LEVEL_NONE;
    text.erase(text.find_last_not_of('\n') + 1);
    finish_line(has_level ? level : static_cast<int32_t>(GGML_LOG_LEVEL_INFO), std::move(text));
}

// ggml calls this from anywhere, C code included, so nothing may leave it.
void log_callback(enum ggml_log_level level, const char *text, void *) noexcept {
    try {
        if (thread_log *thread = here()) {
            add_text(*thread, thread->quiet ? GGML_LOG_LEVEL_DEBUG : level, text);
        } else {
            add_text_while_ending(level, text);
        }
    } catch (...) {  // out of memory: this line is lost
        if (mine != nullptr) {
            mine->partial.clear();
        }
    }
}

}  // namespace

// llama-common has a logger of its own, without a callback. On ELF the binding comes before
// libllama-common in the lookup order, so this definition takes the place of its sink. Elsewhere
// shim_log_install has paused that logger, which makes it discard lines.
__attribute__((visibility("default"))) void common_log_add(struct common_log *, enum ggml_log_level level, const char *fmt, ...) {
    va_list args;
    va_start(args, fmt);
    va_list again;
    va_copy(again, args);
    const int n = vsnprintf(nullptr, 0, fmt, args);
    va_end(args);
    std::vector<char> text(n < 0 ? 1 : static_cast<size_t>(n) + 1);
    vsnprintf(text.data(), text.size(), fmt, again);
    va_end(again);
    log_callback(level, text.data(), nullptr);
}

void log_quietly(bool quiet) {
    if (thread_log *thread = here()) {
        thread->quiet = quiet;
    }
}

void shim_log_install(int32_t min_level) {
    auto &log = state();
    {
        const std::lock_guard<std::mutex> lock(log.mutex);
        log.open = true;
        log.min_level = min_level;
    }
    llama_log_set(log_callback, nullptr);  // sets ggml's as well
    common_log_pause(common_log_main());
}

// The callback stays: with none, llama.cpp prints to stderr. Closed, it only drops lines.
void shim_log_shutdown(void) {
    auto &log = state();
    const std::lock_guard<std::mutex> lock(log.mutex);
    log.open = false;
    log.changed.notify_all();
}

bool shim_log_is_open(void) {
    auto &log = state();
    const std::lock_guard<std::mutex> lock(log.mutex);
    return log.open;
}

void shim_log_emit(int32_t level, const char *text) {
    log_callback(static_cast<enum ggml_log_level>(level), text, nullptr);
}

void shim_log_emit_common(int32_t level, const char *text) {
    common_log_default_callback(static_cast<enum ggml_log_level>(level), text, nullptr);
}

bool shim_log_wait(struct el_log_line *out, int32_t timeout_ms) {
    auto &log = state();
    std::unique_lock<std::mutex> lock(log.mutex);
    log.changed.wait_for(lock, std::chrono::milliseconds(timeout_ms), [&] { return !log.lines.empty() || !log.open; });
    if (log.lines.empty()) {
        return false;
    }
    const queued_line &line = log.lines.front();
    const size_t n = line.text.size() < sizeof(out->text) ? line.text.size() : sizeof(out->text);
    out->level = line.level;
    out->thread_id = line.thread_id;
    out->n_dropped = log.n_dropped;
    out->n_bytes = static_cast<int32_t>(n);
    memcpy(out->text, line.text.data(), n);
    log.lines.pop_front();
    log.n_dropped = 0;
    return true;
}

void shim_capture_begin(void) {
    if (thread_log *thread = here()) {
        thread->captured.clear();
        thread->capturing = true;
    }
}

// Copies the tail that fits and returns its length; each line is a digit (its level) and the text.
int32_t shim_capture_end(char *buf, int32_t size) {
    thread_log *thread = here();
    if (thread == nullptr) {
        return 0;
    }
    thread->capturing = false;
    const size_t room = static_cast<size_t>(size < 0 ? 0 : size);
    const auto &captured = thread->captured;
    const size_t n = captured.size() < room ? captured.size() : room;
    memcpy(buf, captured.data() + (captured.size() - n), n);
    thread->captured.clear();
    return static_cast<int32_t>(n);
}
