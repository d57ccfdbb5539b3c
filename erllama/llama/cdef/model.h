/* Loaded weights: their facts and metadata. Loading itself goes through shim.h (progress). */

struct llama_model_params llama_model_default_params(void);
void llama_model_free(struct llama_model *model);
const struct llama_vocab *llama_model_get_vocab(const struct llama_model *model);

int32_t llama_model_n_ctx_train(const struct llama_model *model);
int32_t llama_model_n_embd(const struct llama_model *model);
int32_t llama_model_n_embd_out(const struct llama_model *model);
int32_t llama_model_n_layer(const struct llama_model *model);
int32_t llama_model_n_head(const struct llama_model *model);
int32_t llama_model_n_head_kv(const struct llama_model *model);
int32_t llama_model_n_swa(const struct llama_model *model);
uint32_t llama_model_n_cls_out(const struct llama_model *model);

int32_t llama_model_meta_count(const struct llama_model *model);
int32_t llama_model_meta_key_by_index(const struct llama_model *model, int32_t i, char *buf, size_t buf_size);
int32_t llama_model_meta_val_str_by_index(const struct llama_model *model, int32_t i, char *buf, size_t buf_size);
int32_t llama_model_desc(const struct llama_model *model, char *buf, size_t buf_size);
enum llama_ftype llama_model_ftype(const struct llama_model *model);
const char *llama_ftype_name(enum llama_ftype ftype);
uint64_t llama_model_size(const struct llama_model *model);
uint64_t llama_model_n_params(const struct llama_model *model);
const char *llama_model_chat_template(const struct llama_model *model, const char *name);

bool llama_model_has_encoder(const struct llama_model *model);
bool llama_model_has_decoder(const struct llama_model *model);
bool llama_model_is_recurrent(const struct llama_model *model);
bool llama_model_is_hybrid(const struct llama_model *model);
bool llama_model_is_diffusion(const struct llama_model *model);
