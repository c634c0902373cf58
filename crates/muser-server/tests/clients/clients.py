"""Real client libraries against a running server: python clients.py http://127.0.0.1:PORT [check ...]

Prints one line a check and exits with 1 if one failed. The server holds Muse Tiny: checks look at shapes and at what the
server promises, not at how clever the text is.
"""

import base64
import json
import os
import struct
import sys
import tempfile
import time
import urllib.request

BASE = sys.argv[1].rstrip("/")
CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def openai_client(**options):
    import openai

    return openai.OpenAI(base_url=f"{BASE}/v1", api_key="none", **options)


WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Get the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


@check
def openai_chat():
    answer = openai_client().chat.completions.create(
        model="muse-tiny", messages=[{"role": "user", "content": "Write a short story about a fox."}], max_tokens=40,
        temperature=0,
    )
    assert answer.choices[0].message.content, answer
    assert answer.choices[0].finish_reason in ("stop", "length"), answer
    assert answer.usage.completion_tokens <= 40 and answer.usage.prompt_tokens > 0, answer.usage


@check
def openai_stream():
    chunks = list(
        openai_client().chat.completions.create(
            model="muse-tiny", messages=[{"role": "user", "content": "Tell me about a fox."}], max_tokens=30,
            temperature=0, stream=True, stream_options={"include_usage": True}, reasoning_effort="low",
        )
    )
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens > 0, chunks[-1]
    assert [c.choices[0].finish_reason for c in chunks[:-1]][-1] in ("stop", "length")
    assert len({c.id for c in chunks}) == 1


@check
def openai_tools_round_trip():
    client = openai_client()
    messages = [{"role": "user", "content": "What is the weather in Paris?"}]
    first = client.chat.completions.create(
        model="muse-tiny", messages=messages, tools=[WEATHER], tool_choice="required", temperature=0, max_tokens=200,
    )
    message = first.choices[0].message
    assert first.choices[0].finish_reason == "tool_calls", first
    arguments = json.loads(message.tool_calls[0].function.arguments)
    assert message.tool_calls[0].function.name == "get_weather" and isinstance(arguments["city"], str), message
    messages += [
        message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": message.tool_calls[0].id, "content": "14 degrees and rain"},
    ]
    second = client.chat.completions.create(
        model="muse-tiny", messages=messages, tools=[WEATHER], temperature=0, max_tokens=60,
    )
    assert second.choices[0].finish_reason in ("stop", "length", "tool_calls"), second


@check
def openai_json_schema():
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 20}, "age": {"type": "integer", "maximum": 99, "minimum": 0}},
        "required": ["name", "age"],
        "additionalProperties": False,
    }
    for effort in ("none", "low"):
        answer = openai_client().chat.completions.create(
            model="muse-tiny", messages=[{"role": "user", "content": "Invent a person."}], temperature=0, max_tokens=600,
            reasoning_effort=effort,
            response_format={"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": True}},
        )
        choice = answer.choices[0]
        if choice.finish_reason == "length":
            print(f"  (effort {effort}: cut at the limit, nothing to validate)")
            continue
        person = json.loads(choice.message.content)
        assert set(person) == {"name", "age"} and isinstance(person["age"], int), person


@check
def openai_embeddings():
    client = openai_client()
    by_default = client.embeddings.create(model="muse-tiny", input=["a fox", "a dog"])
    floats = client.embeddings.create(model="muse-tiny", input=["a fox", "a dog"], encoding_format="float")
    for one, two in zip(by_default.data, floats.data, strict=True):
        assert len(one.embedding) == len(two.embedding) > 0
        assert max(abs(a - b) for a, b in zip(one.embedding, two.embedding)) < 1e-6
    body = json.dumps({"model": "m", "input": "a fox", "encoding_format": "base64"}).encode()
    request = urllib.request.Request(f"{BASE}/v1/embeddings", body, {"content-type": "application/json"})
    text = json.load(urllib.request.urlopen(request))["data"][0]["embedding"]
    raw = base64.b64decode(text)
    assert abs(sum(x * x for x in struct.unpack(f"<{len(raw) // 4}f", raw)) - 1) < 1e-3


