"""The OpenAPI document: valid, complete, and what the server does."""

from __future__ import annotations

import jsonschema

from erllama.server.app import make_routes
from server.scenes import chat_body, serving


async def test_the_document_has_every_route():
    """Each path and method that is served is described, and nothing else; bodies are schemas."""
    async with serving() as scene:
        document = (await scene.client.get("/openapi.json")).json()
        assert (await scene.client.get("/docs")).status_code == 200
        routes = {
            (route.path, method.lower())
            for route in _routes(make_routes(scene.service))
            for method in route.methods - {"HEAD"}
            if route.include_in_schema
        }
    assert document["openapi"] == "3.1.0"
    described = {(path, method) for path, ops in document["paths"].items() for method in ops}
    assert {(path.replace(":path", ""), method) for path, method in routes} == described
    assert len(described) >= 20
    for schema in document["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)
    assert "422" not in document["paths"]["/v1/messages"]["post"]["responses"]


def _routes(app):
    """Routes of the application and of the routers it includes."""
    found = []
    todo = list(app.routes)
    while todo:
        route = todo.pop()
        if hasattr(route, "methods"):
            found.append(route)
        else:
            todo += getattr(route, "routes", None) or getattr(route.original_router, "routes", [])
    return found


async def test_errors_are_as_the_document_says():
    """A refusal of each surface satisfies the schema that stands there."""
    async with serving() as scene:
        document = (await scene.client.get("/openapi.json")).json()
        for path in ("/v1/chat/completions", "/v1/messages", "/api/chat", "/v1/responses", "/tokenize"):
            reply = await scene.client.post(path, json={"model": 1})
            assert reply.status_code == 400
            described = document["paths"][path]["post"]["responses"]["4XX"]
            schema = described["content"]["application/json"]["schema"]
            jsonschema.Draft202012Validator(schema).validate(reply.json())


async def test_bodies_that_the_document_allows_are_taken():
    """The smallest body satisfies the schema, and is answered."""
    async with serving() as scene:
        document = (await scene.client.get("/openapi.json")).json()
        schema = {**document["components"]["schemas"]["ChatBody"], "components": document["components"]}
        jsonschema.Draft202012Validator(schema).validate(chat_body())
        assert (await scene.client.post("/v1/chat/completions", json=chat_body())).status_code == 200
