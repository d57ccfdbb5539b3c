"""The HTTP server: OpenAI, Anthropic and Ollama over one engine.

What lives here: settings, the pool of models, one generation path, and for each dialect modules that
translate its requests and replies and do nothing else. It uses the engine as any user does (`erllama`,
`models`); only `cli` may import it. Needs the extra `erllama[server]`.
"""
