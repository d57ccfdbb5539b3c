/* One context: its shape, decoding, and what a decode leaves behind. */

struct llama_context_params llama_context_default_params(void);
struct llama_context *llama_init_from_model(struct llama_model *model, struct llama_context_params params);
void llama_free(struct llama_context *ctx);

uint32_t llama_n_ctx(const struct llama_context *ctx);
uint32_t llama_n_ctx_seq(const struct llama_context *ctx);
uint32_t llama_n_batch(const struct llama_context *ctx);
uint32_t llama_n_ubatch(const struct llama_context *ctx);
uint32_t llama_n_seq_max(const struct llama_context *ctx);
const struct llama_model *llama_get_model(const struct llama_context *ctx);
enum llama_pooling_type llama_pooling_type(const struct llama_context *ctx);
bool llama_get_causal_attn(const struct llama_context *ctx);
void llama_attach_threadpool(struct llama_context *ctx, struct ggml_threadpool *threadpool, struct ggml_threadpool *threadpool_batch);
void llama_set_n_threads(struct llama_context *ctx, int32_t n_threads, int32_t n_threads_batch);
void llama_synchronize(struct llama_context *ctx);

int32_t llama_encode(struct llama_context *ctx, struct llama_batch batch);
int32_t llama_decode(struct llama_context *ctx, struct llama_batch batch);
float *llama_get_logits_ith(struct llama_context *ctx, int32_t i);
float *llama_get_embeddings_ith(struct llama_context *ctx, int32_t i);
float *llama_get_embeddings_seq(struct llama_context *ctx, llama_seq_id seq_id);
