/* Process-wide: the ggml backends, their devices, and what this build can do. */

ggml_backend_reg_t ggml_backend_load(const char *path);
void ggml_backend_load_all_from_path(const char *dir_path);
size_t ggml_backend_dev_count(void);
ggml_backend_dev_t ggml_backend_dev_get(size_t index);
const char *ggml_backend_dev_name(ggml_backend_dev_t device);
const char *ggml_backend_dev_description(ggml_backend_dev_t device);
void ggml_backend_dev_memory(ggml_backend_dev_t device, size_t *free, size_t *total);
enum ggml_backend_dev_type ggml_backend_dev_type(ggml_backend_dev_t device);
size_t ggml_row_size(enum ggml_type type, int64_t ne);

void llama_backend_init(void);
const char *llama_version(void);
const char *llama_print_system_info(void);
size_t llama_max_devices(void);
