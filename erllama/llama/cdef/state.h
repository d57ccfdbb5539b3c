/* Serialised state of one sequence. */

size_t llama_state_seq_get_size_ext(struct llama_context *ctx, llama_seq_id seq_id, llama_state_seq_flags flags);
size_t llama_state_seq_get_data_ext(struct llama_context *ctx, uint8_t *dst, size_t size, llama_seq_id seq_id, llama_state_seq_flags flags);
size_t llama_state_seq_set_data_ext(struct llama_context *ctx, const uint8_t *src, size_t size, llama_seq_id dest_seq_id, llama_state_seq_flags flags);
