// Grammar text: what is wrong with it, and where.
//
// llama_sampler_init_grammar prints parse errors to stderr instead of reporting them, so the parser
// of libllama is driven from here, rule by rule.

#include "shim.h"

#include <cstdio>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#include "../src/llama-grammar.h"

namespace {

// parse_sequence recurses once per parenthesis: far below what a thread's stack holds.
constexpr int MAX_NESTING = 128;
constexpr uint64_t MAX_REPEATED = 2000;  // llama-grammar.cpp: MAX_REPETITION_THRESHOLD
constexpr uint64_t MAX_ELEMENTS = 1 << 20;
// llama-grammar.cpp looks for left recursion by recursing from rule to rule, some 200 bytes of stack
// each: a thread's smallest stack holds thousands.
constexpr uint32_t MAX_CHAIN = 2000;
constexpr uint64_t MAX_VISITS = 1 << 20;
constexpr size_t MAX_RULES = 100000;

const char *skip_blank(const char *p) {
    for (; *p != '\0'; ++p) {
        if (*p == '#') {
            while (p[1] != '\0' && *p != '\n') {
                ++p;
            }
        } else if (*p != ' ' && *p != '\t' && *p != '\r' && *p != '\n') {
            break;
        }
    }
    return p;
}

// What the parser does not bound itself: it recurses per parenthesis, copies an item once per
// repetition, and for {5,2} counts down from 2^64 - 3.
class shape_check {
   public:
    explicit shape_check(const char *text) : p(text) {}

    void run() {
        for (; *p != '\0'; ++p) {
            if (*p == '"' || *p == '[') {
                item_size = quoted(*p == '"' ? '"' : ']');
            } else if (*p == '#') {
                while (p[1] != '\0' && p[1] != '\n') {
                    ++p;
                }
            } else if (*p == '(') {
                if (++depth > MAX_NESTING) {
                    throw std::runtime_error("parentheses nested deeper than " + std::to_string(MAX_NESTING));
                }
            } else if (*p == ')') {
                --depth;
                item_size = 1;  // a reference to the rule made of the group
            } else if (*p == '{') {
                repetition();
            } else if (*p != ' ' && *p != '\t' && *p != '\r' && *p != '\n') {
                item_size = 1;  // a rule's name, a token, any character
            }
            if (*p == '\0') {
                return;  // unterminated: the parser says so
            }
        }
    }

    const char *place() const {
        return p;
    }

   private:
    const char *p;
    int depth = 0;
    uint64_t item_size = 1;   // grammar elements of the last item, at most
    uint64_t n_elements = 0;  // made by repetitions so far

    uint64_t quoted(char close) {
        const char *start = p;
        for (++p; *p != '\0' && *p != close; ++p) {
            if (*p == '\\' && p[1] != '\0') {
                ++p;
            }
        }
        return static_cast<uint64_t>(p - start) + 1;
    }

    // A number after blanks; one that is absent or far too large counts as MAX_REPEATED + 1.
    uint64_t number() {
        while (p[1] == ' ' || p[1] == '\t') {
            ++p;
        }
        if (p[1] < '0' || p[1] > '9') {
            return MAX_REPEATED + 1;
        }
        uint64_t value = 0;
        for (; p[1] >= '0' && p[1] <= '9'; ++p) {
            value = value > MAX_REPEATED ? value : value * 10 + static_cast<uint64_t>(p[1] - '0');
        }
        while (p[1] == ' ' || p[1] == '\t') {
            ++p;
        }
        return value;
    }

    void repetition() {
        const uint64_t low = number();
        const bool has_high = p[1] == ',';
        p += has_high ? 1 : 0;
        const uint64_t high = has_high ? number() : low;
        if (low <= MAX_REPEATED && high < low) {
            throw std::runtime_error("a repetition of at least " + std::to_string(low) + " and at most " + std::to_string(high));
        }
        const uint64_t times = low > high || high > MAX_REPEATED ? low : high;
        item_size *= times < 1 ? 1 : (times > MAX_REPEATED ? MAX_REPEATED : times);
        n_elements += item_size;
        if (n_elements > MAX_ELEMENTS || item_size > MAX_ELEMENTS) {
            throw std::runtime_error("repetitions make more than " + std::to_string(MAX_ELEMENTS) + " elements");
        }
    }
};

struct rule_fault : std::runtime_error {
    std::string name;
    rule_fault(const std::string &message, const std::string &name_) : std::runtime_error(message), name(name_) {}
};

void check_references(const llama_grammar_parser &parser) {
    for (const auto &symbol : parser.symbol_ids) {
        if (symbol.second >= parser.rules.size() || parser.rules[symbol.second].empty()) {
            throw rule_fault("Undefined rule identifier '" + symbol.first + "'", symbol.first);
        }
    }
    if (parser.symbol_ids.find("root") == parser.symbol_ids.end()) {
        throw std::runtime_error("no rule named 'root'");
    }
}

bool is_end(const llama_grammar_element &element) {
    return element.type == LLAMA_GRETYPE_END || element.type == LLAMA_GRETYPE_ALT;
}

// How deep llama.cpp's look for left recursion goes, and how often it visits a rule: it recurses into
// every rule that an alternative can begin with, and forgets what it has seen. Rules in a circle are
// no matter here: llama.cpp stops at the first and refuses the grammar.
class chain_check {
   public:
    explicit chain_check(const llama_grammar_parser &parser_)
        : parser(parser_), rules(parser_.rules), may_be_empty(rules.size()), costs(rules.size()) {}

