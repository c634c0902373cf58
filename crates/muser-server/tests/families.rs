//! The other families over a scripted engine: text completions, Responses, Anthropic, Ollama, llama-server.

mod support;

use muser_server::ServerConfig;
use serde_json::{Value, json};
use support::{Answer, Running, Script, Scripted, get, post};

const CALL: &str = "<atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"a\">1</atem:parameter>\n</atem:invoke>\n</atem:function_calls>";
const REASONED: &str = " to=self<|message|>Hm.<|eom|><|start|>assistant to=user<|message|>Hello!<|eot|>";

fn called() -> String {
    format!(" to=self<|message|>Hm.<|eom|><|start|>assistant to=f<|message|>{CALL}<|eot|>")
}

/// O7: the least that wrappers send, and what they count on.
#[tokio::test]
async fn text_completions() {
    let server = Running::saying("one two three").await;
    let body = json!({"model": "x", "prompt": "a", "n": 1, "temperature": 0, "max_tokens": 50});
    let object = post(server.address, "/v1/completions", &body).await.json();
    assert_eq!(object["object"], "text_completion");
    assert_eq!(object["choices"][0]["text"], "one two three");
    assert_eq!(object["choices"][0]["finish_reason"], "length");
    assert!(object["usage"]["total_tokens"].as_u64() > Some(0));
    let body = json!({"prompt": ["a", "b"], "n": 2, "max_tokens": 50, "echo": true});
    let object = post(server.address, "/v1/completions", &body).await.json();
    let texts: Vec<&str> = object["choices"]
        .as_array()
        .expect("list")
        .iter()
        .filter_map(|choice| choice["text"].as_str())
        .collect();
    assert_eq!(texts, ["aone two three", "aone two three", "bone two three", "bone two three"]);
    let body = json!({"prompt": ["a", "b"], "max_tokens": 50, "stream": true, "stream_options": {"include_usage": true}});
    let events = post(server.address, "/v1/completions", &body).await.events();
    for index in 0..2 {
        let text: String = events
            .iter()
            .filter(|event| event["choices"][0]["index"] == index)
            .filter_map(|event| event["choices"][0]["text"].as_str())
            .collect();
        assert_eq!(text, "one two three");
    }
    assert_eq!(events.last().expect("events")["choices"], json!([]));
    server.stop().await;
}

#[tokio::test]
async fn what_gateways_ask() {
    let server = Running::saying("one").await;
    let ask = async |path: &str| get(server.address, path).await.json();
    let name = ask("/v1/models").await["data"][0]["id"].clone();
    for path in ["/model_info", "/get_model_info", "/server_info", "/get_server_info"] {
        let said = ask(path).await;
        assert_eq!(said["served_model_name"], name, "{path}");
        // A gateway would look for these on a hub.
        assert!(said.get("model_path").is_none() && said.get("tokenizer_path").is_none(), "{path}");
    }
    assert_eq!(ask("/server_info").await["max_running_requests"], 4);
    let load = ask("/get_load").await;
    assert_eq!((&load[0]["num_reqs"], &load[0]["num_waiting_reqs"]), (&json!(0), &json!(0)));
    let loads = ask("/v1/loads?include=core").await;
    assert_eq!((&loads["loads"][0]["num_total_reqs"], &loads["dp_rank_count"]), (&json!(0), &json!(1)));
    assert_eq!(ask("/load").await, json!({"server_load": 0}));
    server.stop().await;
}

/// Nobody is dialled because a request says so: nothing listens there, and the answer is the one without.
#[tokio::test]
async fn a_node_that_a_request_names_is_counted_and_not_asked() {
    let server = Running::saying("one two").await;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    listener.set_nonblocking(true).expect("so that it does not wait");
    let address = listener.local_addr().expect("an address");
    let named = json!({
        "do_remote_prefill": true, "remote_engine_id": "nobody",
        "remote_host": address.ip().to_string(), "remote_port": address.port(),
    });
    let first = json!({"do_remote_decode": true, "remote_engine_id": null, "remote_host": null});
    for (params, counted) in [(&first, 0), (&json!("text"), 0), (&named, 1), (&named, 2)] {
        let body = json!({"prompt": "a", "max_tokens": 50, "kv_transfer_params": params});
        let said = post(server.address, "/v1/completions", &body).await;
        assert_eq!(said.json()["choices"][0]["text"], "one two", "{params}");
        let metrics = get(server.address, "/metrics").await;
        let line = format!(
            "muser:kv_transfer_params_ignored_total{{model_name=\"{}\"}} {counted}",
            name_of(&server).await
        );
        assert!(metrics.text().contains(&line), "{line} in {}", metrics.text());
    }
    assert!(listener.accept().is_err(), "somebody dialled");
    server.stop().await;
}

