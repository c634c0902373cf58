use super::*;
use serde_json::json;

#[test]
fn references_are_followed_inside_the_schema_only() {
    let root = json!({
        "$id": "https://x.example/root", "$defs": {
            "a/b": {"const": 1}, "c d": {"const": 2}, "n": {"$anchor": "here", "const": 3},
            "i": {"$id": "inner", "$defs": {"z": {"const": 4}}},
        },
        "properties": {"p": {"const": 5}},
    });
    let resolver = Resolver::new(&root);
    let value = |reference: &str| resolver.target(reference).map(|found| found["const"].clone());
    assert_eq!(value("#/$defs/a~1b"), Some(json!(1)));
    assert_eq!(value("#/%24defs/c%20d"), Some(json!(2)));
    assert_eq!(value("#here"), Some(json!(3)));
    assert_eq!(value("inner#/$defs/z"), Some(json!(4)));
    assert_eq!(value("https://x.example/root#/properties/p"), Some(json!(5)));
    assert_eq!(resolver.target("#"), Some(&root));
    assert_eq!(resolver.target("#/"), Some(&root));
    for nowhere in ["#/$defs/none", "https://elsewhere.example/x", "#nobody", "#/%zz"] {
        assert_eq!(resolver.target(nowhere), None, "{nowhere}");
    }
}

#[test]
fn chains_of_references_end_or_are_none() {
    let root = json!({"$defs": {
        "a": {"$ref": "#/$defs/b", "description": "x"}, "b": {"$ref": "#/$defs/c"}, "c": {"type": "null"},
        "loop": {"$ref": "#/$defs/pool"}, "pool": {"$ref": "#/$defs/loop"},
    }});
    let resolver = Resolver::new(&root);
    let end = |name: &str| resolver.end_of_chain(&root["$defs"][name]);
    assert_eq!(end("a"), Some(&json!({"type": "null"})));
    assert_eq!(end("loop"), None);
}

fn names(schema: &Value) -> Vec<Vec<String>> {
    let resolver = Resolver::new(schema);
    let name = |shape: &Shape<'_>, key: &str| {
        let required = if shape.required.contains(&key) { "!" } else { "" };
        format!("{key}{required}")
    };
    let of_shape = |shape: &Shape<'_>| {
        let mut names: Vec<String> = shape.properties.iter().map(|(key, _)| name(shape, key)).collect();
        names.extend(shape.others.is_some().then(|| "…".to_owned()));
        names
    };
    shapes(&resolver, schema).iter().map(of_shape).collect()
}

#[test]
fn parameters_are_found_wherever_they_are_said() {
    let check = |schema: Value, expected: &[&[&str]]| assert_eq!(names(&schema), expected, "{schema}");
    let a = json!({"properties": {"a": {}, "b": {}}, "required": ["a"]});
    check(json!({"type": "object"}), &[&[]]);
    check(a.clone(), &[&["a!", "b"]]);
    check(json!({"$ref": "#/$defs/a", "$defs": {"a": a}}), &[&["a!", "b"]]);
    check(json!({"allOf": [a, {"properties": {"c": {}}, "required": ["b"]}]}), &[&["a!", "b!", "c"]]);
    check(
        json!({"anyOf": [a, {"properties": {"c": {}}}, {"type": "null"}], "required": ["x"]}),
        &[&["a!", "b", "x!"], &["c", "x!"]],
    );
    check(json!({"properties": {"a": {}}, "additionalProperties": {"type": "integer"}}), &[&["a", "…"]]);
    check(json!({"additionalProperties": false}), &[&[]]);
    check(json!({"$ref": "#"}), &[&[]]);
    // Many shapes become one that takes what any of them takes.
    let many: Vec<Value> = (0..40)
        .map(|index| json!({"properties": {"kind": {"const": index}, (format!("k{index}")): {}}, "required": ["kind"]}))
        .collect();
    let merged = names(&json!({"oneOf": many}));
    assert_eq!((merged.len(), merged[0].len(), merged[0][0].as_str()), (1, 41, "kind!"));
}

#[test]
fn walks_are_bounded() {
    // Each level names the next one many times.
    let mut defs = Map::new();
    for level in 0..15 {
        let next = json!({"$ref": format!("#/$defs/l{}", level + 1)});
        defs.insert(format!("l{level}"), json!({"anyOf": vec![next; 8]}));
    }
    let root = json!({"$defs": defs, "$ref": "#/$defs/l0"});
    let start = std::time::Instant::now();
    assert_eq!(Resolver::new(&root).types_of(&root), Types::UNKNOWN);
    assert!(!names(&root).is_empty());
    assert!(start.elapsed().as_secs() < 10, "{:?}", start.elapsed());
}