    void run() {
        if (rules.size() > MAX_RULES) {
            throw std::runtime_error("more than " + std::to_string(MAX_RULES) + " rules");
        }
        for (uint32_t rule = 0; rule < rules.size(); ++rule) {
            may_be_empty[rule] = has_empty_alternative(rules[rule]);
        }
        for (uint32_t rule = 0; rule < rules.size(); ++rule) {
            if (costs[rule].n_visits == 0) {
                measure(rule);
            }
        }
    }

   private:
    struct cost {
        uint32_t depth = 0;
        uint64_t n_visits = 0;  // 0: not looked at yet
    };
    struct visit {
        uint32_t rule;
        size_t next;   // the element to look at
        bool at_start;  // whether an alternative can begin with that element
    };

    const llama_grammar_parser &parser;
    const llama_grammar_rules &rules;
    std::vector<bool> may_be_empty;
    std::vector<cost> costs;

    static bool has_empty_alternative(const llama_grammar_rule &rule) {
        bool at_start = true;
        for (const auto &element : rule) {
            if (is_end(element) && at_start) {
                return true;
            }
            at_start = is_end(element);
        }
        return false;
    }

    // The next rule that an alternative of this one can begin with; -1 at the end.
    int64_t advance(visit &at) const {
        const auto &elements = rules[at.rule];
        while (at.next < elements.size()) {
            const auto &element = elements[at.next++];
            const bool refers = element.type == LLAMA_GRETYPE_RULE_REF && at.at_start;
            at.at_start = is_end(element) || (refers && may_be_empty[element.value]);
            if (refers) {
                return element.value;
            }
        }
        return -1;
    }

    // Depth first with a stack of its own, and given up as soon as that is deeper than allowed.
    void measure(uint32_t first) {
        std::vector<visit> path{{first, 0, true}};
        costs[first] = {1, 1};
        while (!path.empty()) {
            const int64_t found = advance(path.back());
            if (found < 0) {
                const uint32_t done = path.back().rule;
                path.pop_back();
                if (!path.empty()) {
                    add(path.back().rule, costs[done]);
                }
                continue;
            }
            const auto target = static_cast<uint32_t>(found);
            if (costs[target].n_visits != 0) {
                add(path.back().rule, costs[target]);
                continue;
            }
            costs[target] = {1, 1};
            path.push_back({target, 0, true});
            if (path.size() > MAX_CHAIN) {
                refuse(first);
            }
        }
    }

    void add(uint32_t rule, const cost &child) {
        cost &own = costs[rule];
        own.depth = child.depth + 1 > own.depth ? child.depth + 1 : own.depth;
        own.n_visits += child.n_visits;
        if (own.depth > MAX_CHAIN || own.n_visits > MAX_VISITS) {
            refuse(rule);
        }
    }

    [[noreturn]] void refuse(uint32_t rule) const {
        std::string name;
        for (const auto &symbol : parser.symbol_ids) {
            name = symbol.second == rule ? symbol.first : name;
        }
        throw rule_fault("rule '" + name + "' begins with too many others in a row: at most " +
                             std::to_string(MAX_CHAIN) + " deep and " + std::to_string(MAX_VISITS) + " in all",
                         name);
    }
};

int32_t line_of(const char *text, const char *place) {
    int32_t line = 1;
    for (const char *p = text; p < place; ++p) {
        line += *p == '\n' ? 1 : 0;
    }
    return line;
}

// The parser's messages end in "at " and the rest of the text: that is where it stopped.
const char *place_of(const char *text, const char *rule, const std::string &message) {
    const size_t at = message.find(" at ");
    if (at == std::string::npos) {
        return rule;
    }
    const size_t n_rest = message.size() - (at + 4);
    const size_t n_text = strlen(text);
    if (n_rest > n_text || message.compare(at + 4, n_rest, text + (n_text - n_rest)) != 0) {
        return rule;
    }
    return text + (n_text - n_rest);
}

bool is_name(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-';
}

const char *first_use(const char *text, const std::string &name) {
    for (const char *p = text; (p = strstr(p, name.c_str())) != nullptr; ++p) {
        if ((p == text || !is_name(p[-1])) && !is_name(p[name.size()])) {
            return p;
        }
    }
    return text;  // a rule the parser made up
}

}  // namespace

bool shim_grammar_check(const struct llama_vocab *vocab, const char *text, struct el_grammar_fault *fault) {
    llama_grammar_parser parser(vocab);
    shape_check shape(text);
    const char *rule = text;
    try {
        shape.run();
        for (rule = skip_blank(text); *rule != '\0';) {
            rule = parser.parse_rule(rule);
        }
        check_references(parser);
        chain_check(parser).run();
    } catch (const rule_fault &error) {
        fault->line = line_of(text, first_use(text, error.name));
        snprintf(fault->message, sizeof(fault->message), "%s", error.what());
        return false;
    } catch (const std::exception &error) {
        const std::string message = error.what();
        const bool in_shape = *shape.place() != '\0';
        fault->line = line_of(text, in_shape ? shape.place() : place_of(text, rule, message));
        snprintf(fault->message, sizeof(fault->message), "%s", message.c_str());
        return false;
    }
    return true;
}
