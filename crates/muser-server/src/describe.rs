//! The description of the interface, for programs (`/openapi.json`) and for people (`docs/api.md`).
//!
//! Both are printed from the tables that check requests, so they cannot say something else than the code does. A
//! test compares the committed page with what is printed now.

use std::fmt::Write as _;

use serde_json::{Map, Value, json};

use crate::dashboard;
use crate::fields::{Field, Kind, Support};

/// One route.
#[derive(Debug, Clone, Copy)]
pub struct Route {
    /// `GET`, `POST` or `DELETE`.
    pub method: &'static str,
    /// The path, with `{name}` for a variable part.
    pub path: &'static str,
    /// Whose shape it has.
    pub family: &'static str,
    /// One sentence.
    pub summary: &'static str,
    /// The body's fields; empty for GET.
    pub fields: &'static [Field],
    /// Content types of a 200.
    pub answers: &'static [&'static str],
}

/// Statuses that any route may answer with besides 200.
const FAULTS: [(&str, &str); 13] = [
    ("400", "The request cannot be accepted; the error names the field"),
    ("401", "A key is needed"),
    ("403", "A web page of another origin"),
    ("404", "No such model or route"),
    ("405", "Another method is needed"),
    ("408", "The body did not arrive in time"),
    ("409", "The name is taken"),
    ("413", "The body is too large"),
    ("429", "The queue is full; Retry-After says when to come back"),
    ("500", "A fault of the server"),
    ("501", "This server or the loaded backend does not do that"),
    ("507", "The store of packs is full"),
    ("503", "Loading, stopping, or the device is gone"),
];

