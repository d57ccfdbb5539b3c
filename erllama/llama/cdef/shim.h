/* The project's own native part (erllama/llama/shim.h has the prose). */

/* What a generated wrapper writes when an exception arrives: kind 0 none, 1 out of memory, 2 other. */
struct el_error {
    int32_t kind;
    char message[508];
};

struct el_sampler;

struct el_abort {
    int32_t cancel;
    int32_t fired;
    int64_t deadline_ns;
};

struct ggml_threadpool;

struct el_load_progress {
    float fraction;
    int32_t cancel;
    int32_t cancelled;
};

struct el_log_line {
    int32_t level;
    uint64_t thread_id;
    uint64_t n_dropped;
    int32_t n_bytes;
    char text[4096];
};

struct el_memory_use {
    uint64_t model_bytes;
    uint64_t context_bytes;
    uint64_t compute_bytes;
};

struct el_batch_limits {
    int32_t n_batch;
    int32_t n_outputs_max;
    int32_t n_seq_max;
    int32_t n_vocab;
};

struct el_batch_fault {
    int32_t code;
    int32_t row;
    int64_t value;
    int64_t limit;
};

struct el_grammar_fault {
    int32_t line;
    char message[512];
};

/* Templates of one model, parsed once; and how to read what was generated from one prompt of theirs. */
struct el_chat;
struct el_chat_parser;

struct el_gguf_fault {
    char message[256];
};

/* A sampler as `sample_rows` takes it: what it is made of, the row to sample, and what came of it.
   `is_greedy` and `top_k` only for chains that ask for nothing else before them but biases, which ascend. */
struct el_row {
    struct el_sampler *sampler;
    struct llama_sampler *chain;
    const llama_logit_bias *bias;
    int32_t n_bias;
    int32_t top_k;
    bool is_greedy;
    int32_t output;
    int32_t token;
    struct el_error error;
};

/* Seconds: of the decode, of that as CPU time of the whole process, and of sampling. */
struct el_step_times {
    double compute_s;
    double cpu_s;
    double sample_s;
};

/* Test hook: throws bad_alloc for 1, runtime_error for 2, an int for 3. */
void shim_test_throw(int32_t kind);

/* The stamp this binding was compiled with. */
const char *shim_stamp(void);

void shim_log_install(int32_t min_level);
void shim_log_shutdown(void);
bool shim_log_is_open(void);
void shim_log_emit(int32_t level, const char *text);
void shim_log_emit_common(int32_t level, const char *text);
bool shim_log_wait(struct el_log_line *line, int32_t timeout_ms);
void shim_capture_begin(void);
int32_t shim_capture_end(char *buf, int32_t size);

bool shim_gguf_check(const char *path, bool vocab_only, struct el_gguf_fault *fault);
struct llama_model *shim_model_load(const char *path, struct llama_model_params params, struct el_load_progress *progress);
void shim_context_set_abort(struct llama_context *ctx, struct el_abort *state);
void shim_context_memory_use(const struct llama_context *ctx, struct el_memory_use *out);
/* Threads that wait for the next graph instead of being made for each; null where no CPU backend has any. */
struct ggml_threadpool *shim_threads_new(int32_t n_threads, int32_t poll);
void shim_threads_free(struct ggml_threadpool *threads);

void shim_abort_raise(struct el_abort *state);
void shim_abort_arm(struct el_abort *state, double seconds);
void shim_abort_clear(struct el_abort *state);

/* Check, arm (unless `seconds` is NaN) and decode; -1 with `fault->code` set if the batch was refused. */
int32_t shim_decode_checked(struct llama_context *ctx, const struct llama_batch *batch, const struct el_batch_limits *limits, llama_memory_t mem, struct el_batch_fault *fault, struct el_abort *abort, double seconds);
bool shim_batch_check(const struct llama_batch *batch, const struct el_batch_limits *limits, llama_memory_t mem, struct el_batch_fault *fault);

void shim_sample_rows(struct llama_context *ctx, int32_t n_vocab, struct el_row **rows, int32_t n_rows);
/* shim_decode_checked, and shim_sample_rows if that returned 0. */
int32_t shim_decode_rows(struct llama_context *ctx, const struct llama_batch *batch, const struct el_batch_limits *limits, llama_memory_t mem, struct el_batch_fault *fault, struct el_abort *abort, double seconds, struct el_row **rows, int32_t n_rows, struct el_step_times *times);

bool shim_grammar_check(const struct llama_vocab *vocab, const char *text, struct el_grammar_fault *fault);

/* Passes everything until the tokens of `start` were accepted, then ends the block with `forced` once `budget`
 * tokens were. `ends` holds the sequences that end a block, one behind the other, `end_lengths` their lengths. */
struct llama_sampler *shim_thinking_new(const struct llama_vocab *vocab, const llama_token *start, int32_t n_start, const llama_token *ends, const int32_t *end_lengths, int32_t n_ends, const llama_token *forced, int32_t n_forced, int32_t budget);

/* Owns its parts once it has returned. A lazy grammar waits for its trigger, and does not look into thinking. */
struct el_sampler *shim_sampling_new(int32_t n_vocab, struct llama_sampler *chain, struct llama_sampler *grammar, struct llama_sampler *thinking, bool lazy, bool grammar_first);
void shim_sampling_watch(struct el_sampler *sampler, const struct llama_vocab *vocab, const llama_token *triggers, int32_t n);
/* A token that the prompt already has of what is generated: for thinking, and for the grammar if it covers it. */
int32_t shim_sampling_prefill(struct el_sampler *sampler, int32_t token, bool with_grammar);
int32_t shim_sampling_next(struct el_sampler *sampler, struct llama_context *ctx, int32_t i);
int32_t shim_sampling_accept(struct el_sampler *sampler, int32_t token);
void shim_sampling_reset(struct el_sampler *sampler);
void shim_sampling_free(struct el_sampler *sampler);
int32_t shim_sampling_count(void);

/* JSON text in and out. What is returned is `n` bytes, freed with shim_text_free. Nesting deeper than 256 throws. */
void shim_text_free(char *text);
int32_t shim_text_count(void);
/* Control and user-defined tokens as [[id, text, is_control], ...]. */
char *shim_vocab_special(const struct llama_vocab *vocab, size_t *n);
char *shim_schema_to_grammar(const char *schema, size_t n_schema, size_t *n);

/* `text` overrides the model's template; one of them may be null. bos and eos are used without a model only. */
struct el_chat *shim_chat_new(const struct llama_model *model, const char *text, const char *bos, const char *eos);
void shim_chat_free(struct el_chat *chat);
char *shim_chat_describe(const struct el_chat *chat, size_t *n);
char *shim_chat_apply(const struct el_chat *chat, const char *inputs, size_t n_inputs, size_t *n);
struct el_chat_parser *shim_chat_parser_new(const char *applied, size_t n_applied);
void shim_chat_parser_free(struct el_chat_parser *parser);
char *shim_chat_parse(const struct el_chat_parser *parser, const char *text, size_t n_text, bool is_partial, size_t *n);