async fn name_of(server: &Running) -> String {
    let models = get(server.address, "/v1/models").await.json();
    models["data"][0]["id"].as_str().expect("a name").to_owned()
}

fn named(answer: &Answer) -> Vec<(String, Value)> {
    let mut found = Vec::new();
    let mut name = String::new();
    for line in answer.text().lines() {
        if let Some(event) = line.strip_prefix("event: ") {
            event.clone_into(&mut name);
        } else if let Some(data) = line.strip_prefix("data: ") {
            found.push((std::mem::take(&mut name), serde_json::from_str(data).expect("JSON")));
        }
    }
    found
}

#[tokio::test]
async fn anthropic_messages() {
    let server = Running::saying(&called()).await;
    let tools =
        json!([{"name": "f", "input_schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}]);
    let body = json!({"model": "x", "max_tokens": 100, "tools": tools, "messages": [{"role": "user", "content": "a"}]});
    let object = post(server.address, "/v1/messages", &body).await.json();
    assert_eq!(object["type"], "message");
    assert_eq!(object["stop_reason"], "tool_use");
    assert_eq!(object["content"][0]["thinking"], "Hm.");
    assert_eq!(object["content"][1]["input"], json!({"a": 1}));
    assert!(object["content"][1]["id"].as_str().is_some_and(|id| id.starts_with("toolu_")));
    let mut streamed = body.clone();
    streamed["stream"] = true.into();
    let events = named(&post(server.address, "/v1/messages", &streamed).await);
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names.first(), Some(&"message_start"));
    assert_eq!(names.last(), Some(&"message_stop"));
    assert!(events.iter().all(|(name, value)| value["type"] == name.as_str()));
    let json: String =
        events.iter().filter_map(|(_, value)| value["delta"]["partial_json"].as_str()).collect();
    assert_eq!(serde_json::from_str::<Value>(&json).expect("JSON"), json!({"a": 1}));
    let mut count = body;
    count["max_tokens"].take();
    let counted = post(server.address, "/v1/messages/count_tokens", &count).await.json();
    assert_eq!(counted["input_tokens"], object["usage"]["input_tokens"]);
    let fault = post(server.address, "/v1/messages", &json!({"max_tokens": 1, "messages": []})).await;
    assert_eq!((fault.status, fault.json()["type"].as_str()), (400, Some("error")));
    server.stop().await;
}

/// K9, the server's half: the prompt is the same.
#[tokio::test]
async fn billing_numbers_do_not_change_the_prompt() {
    let engine = Scripted::new(|_| Script::saying(REASONED));
    let server = Running::scripted(ServerConfig::default(), engine.clone()).await;
    let mut prompts = Vec::new();
    for nonce in ["aaaa", "bbbb"] {
        let body = json!({"max_tokens": 5, "messages": [{"role": "user", "content": "a"}], "system": [
            {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2; cch={nonce};")},
            {"type": "text", "text": "Be brief."},
        ]});
        assert_eq!(post(server.address, "/v1/messages", &body).await.status, 200);
        prompts.push(engine.last().ids);
    }
    assert_eq!(prompts[0], prompts[1]);
    server.stop().await;
}

/// O3.
#[tokio::test]
async fn responses() {
    let server = Running::saying(REASONED).await;
    let body = json!({"model": "x", "input": [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {"type": "reasoning", "content": null},
        {"role": "assistant", "content": [{"type": "output_text", "text": "b"}]},
        {"role": "user", "content": "c"},
    ]});
    let object = post(server.address, "/v1/responses", &body).await.json();
    assert_eq!(object["object"], "response");
    assert_eq!(object["status"], "completed");
    assert_eq!(object["output"][1]["content"][0]["text"], "Hello!");
    assert!(object["usage"]["output_tokens_details"]["reasoning_tokens"].as_u64() > Some(0));
    let mut streamed = body;
    streamed["stream"] = true.into();
    let events = named(&post(server.address, "/v1/responses", &streamed).await);
    for (number, (name, value)) in events.iter().enumerate() {
        assert_eq!(value["type"], name.as_str());
        assert_eq!(value["sequence_number"], number);
    }
    assert_eq!(events[0].0, "response.created");
    let (last, payload) = events.last().expect("events");
    assert_eq!(last, "response.completed");
    assert_eq!(payload["response"]["output"][1]["content"][0]["text"], "Hello!");
    let text: String = events
        .iter()
        .filter(|(name, _)| name == "response.output_text.delta")
        .filter_map(|(_, value)| value["delta"].as_str())
        .collect();
    assert_eq!(text, "Hello!");
    let stored =
        post(server.address, "/v1/responses", &json!({"input": "a", "previous_response_id": "resp_1"})).await;
    assert_eq!(
        (stored.status, stored.json()["error"]["param"].as_str()),
        (400, Some("previous_response_id"))
    );
    server.stop().await;
}

#[tokio::test]
async fn ollama() {
    let server = Running::saying(&called()).await;
    let tools = json!([{"type": "function", "function": {"name": "f", "parameters": {
        "type": "object", "properties": {"a": {"type": "integer"}}}}}]);
    let body = json!({"model": "x", "messages": [{"role": "user", "content": "a"}], "tools": tools});
    let lines = post(server.address, "/api/chat", &body).await.lines();
    let last = lines.last().expect("lines");
    assert_eq!((&last["done"], &last["done_reason"]), (&json!(true), &json!("stop")));
    let calls: Vec<&Value> =
        lines.iter().filter(|line| line["message"].get("tool_calls").is_some()).collect();
    let made = &calls[0]["message"]["tool_calls"];
    assert_eq!(made[0]["function"], json!({"index": 0, "name": "f", "arguments": {"a": 1}}));
    assert!(made[0]["id"].as_str().is_some_and(|id| id.starts_with("call_")), "{made}");
    let mut whole = body;
    whole["stream"] = false.into();
    let object = post(server.address, "/api/chat", &whole).await.json();
    assert_eq!(object["message"]["thinking"], "Hm.");
    assert!(object["eval_count"].as_u64() > Some(0));
    let tags = get(server.address, "/api/tags").await.json();
    assert_eq!(tags["models"][0]["name"], support::MODEL);
    let shown = post(server.address, "/api/show", &json!({"model": "x"})).await.json();
    assert_eq!(shown["model_info"]["muse-glimmer.context_length"], support::CONTEXT);
    let generated =
        post(server.address, "/api/generate", &json!({"prompt": "a", "stream": false})).await.json();
    assert!(generated["response"].is_string());
    for (path, body) in
        [("/api/chat", json!({"model": "x"})), ("/api/generate", json!({"model": "x", "keep_alive": 0}))]
    {
        let loaded = post(server.address, path, &body).await.json();
        assert_eq!((&loaded["done"], &loaded["done_reason"]), (&json!(true), &json!("load")), "{path}");
    }
    for path in ["/api/tags", "/api/ps"] {
        let digest = get(server.address, path).await.json()["models"][0]["digest"].clone();
        assert!(digest.as_str().is_some_and(|digest| digest.len() == 64), "clients cut it: {digest}");
    }
    // Clients ask for at least 0.6.4, some for 0.12.
    let version = get(server.address, "/api/version").await.json();
    let parts: Vec<u32> = version["version"]
        .as_str()
        .unwrap_or_default()
        .split('.')
        .filter_map(|part| part.parse().ok())
        .collect();
    assert!(parts.len() == 3 && (parts[0], parts[1]) >= (0, 12), "{version}");
    let fault = post(server.address, "/api/chat", &json!({"messages": [{"role": "x"}]})).await;
    assert!(fault.status == 400 && fault.json()["error"].is_string());
    server.stop().await;
}

#[tokio::test]
async fn llama_server() {
    let server = Running::saying("one two STOP three").await;
    let body = json!({"prompt": ["a ", 5, " b"], "n_predict": 50, "stop": ["STOP"], "seed": 7});
    let object = post(server.address, "/completion", &body).await.json();
    assert_eq!(object["content"], "one two ");
    assert_eq!((&object["stop_type"], &object["stopping_word"]), (&json!("word"), &json!("STOP")));
    assert_eq!(object["generation_settings"]["seed"], 7);
    let mut streamed = body;
    streamed["stream"] = true.into();
    let events = post(server.address, "/completion", &streamed).await.events();
    let text: String = events.iter().filter_map(|event| event["content"].as_str()).collect();
    assert_eq!(text, "one two ");
    assert_eq!(events.last().expect("events")["stop"], true);
    let text = "Hello, wörld! 🦊";
    let tokens = post(server.address, "/tokenize", &json!({"content": text})).await.json()["tokens"].clone();
    let back = post(server.address, "/detokenize", &json!({"tokens": tokens})).await.json();
    assert_eq!(back["content"], text);
    let pieces =
        post(server.address, "/tokenize", &json!({"content": text, "with_pieces": true})).await.json();
    assert!(pieces["tokens"][0]["piece"].is_string());
    let counted = post(server.address, "/tokenize", &json!({"prompt": text})).await.json();
    let bare =
        post(server.address, "/tokenize", &json!({"prompt": text, "add_special_tokens": false})).await.json();
    assert_eq!(bare["tokens"], tokens);
    assert_eq!(counted["count"].as_u64(), bare["count"].as_u64().map(|count| count + 1));
    let turns = json!({"messages": [{"role": "user", "content": "Hi"}]});
    assert!(post(server.address, "/tokenize", &turns).await.json()["count"].as_u64() > Some(3));
    assert_eq!(post(server.address, "/tokenize", &json!({})).await.status, 400);
    let applied =
        post(server.address, "/apply-template", &json!({"messages": [{"role": "user", "content": "Hi"}]}))
            .await;
    assert!(applied.json()["prompt"].as_str().is_some_and(|prompt| prompt.contains("Hi")));
    let slots = get(server.address, "/slots").await.json();
    assert_eq!(slots.as_array().map(Vec::len), Some(4));
    // Nobody waits; how long somebody would is known once a request has ended.
    assert_eq!(slots[0]["queue"]["waiting"], 0);
    let wait = &slots[0]["queue"]["expected_wait_s"];
    assert!(wait.is_null() || wait.as_f64().is_some_and(|seconds| seconds > 0.0), "{wait}");
    let props = get(server.address, "/props").await.json();
    assert_eq!(props["total_slots"], 4);
    assert_eq!((&props["kv_type"], &props["numeric_route"]), (&"16".into(), &"script".into()));
    assert_eq!(post(server.address, "/infill", &json!({})).await.status, 501);
    server.stop().await;
}

#[tokio::test]
async fn models() {
    let server = Running::saying("x").await;
    let list = get(server.address, "/v1/models").await.json();
    assert_eq!(list["object"], "list");
    assert_eq!(list["data"][0]["id"], support::MODEL);
    assert_eq!(list["data"][0]["context_length"], support::CONTEXT);
    assert_eq!(get(server.address, "/v1/models/muse-tiny").await.status, 200);
    assert_eq!(get(server.address, "/v1/models/muse-tiny:latest").await.status, 200);
    assert_eq!(get(server.address, "/v1/models/other/name").await.status, 404);
    server.stop().await;
}

/// Paths without the version, as clients of llama-server and vLLM have them.
#[tokio::test]
async fn other_paths_of_the_same() {
    let server = Running::saying(REASONED).await;
    for (path, same_as) in muser_server::routes::ALIASES {
        let body = json!({"messages": [{"role": "user", "content": "a"}], "prompt": "a", "input": "a", "max_tokens": 3});
        let method = if ["/models", "/v1/health", "/version"].contains(path) { "GET" } else { "POST" };
        let ask = async |path: &str| {
            let answer =
                support::request(server.address, method, path, "", body.to_string().as_bytes()).await;
            let keys: Vec<String> = answer.json().as_object().expect("object").keys().cloned().collect();
            (answer.status, keys)
        };
        let (status, keys) = ask(path).await;
        assert_eq!((status, keys), ask(same_as).await, "{path}");
    }
    server.stop().await;
}

const CUT: &str =
    " to=f<|message|><atem:function_calls>\n<atem:invoke name=\"f\">\n<atem:parameter name=\"city\">Par";

/// A call that was cut off is said to be cut in every dialect, and what came out can be sent back.
#[tokio::test]
async fn a_call_that_was_cut_is_said_to_be_and_can_be_sent_back() {
    let server = Running::saying(CUT).await;
    let at = server.address;
    let schema = json!({"type": "object", "properties": {"city": {"type": "string"}}});
    let function = json!({"name": "f", "parameters": schema});
    let asked = json!({"role": "user", "content": "a"});
    let ask = async |path: &str, body: Value| {
        let answer = post(at, path, &body).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.text());
        answer.json()
    };

    let chat = json!({"messages": [asked], "tools": [{"type": "function", "function": function}]});
    let choice = ask("/v1/chat/completions", chat.clone()).await["choices"][0].clone();
    assert_eq!(choice["finish_reason"], "length");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"city\":\"Par");
    let mut again = chat;
    again["messages"] = json!([asked, choice["message"], asked]);
    ask("/v1/chat/completions", again).await;

    let tools = json!([{"name": "f", "input_schema": schema}]);
    let first = json!({"max_tokens": 50, "messages": [asked], "tools": tools});
    let message = ask("/v1/messages", first.clone()).await;
    assert_eq!(message["stop_reason"], "max_tokens");
    assert_eq!(message["content"][0]["input"], json!({"partial_json": "{\"city\":\"Par"}));
    let mut again = first;
    again["messages"] = json!([asked, {"role": "assistant", "content": message["content"]}, asked]);
    ask("/v1/messages", again).await;

    let tools = json!([{"type": "function", "name": "f", "parameters": schema}]);
    let response = ask("/v1/responses", json!({"input": "a", "tools": tools})).await;
    assert_eq!(
        (&response["status"], &response["output"][0]["status"]),
        (&json!("incomplete"), &json!("incomplete"))
    );
    let input = json!([asked, response["output"][0], asked]);
    ask("/v1/responses", json!({"input": input, "tools": tools})).await;

    let tools = json!([{"type": "function", "function": function}]);
    let body = json!({"messages": [asked], "tools": tools, "stream": false});
    let line = ask("/api/chat", body).await;
    assert_eq!(line["done_reason"], "length");
    assert_eq!(
        line["message"]["tool_calls"][0]["function"]["arguments"],
        json!({"partial_json": "{\"city\":\"Par"})
    );
    ask("/api/chat", json!({"messages": [asked, line["message"], asked], "tools": tools, "stream": false}))
        .await;
    server.stop().await;
}

/// Text before and after calls is given out in the order it came.
#[tokio::test]
async fn text_and_calls_come_in_any_order() {
    let said = format!(
        " to=user<|message|>I'll look.<|eom|><|start|>assistant to=f<|message|>{CALL}<|eom|><|start|>assistant \
         to=user<|message|>Done.<|eot|>"
    );
    let server = Running::saying(&said).await;
    let tools =
        json!([{"type": "function", "function": {"name": "f", "parameters": {"properties": {"a": {}}}}}]);
    let body = json!({"messages": [{"role": "user", "content": "a"}], "tools": tools});
    let choice = post(server.address, "/v1/chat/completions", &body).await.json()["choices"][0].clone();
    assert_eq!(choice["message"]["content"], "I'll look.\nDone.");
    assert_eq!(choice["message"]["tool_calls"][0]["function"]["arguments"], "{\"a\":1}");
    assert_eq!(choice["finish_reason"], "tool_calls");
    let tools = json!([{"name": "f", "input_schema": {"properties": {"a": {}}}}]);
    let body = json!({"max_tokens": 200, "messages": [{"role": "user", "content": "a"}], "tools": tools, "stream": true});
    let events = named(&post(server.address, "/v1/messages", &body).await);
    let blocks: Vec<&str> = events
        .iter()
        .filter(|(name, _)| name == "content_block_start")
        .filter_map(|(_, event)| event["content_block"]["type"].as_str())
        .collect();
    assert_eq!(blocks, ["text", "tool_use", "text"]);
    server.stop().await;
}
