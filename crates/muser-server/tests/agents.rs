//! What coding agents send, over a scripted engine: tools of all kinds, responses that are gone on from, structured answers,
//! pictures, overflow.

#![allow(clippy::needless_pass_by_value, reason = "JSON values are written where they are used")]

mod support;

use muser_server::ServerConfig;
use serde_json::{Value, json};
use support::{Running, Script, Scripted, get, post, request};

const ANSWER: &str = " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hello!<|eot|>";

fn call(tool: &str, parameter: &str, value: &str) -> String {
    format!(
        " to={tool}<|message|><atem:function_calls>\n<atem:invoke name=\"{tool}\">\n\
         <atem:parameter name=\"{parameter}\">{value}</atem:parameter>\n</atem:invoke>\n</atem:function_calls><|eot|>"
    )
}

async fn with_engine(output: &str) -> (Running, Scripted) {
    let output = output.to_owned();
    let engine = Scripted::new(move |_| Script::saying(&output));
    (Running::scripted(ServerConfig::default(), engine.clone()).await, engine)
}

/// The tools of a Codex session under a name that it knows.
fn codex_tools() -> Value {
    json!([
        {"type": "function", "name": "exec_command", "description": "Runs.", "strict": false,
         "parameters": {"type": "object", "properties": {"cmd": {"type": "string"}}, "required": ["cmd"]}},
        {"type": "namespace", "name": "multi_agent_v1", "description": "Agents.", "tools": [
            {"type": "function", "name": "spawn", "parameters": {"type": "object", "properties": {"task": {"type": "string"}}}}]},
        {"type": "custom", "name": "apply_patch", "description": "Edits files.",
         "format": {"type": "grammar", "syntax": "lark", "definition": "start: \"*** Begin Patch\" /.+/"}},
        {"type": "tool_search", "execution": "client"},
        {"type": "web_search", "external_web_access": false},
        {"type": "local_shell"}, {"type": "mcp", "server_label": "x"}, {"type": "apply_patch"},
    ])
}

fn codex(input: Value) -> Value {
    json!({"model": "gpt-5.5", "input": input, "tools": codex_tools(), "tool_choice": "auto", "store": false,
        "stream": false, "parallel_tool_calls": true, "instructions": "You are an agent.",
        "reasoning": {"effort": "medium", "summary": "auto"}, "include": ["reasoning.encrypted_content"]})
}

/// A picture of one pixel.
const PIXEL: &str = "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8BQDwAEhQGAhKmMIQAAAABJRU5ErkJggg==";

#[tokio::test]
async fn codex_loops_over_all_kinds_of_tools() {
    let (server, engine) = with_engine(&call("apply_patch", "input", "*** Begin Patch\n+é")).await;
    let user = json!({"type": "message", "role": "user", "content": [{"type": "input_text", "text": "go"}]});
    let first = post(server.address, "/v1/responses", &codex(json!([user]))).await;
    assert_eq!(first.status, 200, "{}", first.text());
    let notice = first.header("x-muser-notice").expect("something is left out").to_owned();
    for index in 3..8 {
        assert!(notice.contains(&format!("tools[{index}]: left out, tools of type ")), "{notice}");
    }
    assert!(notice.contains("\"web_search\"") && !notice.contains("tools[0]"), "{notice}");
    let first = first.json();
    let made = &first["output"][0];
    assert_eq!((&made["type"], &made["name"]), (&json!("custom_tool_call"), &json!("apply_patch")));
    assert_eq!(made["input"], "*** Begin Patch\n+é");
    assert_eq!(first["store"], false);
    // What was given out goes back, with what else such a history holds.
    let input = json!([
        user, made,
        {"type": "custom_tool_call_output", "call_id": made["call_id"], "output": "Done"},
        {"type": "function_call", "call_id": "c2", "namespace": "multi_agent_v1", "name": "spawn", "arguments": "{\"task\":\"t\"}"},
        {"type": "function_call_output", "call_id": "c2", "output": [{"type": "input_image", "image_url": "data:image/png;base64,AA"}]},
        {"type": "web_search_call", "id": "ws", "status": "completed", "action": {"type": "other"}},
        {"type": "tool_search_call", "call_id": "ts", "arguments": {}},
        {"type": "tool_search_output", "call_id": "ts", "tools": []},
        {"type": "compaction", "encrypted_content": "from elsewhere"},
        {"type": "of_next_year", "id": "x"},
    ]);
    let second = post(server.address, "/v1/responses", &codex(input)).await;
    assert_eq!(second.status, 200, "{}", second.text());
    let notice = second.header("x-muser-notice").expect("something is left out");
    assert!(notice.contains("input[9]: passed over, items of type \"of_next_year\""), "{notice}");
    let prompt = engine.last().prompt;
    for part in [
        "<atem:parameter name=\"input\">*** Begin Patch\n+é</atem:parameter>",
        "to=multi_agent_v1.spawn<|message|>",
        "[image: this model reads text only]",
        "start: \\\"*** Begin Patch\\\"",
    ] {
        assert!(prompt.contains(part), "{part} is missing in {prompt}");
    }
    assert!(!prompt.contains("web_search"), "{prompt}");
    server.stop().await;
}