@check
def openai_errors_and_retries():
    import openai

    began = time.monotonic()
    client = openai_client(max_retries=3)
    for options, kind in [
        ({"temperature": -1}, openai.BadRequestError),
        ({"messages": [{"role": "foo", "content": "x"}]}, openai.BadRequestError),
        ({"messages": [{"role": "user", "content": "word " * 40000}]}, openai.BadRequestError),
    ]:
        request = {"model": "muse-tiny", "messages": [{"role": "user", "content": "a"}], **options}
        try:
            client.chat.completions.create(**request)
        except kind as fault:
            assert fault.body and fault.body["message"], fault
        else:
            raise AssertionError(f"{options.keys()} was accepted")
    # A bad request is not sent again.
    assert time.monotonic() - began < 10


@check
def openai_responses():
    client = openai_client()
    whole = client.responses.create(model="muse-tiny", input="Tell me about a fox.", max_output_tokens=30, temperature=0)
    assert whole.output_text and whole.usage.output_tokens > 0, whole
    events = list(
        client.responses.create(model="muse-tiny", input="Tell me about a fox.", max_output_tokens=30, temperature=0, stream=True)
    )
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    said = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert said == whole.output_text, (said, whole.output_text)


@check
def openai_responses_are_gone_on_from():
    client = openai_client()
    first = client.responses.create(model="muse-tiny", input="Tell me about a fox.", max_output_tokens=20, temperature=0)
    second = client.responses.create(
        model="muse-tiny", input="And a dog?", previous_response_id=first.id, max_output_tokens=20, temperature=0,
    )
    assert second.previous_response_id == first.id and second.usage.input_tokens > first.usage.input_tokens, second.usage
    assert client.responses.retrieve(first.id).output_text == first.output_text
    assert client.responses.input_items.list(first.id).data
    counted = client.responses.input_tokens.count(model="muse-tiny", input="Tell me about a fox.")
    assert counted.input_tokens == first.usage.input_tokens, counted
    client.responses.delete(first.id)


@check
def openai_custom_tool():
    tool = {"type": "custom", "name": "apply_patch", "description": "Edits files.", "format": {"type": "text"}}
    answer = openai_client().responses.create(
        model="muse-tiny", input="Write a patch.", tools=[tool, {"type": "web_search"}], temperature=0, max_output_tokens=300,
        tool_choice={"type": "custom", "name": "apply_patch"}, reasoning={"effort": "none", "summary": "auto"},
    )
    calls = [item for item in answer.output if item.type == "custom_tool_call"]
    assert answer.status == "incomplete" or (calls and isinstance(calls[0].input, str)), answer.output


@check
def openai_likelihood():
    answer = openai_client().completions.create(
        model="muse-tiny", prompt=["The fox is red.", "The fox is blue."], max_tokens=1, logprobs=1, echo=True, temperature=0,
        seed=1234,
    )
    for choice in answer.choices:
        logprobs = choice.logprobs
        assert logprobs.token_logprobs[0] is None and all(value <= 0 for value in logprobs.token_logprobs[1:]), logprobs
        assert len(logprobs.tokens) == len(logprobs.text_offset) == len(logprobs.top_logprobs), logprobs


@check
def openai_logprobs():
    answer = openai_client().chat.completions.create(
        model="muse-tiny", messages=[{"role": "user", "content": "Hello!"}], max_tokens=5, temperature=0, logprobs=True,
        top_logprobs=5, reasoning_effort="none",
    )
    for token in answer.choices[0].logprobs.content:
        likely = [entry.logprob for entry in token.top_logprobs]
        assert len(likely) == 5 and likely == sorted(likely, reverse=True), token
        assert token.logprob == likely[0], "temperature 0 takes the most likely token"


@check
def anthropic_messages():
    import anthropic

    client = anthropic.Anthropic(base_url=BASE, api_key="none")
    counted = client.messages.count_tokens(model="muse-tiny", messages=[{"role": "user", "content": "Tell me about a fox."}])
    with client.messages.stream(
        model="muse-tiny", max_tokens=40, messages=[{"role": "user", "content": "Tell me about a fox."}],
        system=[{"type": "text", "text": "x-anthropic-billing-header: cch=1;"}],
    ) as stream:
        text = "".join(stream.text_stream)
        final = stream.get_final_message()
    assert final.stop_reason in ("end_turn", "max_tokens"), final
    assert text == "".join(block.text for block in final.content if block.type == "text")
    used = final.usage.input_tokens + (final.usage.cache_read_input_tokens or 0)
    assert used == counted.input_tokens, (used, counted)