/// The OpenAPI 3.1 document.
pub fn openapi(routes: &[Route]) -> Value {
    let mut paths = Map::new();
    for route in routes {
        let item = paths.entry(route.path).or_insert_with(|| json!({}));
        item[route.method.to_ascii_lowercase()] = operation(route);
    }
    json!({
        "openapi": "3.1.0",
        "info": {
            "title": "muser",
            "version": env!("CARGO_PKG_VERSION"),
            "description": "OpenAI, Anthropic, Ollama and llama-server shapes over one engine. Unknown fields are ignored.",
        },
        "paths": paths,
        "components": {
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
        "security": [{}, {"bearer": []}, {"header": []}],
    })
}

fn operation(route: &Route) -> Value {
    let content: Map<String, Value> =
        route.answers.iter().map(|kind| ((*kind).to_owned(), json!({"schema": {}}))).collect();
    let mut responses = Map::new();
    responses.insert("200".into(), json!({"description": "Done", "content": content}));
    for (status, meaning) in FAULTS {
        let fault =
            json!({"description": meaning, "content": {"application/json": {"schema": {"type": "object"}}}});
        responses.insert(status.into(), fault);
    }
    let mut operation = json!({"summary": route.summary, "tags": [route.family], "responses": responses});
    if !route.fields.is_empty() {
        operation["requestBody"] = json!({
            "required": true,
            "content": {"application/json": {"schema": object_schema(route.fields)}},
        });
    }
    let variables: Vec<Value> = route
        .path
        .split('/')
        .filter_map(|part| part.strip_prefix('{')?.strip_suffix('}'))
        .map(|name| json!({"name": name, "in": "path", "required": true, "schema": {"type": "string"}}))
        .collect();
    if !variables.is_empty() {
        operation["parameters"] = Value::Array(variables);
    }
    operation
}

fn object_schema(fields: &[Field]) -> Value {
    let mut properties = Map::new();
    let mut required = Vec::new();
    for field in fields {
        if field.support == Support::Refused {
            continue;
        }
        let mut schema = schema(field.kind);
        if field.support == Support::Required {
            required.push(Value::from(field.name));
        }
        if field.support == Support::Ignored {
            schema["description"] = format!("Ignored: {}", field.note).into();
        } else if !field.note.is_empty() {
            schema["description"] = field.note.into();
        }
        properties.insert(field.name.into(), schema);
    }
    let mut schema = json!({"type": "object", "properties": properties});
    if !required.is_empty() {
        schema["required"] = Value::Array(required);
    }
    schema
}

fn schema(kind: Kind) -> Value {
    match kind {
        Kind::Bool => json!({"type": "boolean"}),
        Kind::Text => json!({"type": "string"}),
        Kind::Integer { min, max } => {
            let mut schema = json!({"type": "integer"});
            if min != i64::MIN {
                schema["minimum"] = min.into();
            }
            if max < u32::MAX as i64 {
                schema["maximum"] = max.into();
            }
            schema
        }
        Kind::Seed => json!({"type": "integer", "minimum": i64::MIN, "maximum": u64::MAX}),
        Kind::Number { min, max } => json!({"type": "number", "minimum": min, "maximum": max}),
        Kind::OneOf(words) => json!({"type": "string", "enum": words}),
        Kind::List(item) => json!({"type": "array", "items": schema(*item)}),
        Kind::Object(fields) => object_schema(fields),
        Kind::Map => json!({"type": "object"}),
        Kind::Either(kinds) => json!({"anyOf": kinds.iter().copied().map(schema).collect::<Vec<_>>()}),
        Kind::Any => json!({}),
    }
}

/// The page for people.
pub fn markdown(routes: &[Route], aliases: &[(&str, &str)]) -> String {
    let mut page = String::from(
        "# HTTP interface\n\nPrinted from the tables in `crates/muser-server` that check requests; do not edit.\n\n\
         Unknown fields are ignored and logged once. `null` counts as absent. A wrong type is a 400 whose error \
         names the field in `param`. Errors have the shape of the route's family. With a key file every route \
         but `/health` and the pages' assets needs a key, as `Authorization: Bearer` or `x-api-key`.\n\n\
         | route | family | what |\n|---|---|---|\n",
    );
    for route in routes {
        let _ =
            writeln!(page, "| `{} {}` | {} | {} |", route.method, route.path, route.family, route.summary);
    }
    page.push_str("\nThe same under other paths:\n\n| path | as |\n|---|---|\n");
    for (path, same_as) in aliases {
        let _ = writeln!(page, "| `{path}` | `{same_as}` |");
    }
    for route in routes.iter().filter(|route| !route.fields.is_empty()) {
        let _ = write!(page, "\n## `{} {}`\n\n{}\n\n", route.method, route.path, route.summary);
        page.push_str("| field | value | | note |\n|---|---|---|---|\n");
        rows(&mut page, route.fields, "");
    }
    dashboard::describe(&mut page);
    page.push_str("\n## Errors\n\n| status | meaning |\n|---|---|\n");
    for (status, meaning) in FAULTS {
        let _ = writeln!(page, "| {status} | {meaning} |");
    }
    page
}

fn rows(page: &mut String, fields: &[Field], path: &str) {
    for field in fields {
        let support = match field.support {
            Support::Required => "required",
            Support::Supported => "supported",
            Support::Ignored => "ignored",
            Support::Refused => "refused",
        };
        let name = format!("{path}{}", field.name);
        let kind = match field.support {
            Support::Refused | Support::Ignored => "any value".to_owned(),
            _ => field.kind.describe(),
        };
        let cell = |text: &str| text.replace('|', "\\|");
        let _ = writeln!(page, "| `{name}` | {} | {support} | {} |", cell(&kind), cell(field.note));
        nested(page, field.kind, &name);
    }
}

fn nested(page: &mut String, kind: Kind, path: &str) {
    match kind {
        Kind::Object(fields) => rows(page, fields, &format!("{path}.")),
        Kind::List(item) => nested(page, *item, &format!("{path}[]")),
        Kind::Either(kinds) => kinds.iter().for_each(|kind| nested(page, *kind, path)),
        _ => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::routes::{ALIASES, ROUTES};

    #[test]
    fn api_page_is_current() {
        let path = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/api.md");
        let current = markdown(ROUTES, ALIASES);
        if std::env::var_os("MUSER_UPDATE_DOCS").is_some() {
            std::fs::write(&path, &current).expect("docs/api.md can be written");
        }
        let committed = std::fs::read_to_string(&path).unwrap_or_default();
        assert!(
            committed == current,
            "docs/api.md is stale: run MUSER_UPDATE_DOCS=1 cargo test -p muser-server api_page"
        );
    }

    #[test]
    fn refused_fields_are_not_offered_to_programs() {
        let document = openapi(ROUTES);
        let schema = &document["paths"]["/v1/responses"]["post"]["requestBody"]["content"]["application/json"]
            ["schema"];
        assert!(schema["properties"]["input"].is_object());
        assert!(schema["properties"].get("background").is_none());
        let schema = &document["paths"]["/v1/chat/completions"]["post"]["requestBody"]["content"]["application/json"]
            ["schema"];
        assert_eq!(schema["required"], json!(["messages"]));
    }
}
