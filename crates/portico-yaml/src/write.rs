//! Values as YAML text, for people to read and for programs to read back.

use std::fmt::Write as _;

use serde_json::Value;

use crate::plain_scalar;

/// Writes `value` as one document.
pub fn write(value: &Value) -> String {
    let mut out = String::new();
    match value {
        Value::Array(items) if !items.is_empty() => list(&mut out, items, 0),
        Value::Object(map) if !map.is_empty() => entries(&mut out, map, 0, ""),
        value => {
            inline(&mut out, value);
            out.push('\n');
        }
    }
    out
}

fn list(out: &mut String, items: &[Value], depth: usize) {
    for item in items {
        match item {
            Value::Object(map) if !map.is_empty() => entries(out, map, depth, "- "),
            Value::Array(inner) if !inner.is_empty() => {
                indent(out, depth);
                out.push_str("-\n");
                list(out, inner, depth + 1);
            }
            item => {
                indent(out, depth);
                out.push_str("- ");
                inline(out, item);
                out.push('\n');
            }
        }
    }
}

/// Writes a mapping; `first` stands before its first key, and as much space before the others.
fn entries(out: &mut String, map: &serde_json::Map<String, Value>, depth: usize, first: &str) {
    for (number, (key, value)) in map.iter().enumerate() {
        indent(out, depth);
        match number {
            0 => out.push_str(first),
            _ => out.extend(std::iter::repeat_n(' ', first.len())),
        }
        text(out, key);
        out.push(':');
        let below = depth + first.len() / 2 + 1;
        match value {
            Value::Array(items) if !items.is_empty() => {
                out.push('\n');
                list(out, items, below - 1);
            }
            Value::Object(map) if !map.is_empty() => {
                out.push('\n');
                entries(out, map, below, "");
            }
            value => {
                out.push(' ');
                inline(out, value);
                out.push('\n');
            }
        }
    }
}

fn indent(out: &mut String, depth: usize) {
    out.extend(std::iter::repeat_n("  ", depth));
}

fn inline(out: &mut String, value: &Value) {
    match value {
        Value::String(string) => text(out, string),
        // Writing to a String cannot fail. What is empty, and every other scalar, is written as in JSON.
        value => drop(write!(out, "{value}")),
    }
}

/// Plain, if it reads as the same text; quoted as in JSON, which YAML reads, otherwise.
fn text(out: &mut String, text: &str) {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b" ._-/()'*+=".contains(&byte);
    let begins = text.bytes().next().is_some_and(|byte| byte.is_ascii_alphanumeric() || byte == b'/');
    let reads_as_text = matches!(plain_scalar(text), Value::String(_));
    // YAML 1.1, which other readers speak, takes these words for booleans and digits with colons for numbers.
    let old_word = ["y", "n", "yes", "no", "on", "off"].contains(&text.to_ascii_lowercase().as_str());
    if begins && reads_as_text && !old_word && text.bytes().all(is_plain) && !text.ends_with(' ') {
        out.push_str(text);
    } else {
        // Writing to a String cannot fail.
        let _ = write!(out, "{}", Value::from(text));
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::Documents;

    fn read_back(value: &Value) -> Value {
        let text = write(value);
        Documents::new(&text).next().unwrap().unwrap_or_else(|error| panic!("{error}: {text}")).to_value()
    }

    #[test]
    fn what_is_written_reads_back_the_same() {
        let texts = [
            "",
            "a",
            "yes",
            "No",
            "~",
            "null",
            "12",
            "1.5",
            "0x1f",
            "443",
            "30000-32767",
            "a: b",
            "a #b",
            "- a",
            "4",
            "::1",
            "2001:db8::/64",
            "10.0.0.0/8",
            " a",
            "a ",
            "a\nb",
            "\"q\"",
            "'q'",
            "*a",
            "&a",
            "{}",
            "ä",
            "Managed Clusters' K8S API",
            "/",
            "Kubelet / Konnectivity",
            "[a]",
            "%",
            "@",
            "true",
        ];
        for text in texts {
            for value in
                [json!(text), json!([text]), json!({ text: text }), json!([{"a": text, "b": [text]}])]
            {
                assert_eq!(read_back(&value), value, "{}", write(&value));
            }
        }
        for value in [
            json!({"a": {"b": {"c": [1, true, null, {}, [], [[1, 2], {"d": 1.5}]]}}, "e": []}),
            json!([]),
            json!({}),
            json!(null),
        ] {
            assert_eq!(read_back(&value), value, "{}", write(&value));
        }
    }

    #[test]
    fn it_looks_as_people_write_it() {
        let value = json!([{"ports": ["443", "1-2"], "conditions": {"cni": "Canal"}}]);
        let text = "- conditions:\n    cni: Canal\n  ports:\n  - \"443\"\n  - 1-2\n";
        assert_eq!(write(&value), text);
    }
}