@check
def anthropic_tool():
    import anthropic

    client = anthropic.Anthropic(base_url=BASE, api_key="none")
    tool = {"name": "get_weather", "description": "Weather.", "input_schema": WEATHER["function"]["parameters"]}
    answer = client.messages.create(
        model="muse-tiny", max_tokens=300, tools=[tool], tool_choice={"type": "any"}, extra_body={"temperature": 0},
        messages=[{"role": "user", "content": "What is the weather in Paris?"}],
    )
    assert answer.stop_reason == "tool_use", answer
    assert answer.content[-1].name == "get_weather" and isinstance(answer.content[-1].input["city"], str)


@check
def anthropic_structured_output():
    import anthropic

    client = anthropic.Anthropic(base_url=BASE, api_key="none")
    schema = {"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 99}}, "required": ["age"],
              "additionalProperties": False}
    answer = client.messages.create(
        model="muse-tiny", max_tokens=100, messages=[{"role": "user", "content": "Invent a person."}],
        thinking={"type": "disabled"},
        extra_body={"temperature": 0, "output_config": {"format": {"type": "json_schema", "schema": schema}}},
    )
    assert isinstance(json.loads(answer.content[-1].text)["age"], int), answer


@check
def anthropic_prefill_and_overflow():
    import anthropic

    client = anthropic.Anthropic(base_url=BASE, api_key="none", max_retries=0)
    ask = {"role": "user", "content": "Tell me a story."}
    answer = client.messages.create(
        model="muse-tiny", max_tokens=20, messages=[ask, {"role": "assistant", "content": "Once upon a time, there was a little"}],
        extra_body={"temperature": 0},
    )
    assert answer.content[0].type == "text", answer
    try:
        client.messages.create(model="muse-tiny", max_tokens=20, messages=[{"role": "user", "content": "word " * 9000}])
    except anthropic.BadRequestError as fault:
        assert "prompt is too long: " in str(fault) and "maximum" in str(fault), fault
    else:
        raise AssertionError("it was accepted")


PICTURE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "../../../../models/muse-tiny-demo.jpg")


def picture():
    with open(PICTURE, "rb") as file:
        return base64.b64encode(file.read()).decode()