#[tokio::test]
async fn a_call_in_a_namespace_and_a_custom_one_stream_as_the_client_knows_them() {
    let (server, _) = with_engine(&call("multi_agent_v1.spawn", "task", "look")).await;
    let mut body = codex(json!("go"));
    body["stream"] = true.into();
    let events = post(server.address, "/v1/responses", &body).await.events();
    let done = events.iter().find(|event| event["type"] == "response.output_item.done").expect("an item");
    assert_eq!(
        (&done["item"]["namespace"], &done["item"]["name"]),
        (&json!("multi_agent_v1"), &json!("spawn"))
    );
    assert_eq!(done["item"]["arguments"], "{\"task\":\"look\"}");
    server.stop().await;
    let (server, _) = with_engine(&call("apply_patch", "input", "a\nb")).await;
    let events = post(server.address, "/v1/responses", &body).await.events();
    let deltas: String = events
        .iter()
        .filter(|event| event["type"] == "response.custom_tool_call_input.delta")
        .filter_map(|event| event["delta"].as_str())
        .collect();
    assert_eq!(deltas, "a\nb");
    // The same tool in chat completions.
    let tools = json!([{"type": "custom", "custom": {"name": "apply_patch", "description": "Edits."}}]);
    let chat = json!({"messages": [{"role": "user", "content": "go"}], "tools": tools});
    let object = post(server.address, "/v1/chat/completions", &chat).await.json();
    let made = &object["choices"][0]["message"]["tool_calls"][0];
    assert_eq!(
        (&made["type"], &made["custom"]),
        (&json!("custom"), &json!({"name": "apply_patch", "input": "a\nb"}))
    );
    let history = json!([
        {"role": "user", "content": "go"}, {"role": "assistant", "content": null, "tool_calls": [made]},
        {"role": "tool", "tool_call_id": made["id"], "content": [{"type": "text", "text": "ok"}, {"type": "image_url", "image_url": {"url": PIXEL}}]},
    ]);
    let again =
        post(server.address, "/v1/chat/completions", &json!({"messages": history, "tools": tools})).await;
    assert_eq!(again.status, 200, "{}", again.text());
    server.stop().await;
}

#[tokio::test]
async fn only_a_choice_of_what_is_not_here_is_refused() {
    let (server, _) = with_engine(ANSWER).await;
    for (choice, status) in [
        (json!("auto"), 200),
        (json!({"type": "web_search"}), 400),
        (json!({"type": "mcp", "server_label": "x"}), 400),
        (json!({"type": "function", "name": "nothing"}), 400),
        (
            json!({"type": "allowed_tools", "mode": "auto", "tools": [{"type": "function", "name": "exec_command"}]}),
            200,
        ),
    ] {
        let mut body = codex(json!("go"));
        body["tool_choice"] = choice.clone();
        let answer = post(server.address, "/v1/responses", &body).await;
        assert_eq!(answer.status, status, "{choice}: {}", answer.text());
        if status == 400 {
            assert_eq!(answer.json()["error"]["param"], "tool_choice");
        }
    }
    server.stop().await;
}

