//! Answers of a given form and enforced tool choices, with the bundled model: whatever so small a model would like to
//! write, what comes out has the form.

#![allow(clippy::needless_pass_by_value, reason = "JSON values are written where they are used")]

mod support;

use serde_json::{Value, json};
use support::post;
use support::tiny::serve;

const CHAT: &str = "/v1/chat/completions";

fn chat(text: &str, more: Value) -> Value {
    let mut body = json!({"messages": [{"role": "user", "content": text}], "max_tokens": 300, "seed": 1});
    for (key, value) in more.as_object().expect("object") {
        body[key] = value.clone();
    }
    body
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "name": {"type": "string", "maxLength": 12},
            "age": {"type": "integer", "minimum": 0, "maximum": 99},
            "kind": {"enum": ["cat", "dog"]},
        },
        "required": ["name", "age", "kind"],
        "additionalProperties": false,
    })
}

/// J11: the answer validates, with and without reasoning, and reasoning is free text.
#[tokio::test]
async fn a_schema_holds_for_the_answer_and_not_for_the_thought() {
    let server = serve().await;
    let mut thoughts = 0;
    for effort in ["none", "low", "medium"] {
        for seed in 0..2 {
            let format =
                json!({"type": "json_schema", "json_schema": {"name": "person", "schema": person()}});
            let body = chat(
                "Invent an animal.",
                json!({"reasoning_effort": effort, "response_format": format, "seed": seed}),
            );
            let answer = post(server.address, CHAT, &body).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            let choice = answer.json()["choices"][0].clone();
            let message = &choice["message"];
            thoughts += usize::from(message["reasoning_content"].is_string());
            if choice["finish_reason"] == "length" {
                continue;
            }
            let object: Value =
                serde_json::from_str(message["content"].as_str().expect("text")).expect("JSON");
            assert!(object["name"].as_str().is_some_and(|name| name.chars().count() <= 12), "{object}");
            assert!(object["age"].as_u64().is_some_and(|age| age <= 99), "{object}");
            assert!(["cat", "dog"].contains(&object["kind"].as_str().expect("kind")), "{object}");
            assert_eq!(object.as_object().map(serde_json::Map::len), Some(3));
        }
    }
    assert!(thoughts > 0, "no answer had a thought before it");
    server.stop().await;
}

