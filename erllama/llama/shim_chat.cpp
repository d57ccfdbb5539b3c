// Chat templates, their parsers, and schema → grammar: llama-common's, with JSON text in and out.
//
// llama-common takes and gives nlohmann trees and C++ structs; the names in the JSON here are ours, except
// messages, tools and parsed messages, which have the shape OpenAI gave them.

#include "shim.h"

#include <algorithm>
#include <atomic>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "chat-peg-parser.h"
#include "chat.h"
#include "common.h"
#include "json-schema-to-grammar.h"

namespace {

// Templates, schemas, parsers and JSON trees are walked by recursion: far below what a thread's stack holds.
constexpr int MAX_NESTING = 256;

std::atomic<int32_t> n_texts{0};

char *give(const std::string &text, size_t *n) {
    char *copy = static_cast<char *>(malloc(text.size() + 1));
    if (copy == nullptr) {
        throw std::bad_alloc();
    }
    memcpy(copy, text.data(), text.size());
    copy[text.size()] = '\0';
    *n = text.size();
    n_texts.fetch_add(1);
    return copy;
}

// Counts brackets wherever they stand, in strings too: deep is what could be deep.
void check_nesting(const std::string &text, const char *what, bool with_parentheses) {
    int depth = 0;
    for (const char c : text) {
        if (c == '[' || c == '{' || (with_parentheses && c == '(')) {
            ++depth;
        } else if ((c == ']' || c == '}' || (with_parentheses && c == ')')) && depth > 0) {
            --depth;
        }
        if (depth > MAX_NESTING) {
            throw std::runtime_error(std::string(what) + " is nested deeper than " + std::to_string(MAX_NESTING));
        }
    }
}

// A tag's code without its strings: the interpreter recurses on operators, filters and alternatives.
constexpr size_t MAX_TAG_CODE = 4096;
constexpr size_t MAX_TEMPLATE = 1 << 20;
constexpr int MAX_BLOCKS = 128;
constexpr int MAX_ALTERNATIVES = 1024;

struct template_tag {
    size_t end;         // behind the tag
    size_t n_code;      // characters outside of strings
    std::string first;  // its first word
};

template_tag read_tag(const std::string &source, size_t begin) {
    const std::string closing = source[begin + 1] == '%' ? "%}" : "}}";
    template_tag tag{source.size(), 0, ""};
    char quote = 0;
    for (size_t i = begin + 2; i < source.size(); ++i) {
        const char c = source[i];
        if (quote != 0) {
            i += c == '\\' ? 1 : 0;
            quote = c == quote ? 0 : quote;
        } else if (source.compare(i, 2, closing) == 0) {
            tag.end = i + 2;
            break;
        } else if (c == '"' || c == '\'') {
            quote = c;
        } else {
            ++tag.n_code;
        }
    }
    size_t at = source.find_first_not_of("-+ \t\r\n", begin + 2);
    for (; at < tag.end && std::isalpha(static_cast<unsigned char>(source[at])) != 0; ++at) {
        tag.first += source[at];
    }
    return tag;
}

// What a file's author could write to make the interpreter run out of stack, but for macros that call themselves.
void check_template(const std::string &source) {
    if (source.size() > MAX_TEMPLATE) {
        throw std::runtime_error("the template has more than " + std::to_string(MAX_TEMPLATE) + " bytes");
    }
    check_nesting(source, "the template", true);
    int depth = 0;
    int n_alternatives = 0;
    for (size_t at = source.find('{'); at != std::string::npos && at + 1 < source.size(); at = source.find('{', at)) {
        if (source[at + 1] == '#') {
            at = std::min(source.find("#}", at), source.size());
            continue;
        }
        if (source[at + 1] != '%' && source[at + 1] != '{') {
            ++at;
            continue;
        }
        const template_tag tag = read_tag(source, at);
        if (source[at + 1] == '%') {
            const bool opens = tag.first == "if" || tag.first == "for" || tag.first == "macro" || tag.first == "call" || tag.first == "filter";
            const bool closes = tag.first == "endif" || tag.first == "endfor" || tag.first == "endmacro" || tag.first == "endcall" || tag.first == "endfilter";
            depth = std::max(0, depth + (opens ? 1 : 0) - (closes ? 1 : 0));
            n_alternatives += tag.first == "elif" ? 1 : 0;
        }
        if (tag.n_code > MAX_TAG_CODE || depth > MAX_BLOCKS || n_alternatives > MAX_ALTERNATIVES) {
            throw std::runtime_error("the template has too long an expression, or blocks nested too deep");
        }
        at = tag.end;
    }
}

// As above for JSON, whose strings may hold any number of brackets.
void check_json_nesting(const std::string &text, const char *what) {
    int depth = 0;
    bool in_string = false;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (in_string) {
            i += c == '\\' ? 1 : 0;
            in_string = c != '"';
        } else if (c == '"') {
            in_string = true;
        } else if (c == '[' || c == '{') {
            if (++depth > MAX_NESTING) {
                throw std::runtime_error(std::string(what) + " is nested deeper than " + std::to_string(MAX_NESTING));
            }
        } else if (c == ']' || c == '}') {
            --depth;
        }
    }
}