#[tokio::test]
async fn responses_are_kept_gone_on_from_and_forgotten() {
    let (server, engine) = with_engine(ANSWER).await;
    let first =
        post(server.address, "/v1/responses", &json!({"input": "one", "metadata": {"a": "b"}})).await.json();
    assert_eq!(first["store"], true);
    let id = first["id"].as_str().expect("an id");
    assert_eq!(get(server.address, &format!("/v1/responses/{id}")).await.json(), first);
    // AI SDK's way: the reasoning is a reference, the rest comes in full.
    let items = first["output"].as_array().expect("items").clone();
    let input = json!([
        {"role": "user", "content": "one"}, {"type": "item_reference", "id": items[0]["id"]}, items[1],
        {"role": "user", "content": "two"}]);
    assert_eq!(post(server.address, "/v1/responses", &json!({"input": input})).await.status, 200);
    let by_reference = engine.last().prompt;
    let body = json!({"input": "two", "previous_response_id": id, "stream": true});
    let events = post(server.address, "/v1/responses", &body).await.events();
    assert_eq!(engine.last().prompt, by_reference, "both ways say the same");
    assert!(by_reference.contains("to=self<|message|>Hm."), "{by_reference}");
    let second = &events.last().expect("events")["response"];
    assert_eq!(second["previous_response_id"], id);
    // A chain outlives what it began with.
    let path = format!("/v1/responses/{id}");
    let gone = request(server.address, "DELETE", &path, "", b"").await;
    assert_eq!((gone.status, gone.json()["deleted"].clone()), (200, json!(true)));
    assert_eq!(get(server.address, &path).await.status, 404);
    let third = json!({"input": "three", "previous_response_id": second["id"]});
    assert_eq!(post(server.address, "/v1/responses", &third).await.status, 200);
    for part in ["one", "two", "three"] {
        assert!(engine.last().prompt.contains(&format!("<|start|>user<|message|>{part}<|eot|>")), "{part}");
    }
    let listed =
        get(server.address, &format!("/v1/responses/{}/input_items", second["id"].as_str().expect("id")))
            .await;
    assert_eq!(listed.json()["data"][0]["content"][0]["text"], "two");
    let unknown =
        post(server.address, "/v1/responses", &json!({"input": "a", "previous_response_id": "resp_no"}))
            .await;
    assert_eq!(unknown.json()["error"]["code"], "previous_response_not_found");
    let unkept = post(server.address, "/v1/responses", &json!({"input": "a", "store": false})).await.json();
    assert_eq!(
        get(server.address, &format!("/v1/responses/{}", unkept["id"].as_str().expect("id"))).await.status,
        404
    );
    let missing =
        json!({"input": [{"role": "user", "content": "a"}, {"type": "item_reference", "id": "msg_no"}]});
    assert_eq!(post(server.address, "/v1/responses", &missing).await.json()["error"]["param"], "input[1].id");
    server.stop().await;
}

#[tokio::test]
async fn a_response_belongs_to_the_key_that_made_it() {
    let folder = tempfile::tempdir().expect("folder");
    let keys = folder.path().join("keys");
    std::fs::write(&keys, "alpha\nbeta\n").expect("written");
    let engine = Scripted::new(|_| Script::saying(ANSWER));
    let server =
        Running::scripted(ServerConfig { key_file: Some(keys), ..ServerConfig::default() }, engine).await;
    let as_key = |key: &str| format!("authorization: Bearer {key}\r\n");
    let made =
        request(server.address, "POST", "/v1/responses", &as_key("alpha"), b"{\"input\":\"a\"}").await.json();
    let path = format!("/v1/responses/{}", made["id"].as_str().expect("id"));
    for (method, path) in
        [("GET", path.clone()), ("DELETE", path.clone()), ("GET", format!("{path}/input_items"))]
    {
        assert_eq!(request(server.address, method, &path, &as_key("beta"), b"").await.status, 404, "{path}");
    }
    let body = json!({"input": "b", "previous_response_id": made["id"]}).to_string();
    let stolen = request(server.address, "POST", "/v1/responses", &as_key("beta"), body.as_bytes()).await;
    assert_eq!(stolen.status, 400);
    assert_eq!(request(server.address, "GET", &path, &as_key("alpha"), b"").await.status, 200);
    server.stop().await;
}

