/* Text and tokens. */

enum llama_vocab_type llama_vocab_type(const struct llama_vocab *vocab);
int32_t llama_vocab_n_tokens(const struct llama_vocab *vocab);
bool llama_vocab_is_eog(const struct llama_vocab *vocab, llama_token token);
bool llama_vocab_is_control(const struct llama_vocab *vocab, llama_token token);
llama_token llama_vocab_bos(const struct llama_vocab *vocab);
llama_token llama_vocab_eos(const struct llama_vocab *vocab);
llama_token llama_vocab_eot(const struct llama_vocab *vocab);
llama_token llama_vocab_sep(const struct llama_vocab *vocab);
bool llama_vocab_get_add_bos(const struct llama_vocab *vocab);
bool llama_vocab_get_add_eos(const struct llama_vocab *vocab);
const llama_token *llama_vocab_get_suppress_tokens(const struct llama_vocab *vocab, int32_t *n_suppress_tokens);

int32_t llama_tokenize(const struct llama_vocab *vocab, const char *text, int32_t text_len, llama_token *tokens, int32_t n_tokens_max, bool add_special, bool parse_special);
int32_t llama_token_to_piece(const struct llama_vocab *vocab, llama_token token, char *buf, int32_t length, int32_t lstrip, bool special);
int32_t llama_detokenize(const struct llama_vocab *vocab, const llama_token *tokens, int32_t n_tokens, char *text, int32_t text_len_max, bool remove_special, bool unparse_special);
