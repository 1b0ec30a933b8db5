use serde_json::json;

use super::*;

fn values(text: &str) -> Vec<Result<Value, YamlError>> {
    Documents::new(text).map(|document| document.map(|node| node.to_value())).collect()
}

fn one(text: &str) -> Value {
    let mut values = values(text);
    assert_eq!(values.len(), 1, "{values:?}");
    values.remove(0).unwrap()
}

#[test]
fn every_document_of_a_file_is_read_and_empty_ones_are_no_documents() {
    let all = values("a: 1\n---\n# nothing\n---\nb: [x, 'y']\n---\n");
    assert_eq!(
        all.into_iter().filter_map(Result::ok).filter(|v| !v.is_null()).collect::<Vec<_>>(),
        [json!({"a": 1}), json!({"b": ["x", "y"]})]
    );
    assert!(values("").is_empty());
    assert!(values("# only a comment\n").is_empty());
}

#[test]
fn a_broken_document_costs_only_itself() {
    let all = values("a: 1\n---\nb: [1, 2\nc: }\n---\nd: 2\n");
    assert_eq!(all.len(), 3, "{all:?}");
    assert_eq!(all[0], Ok(json!({"a": 1})));
    let error = all[1].as_ref().unwrap_err();
    assert!((3..=4).contains(&error.line), "{error:?}");
    assert_eq!(all[2], Ok(json!({"d": 2})));
}

#[test]
fn plain_scalars_follow_the_core_schema() {
    assert_eq!(
        one("[~, null, true, False, 12, -3, 0x1f, 0o17, 1.5, 1e3, yes, 1.2.3, 0.0.0.0/0, '12', \"true\", \
             +7, .5]"),
        json!([
            null,
            null,
            true,
            false,
            12,
            -3,
            31,
            15,
            1.5,
            1000.0,
            "yes",
            "1.2.3",
            "0.0.0.0/0",
            "12",
            "true",
            7,
            0.5
        ])
    );
    assert_eq!(one("2026-01-02T03:04:05Z"), json!("2026-01-02T03:04:05Z"));
    assert_eq!(one("!!str 12"), json!("12"));
    assert_eq!(one("18446744073709551615"), json!(u64::MAX));
}

#[test]
fn json_is_read_whatever_its_indentation() {
    let text = "{\n\t\"a\": {\n\t\t\"b\": [1, \"\\u00e4\\ud83d\\ude00\\/\"],\n\t\t\"c\": null\n\t}\n}\n";
    assert_eq!(one(text), json!({"a": {"b": [1, "ä😀/"], "c": null}}));
}

#[test]
fn anchors_and_merge_keys_work_and_what_is_written_wins() {
    let text = "base: &base {a: 1, b: 2}\nuse:\n  <<: *base\n  b: 3\nalso: *base\n";
    assert_eq!(one(text)["use"], json!({"a": 1, "b": 3}));
    assert_eq!(one(text)["also"], json!({"a": 1, "b": 2}));
}

#[test]
fn a_repeated_key_is_an_error_that_names_both_lines() {
    let error = values("a: 1\nb: 2\na: 3\n").remove(0).unwrap_err();
    assert!(error.message.contains("\"a\"") && error.message.contains("on line 1 and on line 3"), "{error}");
    let error = values("{a: 1, a: 3}\n").remove(0).unwrap_err();
    assert!(error.message.ends_with("stands twice, on line 1"), "{error}");
}

#[test]
fn an_alias_bomb_is_refused() {
    let mut text = String::from("a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n");
    for level in 1..10 {
        let below = format!("*a{}, ", level - 1).repeat(10);
        text.push_str(&format!("a{level}: &a{level} [{below}]\n"));
    }
    assert!(values(&text).remove(0).unwrap_err().message.contains("aliases"));
}

#[test]
fn many_copies_of_a_long_text_are_refused() {
    let text = format!("a: &a {}\nb: [{}]\n", "x".repeat(100_000), "*a, ".repeat(1_000));
    assert!(values(&text).remove(0).unwrap_err().message.contains("aliases"));
}

#[test]
fn a_chain_of_aliases_cannot_nest_without_bound() {
    let mut text = String::from("a0: &a0 [x]\n");
    for level in 1..20_000 {
        text.push_str(&format!("a{level}: &a{level} [*a{}]\n", level - 1));
    }
    assert!(values(&text).remove(0).is_err());
}

/// `depth` maps around a value.
fn nested(depth: usize, value: &str) -> String {
    format!("{}{value}{}", "{a: ".repeat(depth), "}".repeat(depth))
}

#[test]
fn an_alias_is_as_deep_as_what_it_repeats() {
    let all = |inner, outer| format!("a: &a {}\nb: {}\n", nested(inner, "x"), nested(outer, "*a"));
    assert!(values(&all(10, 10)).remove(0).is_ok());
    assert!(values(&all(33, 30)).remove(0).is_ok(), "64 with the document's own map");
    let error = values(&all(33, 31)).remove(0).unwrap_err();
    assert!(error.message.ends_with("nested more than 64 deep"), "{error}");
}

#[test]
fn aliases_of_aliases_end_no_thread_with_a_small_stack() {
    let mut text = format!("a0: &a0 {}\n", nested(60, "x"));
    for level in 1..36 {
        text.push_str(&format!("a{level}: &a{level} {}\n", nested(60, &format!("*a{}", level - 1))));
    }
    let read = std::thread::Builder::new().stack_size(256 << 10).spawn(move || values(&text)).unwrap();
    assert!(read.join().unwrap().remove(0).is_err());
}

#[test]
fn an_alias_to_the_value_around_it_is_refused() {
    assert!(values("&a [*a]").remove(0).is_err());
}

#[test]
fn deep_nesting_is_refused() {
    assert!(values(&"[".repeat(100_000)).remove(0).is_err());
    assert!(values(&"- ".repeat(100_000)).remove(0).is_err());
    assert!(values(&"{a: ".repeat(1_000)).remove(0).is_err());
}

#[test]
fn a_collection_as_key_is_refused() {
    assert!(values("? [a, b]\n: c\n").remove(0).is_err());
}

#[test]
fn a_field_is_found_on_its_line() {
    let text = "metadata:\n  annotations:\n    nodeport-proxy.k8s.io/expose: SNI\nspec:\n  ports:\n\
                \x20 - name: a\n  - name: b\n    port: x\n";
    let node = Documents::new(text).next().unwrap().unwrap();
    assert_eq!(node.line_of("metadata.annotations.nodeport-proxy.k8s.io/expose"), 3);
    assert_eq!(node.line_of("metadata.annotations[nodeport-proxy.k8s.io/expose]"), 3);
    assert_eq!(node.line_of("spec.ports[1].port"), 8);
    assert_eq!(node.line_of("spec.ports[1].nodePort"), 7);
    assert_eq!(node.line_of("spec.type"), 4);
    assert_eq!(node.line_of(""), 1);
}