#[tokio::test]
async fn a_prompt_is_counted_and_a_long_one_compacted() {
    let (server, engine) = with_engine(" to=user<|message|>They spoke of foxes.<|eot|>").await;
    let body = json!({"input": [
        {"role": "user", "content": "Tell me of foxes."}, {"role": "assistant", "content": "They are red."},
        {"role": "user", "content": "And?"}], "instructions": "Be brief."});
    let counted = post(server.address, "/v1/responses/input_tokens", &body).await.json();
    let answered = post(server.address, "/v1/responses", &body).await.json();
    assert_eq!(counted["input_tokens"], answered["usage"]["input_tokens"]);
    let compacted = post(server.address, "/v1/responses/compact", &body).await.json();
    assert_eq!(compacted["object"], "response.compaction");
    let output = compacted["output"].as_array().expect("items");
    let kinds: Vec<&str> = output.iter().map(|item| item["type"].as_str().unwrap_or("message")).collect();
    assert_eq!(kinds, ["message", "message", "compaction"]);
    let mut input = output.clone();
    input.push(json!({"role": "user", "content": "Go on."}));
    assert_eq!(post(server.address, "/v1/responses", &json!({"input": input})).await.status, 200);
    assert!(engine.last().prompt.contains("They spoke of foxes."), "{}", engine.last().prompt);
    server.stop().await;
}

/// Three turns of which all but the last are too long together.
fn too_long() -> Vec<Value> {
    let long = "word ".repeat(3000);
    vec![
        json!({"role": "user", "content": format!("first {long}")}),
        json!({"role": "assistant", "content": "ok"}),
        json!({"role": "user", "content": format!("second {long}")}),
        json!({"role": "assistant", "content": "ok"}),
        json!({"role": "user", "content": "third"}),
    ]
}

#[tokio::test]
async fn what_does_not_fit_is_said_in_each_familys_words_or_left_out() {
    let (server, engine) = with_engine(ANSWER).await;
    let messages = too_long();
    let responses = json!({"input": messages, "instructions": "Keep this."});
    let answer = post(server.address, "/v1/responses", &responses).await;
    let fault = &answer.json()["error"];
    assert_eq!(
        (answer.status, &fault["code"], &fault["param"]),
        (400, &json!("context_length_exceeded"), &json!("input"))
    );
    let chat = post(server.address, "/v1/chat/completions", &json!({"messages": messages})).await.json();
    assert_eq!(chat["error"]["param"], "messages");
    let message = chat["error"]["message"].as_str().expect("text").to_owned();
    assert!(message.contains("maximum context length is 4096 tokens"), "{message}");
    let anthropic = json!({"messages": messages, "max_tokens": 32_000});
    let fault = post(server.address, "/v1/messages", &anthropic).await.json()["error"].clone();
    let words: Vec<String> = fault["message"].as_str().expect("text").split(' ').map(str::to_owned).collect();
    assert_eq!(words[..4].join(" "), "prompt is too long:");
    assert_eq!(words[5..].join(" "), "tokens > 4096 maximum");
    assert!(words[4].parse::<usize>().expect("a number") > 4096);
    let ollama = post(server.address, "/api/chat", &json!({"messages": messages})).await.json();
    assert!(
        ollama["error"]
            .as_str()
            .is_some_and(|text| text.starts_with("prompt too long; exceeded max context length"))
    );
    let text = json!({"prompt": "word ".repeat(5000)});
    assert_eq!(post(server.address, "/v1/completions", &text).await.json()["error"]["param"], "prompt");
    assert_eq!(post(server.address, "/completion", &text).await.json()["error"]["param"], "prompt");
    let mut shortened = responses;
    shortened["truncation"] = "auto".into();
    let answer = post(server.address, "/v1/responses", &shortened).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let prompt = engine.last().prompt;
    assert!(prompt.contains("Keep this.") && prompt.contains("third"), "{prompt}");
    assert!(!prompt.contains("first word"), "the oldest turn went");
    server.stop().await;
}