common_json parse_json(const char *text, size_t n, const char *what) {
    const std::string copy(text, n);
    check_json_nesting(copy, what);
    return common_json::parse(copy);
}

common_chat_continuation continuation(const std::string &name) {
    if (name == "content") {
        return COMMON_CHAT_CONTINUATION_CONTENT;
    }
    if (name == "reasoning") {
        return COMMON_CHAT_CONTINUATION_REASONING;
    }
    return name == "auto" ? COMMON_CHAT_CONTINUATION_AUTO : COMMON_CHAT_CONTINUATION_NONE;
}

common_chat_templates_inputs read_inputs(const common_json &given) {
    common_chat_templates_inputs inputs;
    inputs.messages = common_chat_msgs_parse_oaicompat(given.at("messages"));
    if (given.contains("tools")) {
        inputs.tools = common_chat_tools_parse_oaicompat(given.at("tools"));
    }
    if (given.contains("json_schema")) {
        inputs.json_schema = given.at("json_schema").dump();
    }
    inputs.tool_choice = common_chat_tool_choice_parse_oaicompat(given.value("tool_choice", "auto"));
    inputs.parallel_tool_calls = given.value("parallel_tool_calls", true);
    inputs.add_generation_prompt = given.value("add_generation_prompt", true);
    inputs.continue_final_message = continuation(given.value("continue_final_message", "none"));
    inputs.reasoning_format = common_reasoning_format_from_name(given.value("reasoning_format", "auto"));
    inputs.enable_thinking = given.value("enable_thinking", true);
    if (given.contains("now_s")) {
        inputs.now = std::chrono::system_clock::time_point(std::chrono::seconds(given.at("now_s").get<int64_t>()));
    }
    if (given.contains("template_kwargs")) {
        for (const auto &entry : given.at("template_kwargs").items()) {
            inputs.chat_template_kwargs[entry.key()] = entry.value().dump();
        }
    }
    return inputs;
}

common_json triggers_json(const common_chat_params &params) {
    common_json triggers = common_json::array();
    for (const auto &trigger : params.grammar_triggers) {
        triggers.push_back({{"type", static_cast<int>(trigger.type)}, {"value", trigger.value}});
    }
    return triggers;
}

common_json applied_json(const common_chat_params &params, const common_chat_templates_inputs &inputs) {
    return {
        {"prompt", params.prompt},
        {"grammar", params.grammar},
        {"grammar_lazy", params.grammar_lazy},
        {"triggers", triggers_json(params)},
        {"generation_prompt", params.generation_prompt},
        {"supports_thinking", params.supports_thinking},
        {"thinking_start", params.thinking_start_tag},
        {"thinking_ends", params.thinking_end_tags},
        {"preserved", params.preserved_tokens},
        {"stops", params.additional_stops},
        {"delimiters", params.message_delimiters.to_json()},
        {"parser",
         {
             {"format", static_cast<int>(params.format)},
             {"format_name", common_chat_format_name(params.format)},
             {"generation_prompt", params.generation_prompt},
             {"reasoning_format", common_reasoning_format_name(inputs.reasoning_format)},
             {"arena", params.parser},
         }},
    };
}

// What stands for the arguments of each call, in order. The mapper makes {} of what is no object.
std::vector<std::string> written_arguments(const std::string &input, const common_chat_parser_params &params) {
    const std::string all = params.generation_prompt + input;
    common_peg_parse_context context(all, COMMON_PEG_PARSE_FLAG_LENIENT);
    const auto result = params.parser.parse(context);
    std::vector<std::string> found;
    std::string before;  // some formats write the name behind the arguments
    bool is_named = false;
    context.ast.visit(result, [&](const common_peg_ast_node &node) {
        if (node.tag == common_chat_peg_builder::TOOL_OPEN) {
            before.clear();
            is_named = false;
        } else if (node.tag == common_chat_peg_builder::TOOL_NAME) {
            found.push_back(before);
            is_named = true;
        } else if (node.tag == common_chat_peg_builder::TOOL_ARGS) {
            (is_named ? found.back() : before) = std::string(node.text);
        }
    });
    return found;
}

// An answer that is not in its template's form is the caller's to report, and its text is nobody's to log.
struct quiet_log {
    quiet_log() {
        log_quietly(true);
    }
    ~quiet_log() {
        log_quietly(false);
    }
    quiet_log(const quiet_log &) = delete;
    quiet_log &operator=(const quiet_log &) = delete;
};

}  // namespace

struct el_chat {
    common_chat_templates_ptr templates;
};

struct el_chat_parser {
    common_chat_parser_params params;
};

void shim_text_free(char *text) {
    if (text != nullptr) {
        n_texts.fetch_sub(1);
        free(text);
    }
}