/// S9.
#[tokio::test]
async fn stop_strings_work_beside_a_schema() {
    let server = serve().await;
    let format = json!({"type": "json_schema", "json_schema": {"schema": person()}});
    let body = chat(
        "Invent an animal.",
        json!({"reasoning_effort": "none", "response_format": format, "stop": ["\"age"]}),
    );
    let choice = post(server.address, CHAT, &body).await.json()["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "stop");
    let content = choice["message"]["content"].as_str().expect("text");
    assert!(content.contains("name") && !content.contains("\"age"), "{content}");
    server.stop().await;
}

#[tokio::test]
async fn the_other_forms() {
    let server = serve().await;
    let body = chat(
        "Give me JSON.",
        json!({"reasoning_effort": "none", "response_format": {"type": "json_object"}, "max_tokens": 400}),
    );
    let choice = post(server.address, CHAT, &body).await.json()["choices"][0].clone();
    let content = choice["message"]["content"].as_str().expect("text").to_owned();
    assert!(content.starts_with('{'), "{content}");
    if choice["finish_reason"] == "stop" {
        assert!(serde_json::from_str::<Value>(&content).is_ok_and(|value| value.is_object()), "{content}");
    }
    for grammar in ["start: \"red\" | \"green\"", "root ::= \"red\" | \"green\""] {
        let body = chat("Which colour?", json!({"reasoning_effort": "none", "grammar": grammar}));
        let answer = post(server.address, CHAT, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let content = answer.json()["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
        assert!(["red", "green"].contains(&content.as_str()), "{content}");
        let body = json!({"prompt": "Colour: ", "grammar": grammar, "max_tokens": 20});
        let content =
            post(server.address, "/v1/completions", &body).await.json()["choices"][0]["text"].clone();
        assert!(["red", "green"].contains(&content.as_str().expect("text")), "{content}");
    }
    for more in [
        json!({"guided_choice": ["red", "green"]}),
        json!({"guided_regex": "red|green"}),
        json!({"structured_outputs": {"choice": ["red", "green"]}}),
        json!({"json_schema": {"enum": ["red", "green"]}}),
    ] {
        let mut body = chat("Which colour?", more.clone());
        body["reasoning_effort"] = "none".into();
        let answer = post(server.address, CHAT, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let content = answer.json()["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
        assert!(["red", "green"].contains(&content.trim_matches('"')), "{more}: {content}");
    }
    server.stop().await;
}

/// What benchmark tools ask for: exactly as many tokens as the limit says, whatever the model would do.
#[tokio::test]
async fn an_answer_can_be_made_to_go_on() {
    let server = serve().await;
    let ends_at = async |more: Value| {
        let mut body =
            chat("Hello!", json!({"temperature": 0, "reasoning_effort": "none", "max_tokens": 200}));
        more.as_object().into_iter().flatten().for_each(|(key, value)| body[key] = value.clone());
        let answer = post(server.address, CHAT, &body).await;
        assert_eq!(answer.status, 200, "{}", answer.text());
        let object = answer.json();
        (object["usage"]["completion_tokens"].as_u64(), object["choices"][0]["finish_reason"].clone())
    };
    let (natural, finish) = ends_at(json!({})).await;
    let natural = natural.expect("a count");
    assert!(natural < 150 && finish == "stop", "{natural} tokens, {finish}");
    assert_eq!(ends_at(json!({"ignore_eos": true})).await, (Some(200), json!("length")));
    let (longer, _) = ends_at(json!({"min_tokens": natural + 10})).await;
    assert!(longer >= Some(natural + 10), "{longer:?} after {natural}");
    let first = post(server.address, "/tokenize", &json!({"content": "Once upon a"})).await.json()["tokens"]
        [2]
    .clone();
    let body = json!({"prompt": "Once upon", "temperature": 0, "max_tokens": 20, "stop_token_ids": [first]});
    let stopped = post(server.address, "/v1/completions", &body).await.json();
    if stopped["choices"][0]["finish_reason"] == "stop" {
        let text = stopped["choices"][0]["text"].as_str().expect("text");
        assert!(!text.contains(" a"), "the id that ends the text is not part of it: {text}");
    }
    server.stop().await;
}

/// J7 and J9: what cannot be compiled is the client's fault and costs nobody anything.
#[tokio::test]
async fn forms_that_cannot_be() {
    let server = serve().await;
    let pattern = |pattern: String| json!({"type": "json_schema", "json_schema": {"schema": {"type": "string", "pattern": pattern}}});
    let cases = [
        json!({"response_format": pattern("(?<=x)*".into())}),
        json!({"response_format": pattern("(".repeat(50_000))}),
        json!({"response_format": pattern("[".into())}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "nonsense"}}}}),
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"$ref": "#/nowhere"}}}}),
        json!({"grammar": "start: ("}),
        json!({"grammar": "root ::= ("}),
        json!({"grammar": "root ::= missing"}),
        json!({"grammar": "x".repeat(2 << 20)}),
    ];
    for case in cases {
        let answer = post(server.address, CHAT, &chat("a", case.clone())).await;
        let shown: String = case.to_string().chars().take(120).collect();
        assert_eq!(answer.status, 400, "{shown}: {}", answer.text());
        assert!(answer.json()["error"]["message"].is_string());
    }
    assert_eq!(post(server.address, CHAT, &chat("a", json!({"max_tokens": 1}))).await.status, 200);
    server.stop().await;
}