#[tokio::test]
async fn claude_code_goes_on_with_pictures_and_server_tools_in_its_history() {
    let (server, engine) = with_engine(" to=user<|message|>{\"a\": 1}<|eot|>").await;
    let picture =
        json!({"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA"}});
    let messages = json!([
        {"role": "user", "content": [{"type": "text", "text": "look"}, picture]},
        {"role": "assistant", "content": [
            {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
            {"type": "tool_use", "id": "toolu_1", "name": "Read", "input": {"path": "a.png"}}]},
        {"role": "user", "content": [
            {"type": "tool_result", "tool_use_id": "toolu_1", "content": [picture]},
            {"type": "tool_result", "tool_use_id": "toolu_2", "content": [{"type": "tool_reference", "tool_name": "Grep"}]}]},
        {"role": "system", "content": "The mode is now plan."},
        {"role": "user", "content": "what now?"},
    ]);
    let tools = json!([{"type": "web_search_20250305", "name": "web_search"}, {"name": "Read", "input_schema": {"type": "object"}}]);
    let schema = json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]});
    let body = json!({"max_tokens": 100, "messages": messages, "tools": tools,
        "output_config": {"format": {"type": "json_schema", "schema": schema}}});
    let answer = post(server.address, "/v1/messages", &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    assert_eq!(answer.json()["content"][0]["text"], "{\"a\": 1}");
    let notice = "tools[0]: left out, tools of type \"web_search_20250305\" are not to be had here";
    assert_eq!(answer.header("x-muser-notice"), Some(notice));
    let prompt = engine.last().prompt;
    assert_eq!(prompt.matches("[image: this model reads text only]").count(), 2, "{prompt}");
    assert!(prompt.contains("[tool: Grep]"), "{prompt}");
    let reminder = prompt.find("The mode is now plan.").expect("the reminder is there");
    assert!(prompt.find("[tool: Grep]").is_some_and(|before| before < reminder), "it stays where it is");
    server.stop().await;
}

#[tokio::test]
async fn an_answer_that_was_begun_is_gone_on_with() {
    let (server, engine) = with_engine(" upon a time.<|eot|>").await;
    let messages = json!([{"role": "user", "content": "A tale."}, {"role": "assistant", "content": "Once"}]);
    let body = json!({"max_tokens": 50, "messages": messages});
    let answer = post(server.address, "/v1/messages", &body).await.json();
    assert_eq!(answer["content"], json!([{"type": "text", "text": " upon a time."}]));
    assert!(
        engine.last().prompt.ends_with("<|start|>assistant to=user<|message|>Once"),
        "{}",
        engine.last().prompt
    );
    let chat = json!({"messages": messages, "continue_final_message": true, "add_generation_prompt": false});
    let answer = post(server.address, "/v1/chat/completions", &chat).await.json();
    assert_eq!(answer["choices"][0]["message"]["content"], " upon a time.");
    assert!(engine.last().prompt.ends_with("to=user<|message|>Once"));
    server.stop().await;
}

/// Words that mean something to their vendor's servers alone, and requests that say little.
#[tokio::test]
async fn what_means_nothing_here_is_ignored() {
    let (server, engine) = with_engine(" to=user<|message|>ok<|eot|>").await;
    let little = json!({"input": [], "instructions": "Say something.", "max_output_tokens": 1});
    let answer = post(server.address, "/v1/responses", &little).await;
    assert_eq!(answer.status, 200, "{}", answer.text());
    let cached = json!({"type": "ephemeral", "ttl": "1h", "scope": "global"});
    let body = json!({"max_tokens": 128_000, "metadata": {"user_id": "u"}, "context_management": {"edits": []},
        "system": [{"type": "text", "text": "Be brief.", "cache_control": cached}],
        "tools": [{"name": "Read", "input_schema": {"type": "object"}, "cache_control": cached, "defer_loading": true}],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "look", "cache_control": cached}]},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t1", "name": "Read", "input": {}}]},
            {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t1", "content": "here"}]}]});
    let headers = "content-type: application/json\r\nanthropic-version: 2023-06-01\r\nanthropic-beta: a-2025-01-01,b\r\n";
    let answer =
        request(server.address, "POST", "/v1/messages?beta=true", headers, body.to_string().as_bytes()).await;
    assert_eq!((answer.status, answer.header("x-muser-notice")), (200, None), "{}", answer.text());
    let prompt = engine.last().prompt;
    assert!(
        prompt.contains("here") && !prompt.contains("ephemeral") && !prompt.contains("defer_loading"),
        "{prompt}"
    );
    server.stop().await;
}
