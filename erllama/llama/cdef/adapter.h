/* LoRA adapters: loaded per model, applied per context. */

struct llama_adapter_lora *llama_adapter_lora_init(struct llama_model *model, const char *path_lora);
void llama_adapter_lora_free(struct llama_adapter_lora *adapter);
int32_t llama_set_adapters_lora(struct llama_context *ctx, struct llama_adapter_lora **adapters, size_t n_adapters, float *scales);
