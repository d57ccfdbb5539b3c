// Upstream's own reading of an answer, with nothing of ours between: a program for test_direct_parse.py.
//
// Reads one JSON case a line: template, bos, eos, messages, tools, text, partial. Writes what
// common_chat_parse gives for it, as upstream turns it into JSON, or {"error": …}.

#include <iostream>
#include <string>

#include "chat.h"
#include "log.h"

static common_json parse(const common_json &given) {
    const auto templates = common_chat_templates_init(nullptr, given.at("template").get<std::string>(), given.at("bos").get<std::string>(), given.at("eos").get<std::string>());
    common_chat_templates_inputs inputs;
    inputs.messages = common_chat_msgs_parse_oaicompat(given.at("messages"));
    inputs.tools = common_chat_tools_parse_oaicompat(given.at("tools"));
    inputs.reasoning_format = COMMON_REASONING_FORMAT_AUTO;
    inputs.parallel_tool_calls = true;
    const auto params = common_chat_templates_apply(templates.get(), inputs);
    common_chat_parser_params parser(params);
    parser.reasoning_format = COMMON_REASONING_FORMAT_AUTO;
    parser.parser.load(params.parser);
    return common_chat_parse(given.at("text").get<std::string>(), given.at("partial").get<bool>(), parser).to_json_oaicompat();
}

int main() {
    common_log_pause(common_log_main());
    for (std::string line; std::getline(std::cin, line);) {
        common_json result;
        try {
            result = parse(common_json::parse(line));
        } catch (const std::exception &error) {
            result = {{"error", error.what()}};
        }
        std::cout << result.dump_safe() << std::endl;
    }
}