@check
def openai_picture():
    parts = [
        {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{picture()}"}},
        {"type": "text", "text": "What color is the background?"},
    ]
    answer = openai_client().chat.completions.create(
        model="muse-tiny", messages=[{"role": "user", "content": parts}], max_tokens=24, temperature=0, reasoning_effort="none",
    )
    assert answer.choices[0].message.content == "The background is orange.", answer
    assert answer.usage.prompt_tokens_details.model_dump()["image_tokens"] == 50, answer.usage


@check
def anthropic_picture():
    import anthropic

    source = {"type": "base64", "media_type": "image/jpeg", "data": picture()}
    content = [{"type": "image", "source": source}, {"type": "text", "text": "What color is the background?"}]
    messages = [{"role": "user", "content": content}]
    client = anthropic.Anthropic(base_url=BASE, api_key="none")
    answer = client.messages.create(
        model="muse-tiny", max_tokens=24, messages=messages, thinking={"type": "disabled"}, extra_body={"temperature": 0},
    )
    assert answer.content[0].text == "The background is orange.", answer
    assert client.messages.count_tokens(model="muse-tiny", messages=messages).input_tokens > 50


@check
def ollama_picture():
    import ollama

    message = {"role": "user", "content": "What color is the background?", "images": [PICTURE]}
    answer = ollama.Client(host=BASE).chat(
        model="muse-tiny", messages=[message], think=False, options={"temperature": 0, "num_predict": 24},
    )
    assert answer.message.content == "The background is orange.", answer


@check
def ollama_chat():
    import ollama

    client = ollama.Client(host=BASE)
    assert client.list().models[0].model
    answer = client.chat(model="muse-tiny", messages=[{"role": "user", "content": "Hello!"}], options={"num_predict": 20})
    assert answer.done and answer.eval_count > 0, answer
    parts = list(
        client.chat(model="muse-tiny", messages=[{"role": "user", "content": "Hello!"}], stream=True, options={"num_predict": 20})
    )
    assert parts[-1].done and not parts[0].done


@check
def langchain_tool():
    from langchain_core.tools import tool
    from langchain_openai import ChatOpenAI

    @tool
    def get_weather(city: str) -> str:
        """Get the weather of a city."""
        return f"14 degrees in {city}"

    chat = ChatOpenAI(base_url=f"{BASE}/v1", api_key="none", model="muse-tiny", temperature=0, max_tokens=200)
    answer = chat.bind_tools([get_weather], tool_choice="required").invoke("What is the weather in Paris?")
    assert answer.tool_calls and answer.tool_calls[0]["name"] == "get_weather", answer
    assert get_weather.invoke(answer.tool_calls[0]["args"]).startswith("14 degrees")


def animal():
    from typing import Literal

    from pydantic import BaseModel, Field

    class Animal(BaseModel):
        kind: Literal["fox", "dog"]
        age: int = Field(ge=0, le=99)

    return Animal


@check
def langchain_structured_output():
    from langchain_anthropic import ChatAnthropic
    from langchain_openai import ChatOpenAI

    common = {"model": "muse-tiny", "api_key": "none", "temperature": 0, "max_tokens": 400}
    chat = ChatOpenAI(base_url=f"{BASE}/v1", **common)
    responses = ChatOpenAI(base_url=f"{BASE}/v1", use_responses_api=True, **common)
    messages = ChatAnthropic(base_url=BASE, **common)
    wanted = animal()
    for model in (chat, responses, messages):
        for method in ("json_schema", "function_calling"):
            found = model.with_structured_output(wanted, method=method).invoke("Invent an animal.")
            assert isinstance(found, wanted), (type(model), method, found)


@check
def pydantic_ai_structured_output():
    from pydantic_ai import Agent, NativeOutput, ToolOutput
    from pydantic_ai.models.anthropic import AnthropicModel
    from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
    from pydantic_ai.providers.anthropic import AnthropicProvider
    from pydantic_ai.providers.openai import OpenAIProvider

    openai = OpenAIProvider(base_url=f"{BASE}/v1", api_key="none")
    anthropic = AnthropicProvider(base_url=BASE, api_key="none")
    wanted = animal()
    # The client knows by a model's name whether it takes native schemas from Anthropic.
    for model in (
        OpenAIChatModel("muse-tiny", provider=openai), OpenAIResponsesModel("muse-tiny", provider=openai),
        AnthropicModel("claude-sonnet-4-5", provider=anthropic),
    ):
        for output in (NativeOutput(wanted), ToolOutput(wanted)):
            agent = Agent(model, output_type=output, model_settings={"temperature": 0, "max_tokens": 400})
            found = agent.run_sync("Invent an animal.").output
            assert isinstance(found, wanted), (type(model), output, found)


@check
def pydantic_ai_tool_loop():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    from pydantic_ai.providers.openai import OpenAIProvider

    model = OpenAIChatModel("muse-tiny", provider=OpenAIProvider(base_url=f"{BASE}/v1", api_key="none"))
    # The client has no word for "only in the first step".
    body = {"tool_choice": "required"}
    agent = Agent(model, model_settings={"temperature": 0, "max_tokens": 300, "extra_body": body})
    asked = []

    @agent.tool_plain
    def get_weather(city: str) -> str:
        """The weather of a city."""
        asked.append(city)
        body["tool_choice"] = "none"
        return "14 degrees and rain"

    answer = agent.run_sync("What is the weather in Paris?")
    assert asked and isinstance(answer.output, str), (asked, answer)


@check
def schemathesis_finds_no_5xx():
    """Requests made from the description, for a bounded number of examples a route."""
    import subprocess

    command = [
        sys.executable, "-m", "schemathesis.cli", "run", f"{BASE}/openapi.json", "--checks", "not_a_server_error",
        "--max-examples", "12", "--phases", "examples,fuzzing", "--seed", "1", "--request-timeout", "20",
        "--exclude-path", "/infill", "--suppress-health-check", "all", "--no-color",
    ]
    with tempfile.TemporaryDirectory() as folder:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=folder)
    if done.returncode != 0:
        raise AssertionError(done.stdout[-4000:] + done.stderr[-2000:])


def main():
    wanted = sys.argv[2:]
    failed = 0
    for function in CHECKS:
        if wanted and function.__name__ not in wanted:
            continue
        began = time.monotonic()
        try:
            function()
            print(f"ok   {function.__name__} {time.monotonic() - began:.1f} s", flush=True)
        except Exception as fault:  # noqa: BLE001 - any fault of a check is a failed check
            failed += 1
            print(f"FAIL {function.__name__}: {type(fault).__name__}: {fault}", flush=True)
    sys.exit(1 if failed else 0)


main()
