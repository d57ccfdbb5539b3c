"""The official openai package against a real server."""

from __future__ import annotations

import json

import openai
import pytest

pytestmark = [pytest.mark.model, pytest.mark.slow]

HELLO = [{"role": "user", "content": "Say hello in one short sentence."}]
SAME_BITS = {"exact": "cold"}  # whatever else is in the model's memory
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 12}, "age": {"type": "integer", "maximum": 150}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def client(real_server):
    """A client of the server."""
    with openai.OpenAI(base_url=f"{real_server}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(client, **more):
    options = {"model": "smol", "messages": HELLO, "temperature": 0, "max_tokens": 16} | more
    return client.chat.completions.create(**options)


def test_a_chat_and_its_stream_say_the_same(client):
    """Text, reason and usage are equal, whole and streamed, where the same bits are asked for."""
    whole = chat(client, extra_body=SAME_BITS)
    chunks = list(chat(client, stream=True, stream_options={"include_usage": True}, extra_body=SAME_BITS))
    text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
    assert text == whole.choices[0].message.content != ""
    assert chunks[-1].choices == []
    assert all("usage" in c.model_fields_set and c.usage is None for c in chunks[:-1])
    assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
    usage = chunks[-1].usage
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_cached_tokens_are_a_part_of_the_prompt(client, stream):
    """The second time they are nearly all of it, and told in every usage."""
    chat(client)
    options = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    reply = chat(client, **options)
    usage = list(reply)[-1].usage if stream else reply.usage
    assert usage.prompt_tokens_details.cached_tokens == usage.prompt_tokens - 1


def test_the_limit_of_tokens_is_kept_and_told(client):
    """max_tokens and max_completion_tokens end the answer with finish_reason length."""
    for name in ("max_tokens", "max_completion_tokens"):
        answer = chat(client, **{name: 3})
        assert answer.usage.completion_tokens == 3
        assert answer.choices[0].finish_reason == "length"


def test_a_stop_string_is_not_in_the_answer(client):
    """Neither streamed nor whole."""
    first = chat(client, extra_body=SAME_BITS).choices[0].message.content
    stop = first[4:8]
    options = {"stop": [stop], "extra_body": SAME_BITS}
    assert chat(client, **options).choices[0].message.content == first[: first.index(stop)]
    pieces = [c.choices[0].delta.content or "" for c in chat(client, **options, stream=True)]
    assert "".join(pieces) == first[: first.index(stop)]


def test_log_probabilities_belong_to_the_text(client):
    """Tokens spell the answer, each with the alternatives that were asked for; a stream has them too."""
    options = {"logprobs": True, "top_logprobs": 3, "extra_body": SAME_BITS}
    whole = chat(client, **options).choices[0]
    told = whole.logprobs.content
    assert "".join(t.token for t in told).startswith(whole.message.content)
    assert all(len(t.top_logprobs) == 3 and t.logprob <= 0 for t in told)
    chunks = list(chat(client, **options, stream=True))
    streamed = [t for c in chunks if c.choices[0].logprobs for t in c.choices[0].logprobs.content]
    assert [t.token for t in streamed] == [t.token for t in told]
    pieces = [c.choices[0] for c in chunks if c.choices[0].delta.content]
    assert all(
        piece.logprobs.content[-1].token in piece.delta.content for piece in pieces
    )  # its own, with it


def test_a_schema_holds_the_answer(client):
    """response_format with a schema gives JSON of it, for several seeds."""
    shape = {"type": "json_schema", "json_schema": {"name": "person", "schema": PERSON, "strict": True}}
    for seed in range(3):
        answer = chat(client, response_format=shape, max_tokens=80, temperature=1.5, seed=seed)
        person = json.loads(answer.choices[0].message.content)
        assert person.keys() == {"name", "age"}
        assert isinstance(person["age"], int)


def test_text_completions_continue_the_prompt(client):
    """Streamed and whole, with usage."""
    options = {"model": "smol", "prompt": "The capital of France is", "max_tokens": 6, "temperature": 0}
    options["extra_body"] = SAME_BITS
    whole = client.completions.create(**options)
    assert "Paris" in whole.choices[0].text
    chunks = list(client.completions.create(**options, stream=True, stream_options={"include_usage": True}))
    assert "".join(c.choices[0].text for c in chunks if c.choices) == whole.choices[0].text
    assert chunks[-1].usage.total_tokens == whole.usage.total_tokens
    logprobs = client.completions.create(**options, logprobs=2).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.text_offset) == 6
    pieces = list(client.completions.create(**options, logprobs=2, stream=True))
    offsets = [n for p in pieces if p.choices[0].logprobs for n in p.choices[0].logprobs.text_offset]
    assert offsets == logprobs.text_offset


def test_responses_go_on_from_each_other(client):
    """The next response knows what was said; an id that is not kept is an error."""
    options = {"model": "smol", "max_output_tokens": 12, "temperature": 0}
    first = client.responses.create(input="My name is Ada. Say hello.", **options)
    assert first.status in ("completed", "incomplete")
    second = client.responses.create(input="And now?", previous_response_id=first.id, **options)
    alone = client.responses.create(input="And now?", **options)
    with pytest.raises(openai.NotFoundError, match="resp_gone"):
        client.responses.create(input="And now?", previous_response_id="resp_gone", **options)
    assert second.usage.input_tokens > alone.usage.input_tokens + first.usage.input_tokens - 20
    assert second.usage.input_tokens_details.cached_tokens > 0


def test_a_streamed_response_is_whole_at_its_end(client):
    """The SDK's own accumulator agrees with the deltas."""
    deltas, kinds = [], []
    with client.responses.stream(
        model="smol", input="Say hello in one word.", max_output_tokens=100, temperature=0
    ) as stream:
        for event in stream:
            kinds.append(event.type)
            if event.type == "response.output_text.delta":
                deltas.append(event.delta)
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert kinds[-1] in ("response.completed", "response.incomplete")
    assert "".join(deltas) == final.output_text != ""
    assert final.usage.output_tokens > 0


def test_models_are_listed(client):
    """And each can be read by name."""
    assert [m.id for m in client.models.list()] == ["smol"]
    assert client.models.retrieve("smol").id == "smol"
    with pytest.raises(openai.NotFoundError) as caught:
        client.models.retrieve("../../etc/passwd")
    assert caught.value.code == "model_not_found"


def test_refusals_have_their_classes(client):
    """What the SDK raises follows status and shape."""
    with pytest.raises(openai.NotFoundError):
        chat(client, model="nobody")
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, n=2)
    assert caught.value.param == "n"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, messages=[{"role": "user", "content": "word " * 4000}])
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.APIStatusError) as status:
        client.embeddings.create(model="smol", input="x")
    assert status.value.status_code == 501
    with pytest.raises(openai.BadRequestError) as caught:
        chat(client, response_format={"type": "json_schema", "json_schema": {"name": "x"}})
    assert caught.value.param == "response_format"


def test_one_request_may_use_the_whole_context(client):
    """H25: the sequences of a model share its cells; a prompt of nine tenths of them is answered."""
    ids = [1000 + i % 5000 for i in range(int(2048 * 0.9))]
    reply = client.completions.create(model="smol", prompt=ids, max_tokens=2)
    assert reply.usage.prompt_tokens >= len(ids)