int32_t shim_text_count(void) {
    return n_texts.load();
}

char *shim_vocab_special(const struct llama_vocab *vocab, size_t *n) {
    constexpr int SPECIAL = LLAMA_TOKEN_ATTR_CONTROL | LLAMA_TOKEN_ATTR_USER_DEFINED | LLAMA_TOKEN_ATTR_UNKNOWN;
    common_json found = common_json::array();
    for (llama_token id = 0; id < llama_vocab_n_tokens(vocab); ++id) {
        const int attr = llama_vocab_get_attr(vocab, id);
        if ((attr & SPECIAL) != 0) {
            const bool is_control = (attr & LLAMA_TOKEN_ATTR_USER_DEFINED) == 0;
            found.push_back(common_json::array({id, common_token_to_piece(vocab, id, true), is_control}));
        }
    }
    return give(found.dump_safe(), n);
}

char *shim_schema_to_grammar(const char *schema, size_t n_schema, size_t *n) {
    return give(json_schema_to_grammar(parse_json(schema, n_schema, "the schema"), true), n);
}

struct el_chat *shim_chat_new(const struct llama_model *model, const char *text, const char *bos, const char *eos) {
    const std::string source = text != nullptr ? text : "";
    if (model == nullptr && source.empty()) {
        throw std::invalid_argument("neither a model nor a template was given");  // llama-common asserts
    }
    check_template(source);
    for (const char *name : {static_cast<const char *>(nullptr), "tool_use"}) {
        const char *own = model != nullptr && source.empty() ? llama_model_chat_template(model, name) : nullptr;
        check_template(own != nullptr ? own : "");
    }
    auto chat = std::make_unique<el_chat>();
    chat->templates = common_chat_templates_init(model, source, bos != nullptr ? bos : "", eos != nullptr ? eos : "");
    return chat.release();
}

void shim_chat_free(struct el_chat *chat) {
    delete chat;
}

char *shim_chat_describe(const struct el_chat *chat, size_t *n) {
    common_json caps = common_json::object();
    for (const auto &cap : common_chat_templates_get_caps(chat->templates.get())) {
        caps[cap.first] = cap.second;
    }
    const common_json described = {
        {"source", common_chat_templates_source(chat->templates.get())},
        {"tool_use_source", common_chat_templates_source(chat->templates.get(), "tool_use")},
        {"explicit", common_chat_templates_was_explicit(chat->templates.get())},
        {"caps", caps},
    };
    return give(described.dump_safe(), n);
}

char *shim_chat_apply(const struct el_chat *chat, const char *inputs, size_t n_inputs, size_t *n) {
    const auto given = read_inputs(parse_json(inputs, n_inputs, "the conversation"));
    const auto params = common_chat_templates_apply(chat->templates.get(), given);
    return give(applied_json(params, given).dump_safe(), n);
}

struct el_chat_parser *shim_chat_parser_new(const char *applied, size_t n_applied) {
    const auto given = common_json::parse(std::string(applied, n_applied));
    auto parser = std::make_unique<el_chat_parser>();
    const int format = given.at("format").get<int>();
    if (format < 0 || format >= COMMON_CHAT_FORMAT_COUNT) {
        throw std::invalid_argument("unknown chat format " + std::to_string(format));
    }
    auto &params = parser->params;
    params.format = static_cast<common_chat_format>(format);
    params.generation_prompt = given.value("generation_prompt", "");
    params.reasoning_format = common_reasoning_format_from_name(given.value("reasoning_format", "auto"));
    const std::string arena = given.value("arena", "");
    if (!arena.empty()) {
        params.parser.load(arena);
    }
    return parser.release();
}

void shim_chat_parser_free(struct el_chat_parser *parser) {
    delete parser;
}

char *shim_chat_parse(const struct el_chat_parser *parser, const char *text, size_t n_text, bool is_partial, size_t *n) {
    const std::string input(text, n_text);
    check_nesting(input, "the answer", false);
    const quiet_log quiet;
    const auto &params = parser->params;
    const auto message = common_chat_parse(input, is_partial, params);
    const auto is_empty = [](const common_chat_tool_call &call) { return call.arguments == "{}"; };
    std::vector<std::string> written;
    if (!params.parser.empty() && std::any_of(message.tool_calls.begin(), message.tool_calls.end(), is_empty)) {
        written = written_arguments(input, params);
    }
    common_json calls = common_json::array();
    for (const auto &call : message.tool_calls) {
        const size_t i = calls.size();
        const bool is_known = written.size() == message.tool_calls.size() && is_empty(call);
        calls.push_back({{"id", call.id}, {"name", call.name}, {"arguments", call.arguments}, {"written", is_known ? written[i] : ""}});
    }
    const common_json parsed = {
        {"role", message.role},
        {"content", message.content},
        {"reasoning_content", message.reasoning_content},
        {"tool_calls", calls},
    };
    return give(parsed.dump_safe(), n);
}