fn tool(name: &str, parameters: Value) -> Value {
    json!({"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}})
}

/// J1, and tool choices: the call is made, it is the right one, and its arguments fit its schema.
#[tokio::test]
async fn tool_choices_are_enforced() {
    let server = serve().await;
    let tools = json!([
        tool("ping", json!({"type": "object", "properties": {}})),
        tool(
            "get_weather",
            json!({"type": "object", "required": ["city", "days"], "properties": {
            "city": {"type": "string"}, "days": {"type": "integer", "minimum": 1, "maximum": 9}}})
        ),
    ]);
    // So small a model may think up to the limit; then there is nothing to look at, and another seed is tried.
    let ask = async |choice: Value| {
        for seed in 0..20 {
            let more =
                json!({"tools": tools, "tool_choice": choice, "reasoning_effort": "low", "seed": seed});
            let answer = post(server.address, CHAT, &chat("What is the weather in Paris?", more)).await;
            assert_eq!(answer.status, 200, "{}", answer.text());
            let found = answer.json()["choices"][0].clone();
            if found["finish_reason"] != "length" {
                return found;
            }
        }
        panic!("no answer came to its end");
    };
    let named = |name: &str| json!({"type": "function", "function": {"name": name}});
    let ping = ask(named("ping")).await;
    assert_eq!(
        ping["message"]["tool_calls"][0]["function"],
        json!({"name": "ping", "arguments": "{}"}),
        "{ping}"
    );
    assert_eq!(ping["finish_reason"], "tool_calls");
    let weather = ask(named("get_weather")).await;
    let function = &weather["message"]["tool_calls"][0]["function"];
    assert_eq!(function["name"], "get_weather", "{weather}");
    let arguments: Value = serde_json::from_str(function["arguments"].as_str().expect("text")).expect("JSON");
    assert!(arguments["city"].is_string(), "{arguments}");
    assert!(arguments["days"].as_u64().is_some_and(|days| (1..=9).contains(&days)), "{arguments}");
    let required = ask("required".into()).await;
    assert_eq!(required["finish_reason"], "tool_calls", "{required}");
    let none = ask("none".into()).await;
    assert!(none["message"].get("tool_calls").is_none(), "{none}");
    server.stop().await;
}

const DIALECTS: [&str; 4] = [CHAT, "/v1/messages", "/v1/responses", "/api/chat"];

/// A request of a dialect with one tool of these parameters that answers at once.
fn with_tool(path: &str, parameters: &Value, strict: bool, seed: u64) -> Value {
    let function = json!({"name": "f", "description": "A tool.", "parameters": parameters, "strict": strict});
    let messages = json!([{"role": "user", "content": "Call it."}]);
    match path {
        "/v1/messages" => json!({
            "messages": messages, "max_tokens": 60, "thinking": {"type": "disabled"}, "tool_choice": {"type": "any"},
            "tools": [{"name": "f", "input_schema": parameters, "strict": strict}],
        }),
        "/v1/responses" => json!({
            "input": "Call it.", "max_output_tokens": 60, "reasoning": {"effort": "none"}, "tool_choice": "required",
            "tools": [{"type": "function", "name": "f", "parameters": parameters, "strict": strict}], "seed": seed,
        }),
        "/api/chat" => json!({
            "messages": messages, "think": false, "stream": false, "options": {"num_predict": 60, "seed": seed},
            "tools": [{"type": "function", "function": function}],
        }),
        _ => json!({
            "messages": messages, "max_tokens": 60, "reasoning_effort": "none", "tool_choice": "required", "seed": seed,
            "tools": [{"type": "function", "function": function}],
        }),
    }
}

/// A tool's schema that says more than can be kept costs no request its life; strictly it is refused by name.
#[tokio::test]
async fn schemas_of_tools_are_kept_as_far_as_they_can_be() {
    let server = serve().await;
    let record = json!({"type": "object", "properties": {"metadata": {
        "type": "object", "propertyNames": {"type": "string"}, "additionalProperties": {}}}});
    let unique = json!({"type": "object", "properties": {"p": {
        "type": "array", "items": {"type": "string", "format": "path"}, "uniqueItems": true}}});
    for (path, field) in DIALECTS.into_iter().zip([
        "tools[0].function.parameters",
        "tools[0].input_schema",
        "tools[0].parameters",
        "tools[0].function.parameters",
    ]) {
        let answer = post(server.address, path, &with_tool(path, &record, false, 1)).await;
        assert_eq!(
            (answer.status, answer.header("x-muser-notice")),
            (200, None),
            "{path}: {}",
            answer.text()
        );
        let answer = post(server.address, path, &with_tool(path, &unique, false, 1)).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        let expected = format!("{field}.properties.p: 'uniqueItems' cannot be enforced");
        let notice = answer.header("x-muser-notice").map(str::to_lowercase);
        assert_eq!(notice, Some(expected.to_lowercase()), "{path}");
        let answer = post(server.address, path, &with_tool(path, &unique, true, 1)).await;
        assert_eq!(answer.status, 400, "{path}");
        let text = answer.text();
        assert!(
            text.contains("The schema of tool") && text.contains(&format!("(at {field}.properties.p)")),
            "{text}"
        );
        if text.contains("\"param\"") {
            assert_eq!(answer.json()["error"]["param"], format!("{field}.properties.p"));
        }
    }
    server.stop().await;
}

/// "none" means none, also when a call is asked for, in every dialect.
#[tokio::test]
async fn no_reasoning_beside_tools_when_none_is_asked_for() {
    let server = serve().await;
    let parameters = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"]});
    for path in DIALECTS {
        for seed in 0..3 {
            let answer = post(server.address, path, &with_tool(path, &parameters, true, seed)).await;
            let (status, text) = (answer.status, answer.text());
            assert_eq!(status, 200, "{path}: {text}");
            let thought = ["reasoning_content\":", "\"thinking\":", "\"type\":\"reasoning\""]
                .iter()
                .any(|mark| text.contains(mark));
            assert!(!thought, "{path}: {text}");
            // Ollama's API has no word for a call that must be.
            assert!(path == "/api/chat" || text.contains("\"name\":\"f\""), "{path}: {text}");
        }
    }
    server.stop().await;
}

/// With reasoning, a call that is asked for still fits into the limit.
#[tokio::test]
async fn a_call_that_must_be_fits_into_the_limit() {
    let server = serve().await;
    let parameters = json!({"type": "object", "properties": {"n": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["n"]});
    for seed in 0..4 {
        let mut body = with_tool(CHAT, &parameters, false, seed);
        body["reasoning_effort"] = "high".into();
        body["max_tokens"] = 200.into();
        body["parallel_tool_calls"] = false.into();
        let choice = post(server.address, CHAT, &body).await.json()["choices"][0].clone();
        assert_eq!(choice["finish_reason"], "tool_calls", "{choice}");
        let arguments = choice["message"]["tool_calls"][0]["function"]["arguments"].as_str().expect("text");
        let arguments: Value = serde_json::from_str(arguments).expect("JSON");
        assert!(arguments["n"].as_u64().is_some_and(|n| (1..=9).contains(&n)), "{arguments}");
    }
    server.stop().await;
}

/// What leaves no token is named by its own field.
#[tokio::test]
async fn bans_of_all_tokens_are_the_bans_fault() {
    let server = serve().await;
    let bans: Vec<Value> = (0..4096).map(|id| json!([id, false])).collect();
    let refused = async |more: Value, field: &str| {
        let answer = post(server.address, CHAT, &chat("a", more)).await;
        assert_eq!(
            (answer.status, &answer.json()["error"]["param"]),
            (400, &json!(field)),
            "{}",
            answer.text()
        );
    };
    refused(json!({"logit_bias": bans}), "logit_bias").await;
    refused(json!({"logit_bias": [[5, 3e38], [5, 3e38]]}), "logit_bias").await;
    refused(json!({"repetition_penalty": 1e-40}), "repetition_penalty").await;
    refused(json!({"presence_penalty": -3e38, "frequency_penalty": -3e38}), "presence_penalty").await;
    refused(json!({"stop_token_ids": [900_000]}), "stop_token_ids").await;
    refused(json!({"logit_bias": {"900000": 1}}), "logit_bias").await;
    refused(json!({"guided_regex": "[a"}), "guided_regex").await;
    refused(json!({"structured_outputs": {"grammar": "start: ("}}), "structured_outputs.grammar").await;
    let schema = json!({"properties": {"a": {"type": "array", "uniqueItems": true}}});
    let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
    refused(json!({"response_format": format}), "response_format.json_schema.schema.properties.a").await;
    // Choices beyond what rules of a grammar could hold.
    let choices: Vec<String> = (0..5000).map(|index| format!("choice number {index}")).collect();
    let body = chat("a", json!({"guided_choice": choices, "reasoning_effort": "none"}));
    let answer = post(server.address, CHAT, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let said = answer.json()["choices"][0]["message"]["content"].as_str().expect("text").to_owned();
    assert!(choices.contains(&said), "{said}");
    server.stop().await;
}
