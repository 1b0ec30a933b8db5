//! Quantities of Kubernetes: `100m`, `256Mi`, `5Gi`.

use std::collections::BTreeMap;

use portico_api::seed::Resources;
use portico_expose::findings::Findings;
use serde_json::Value;

const REASON: &str = "quantity";
const REMEDY: &str = "write a number with a unit, such as 100m, 256Mi or 5Gi";

/// Requests and limits: quantities, and no request above its limit.
pub(super) fn check(resources: Option<&Resources>, field: &str, findings: &mut Findings) {
    let Some(Resources { requests, limits }) = resources else { return };
    let requests = read(requests, &format!("{field}.requests"), findings);
    let limits = read(limits, &format!("{field}.limits"), findings);
    for (name, request) in requests {
        if limits.get(name).is_some_and(|&limit| request > limit) {
            let message = "it is more than the limit".to_owned();
            let field = format!("{field}.requests.{name}");
            findings.refuse(REASON, &field, message, "lower the request, or raise the limit");
        }
    }
}

/// The size of a volume; `null` for the default.
pub(super) fn check_size(size: &Value, field: &str, findings: &mut Findings) {
    if !size.is_null() && quantity(size).is_none_or(|size| size <= 0.0) {
        findings.refuse(REASON, field, format!("{size} is no size of a volume"), REMEDY);
    }
}

fn read<'a>(
    written: &'a BTreeMap<Box<str>, Value>,
    field: &str,
    findings: &mut Findings,
) -> BTreeMap<&'a str, f64> {
    let mut read = BTreeMap::new();
    for (name, value) in written {
        match quantity(value) {
            Some(number) => drop(read.insert(&**name, number)),
            None => {
                findings.refuse(
                    REASON,
                    &format!("{field}.{name}"),
                    format!("{value} is no quantity"),
                    REMEDY,
                );
            }
        }
    }
    read
}

/// A quantity that is not negative, as a number.
fn quantity(value: &Value) -> Option<f64> {
    let text = match value {
        Value::String(text) => text.clone(),
        Value::Number(number) => number.to_string(),
        _ => return None,
    };
    let end = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(end);
    let number: f64 = number.parse().ok()?;
    let factor = match unit {
        "" => 1.0,
        "n" => 1e-9,
        "u" => 1e-6,
        "m" => 1e-3,
        "k" => 1e3,
        "M" => 1e6,
        "G" => 1e9,
        "T" => 1e12,
        "P" => 1e15,
        "E" => 1e18,
        "Ki" => 1024.0,
        "Mi" => 1024_f64.powi(2),
        "Gi" => 1024_f64.powi(3),
        "Ti" => 1024_f64.powi(4),
        "Pi" => 1024_f64.powi(5),
        "Ei" => 1024_f64.powi(6),
        _ => return None,
    };
    Some(number * factor)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn quantities_are_those_of_kubernetes() {
        for (value, number) in [
            (json!("100m"), Some(0.1)),
            (json!("1.5Gi"), Some(1_610_612_736.0)),
            (json!(2), Some(2.0)),
            (json!("0"), Some(0.0)),
            (json!("1G"), Some(1e9)),
            (json!("-1"), None),
            (json!("5 Gi"), None),
            (json!("5GB"), None),
            (json!("Gi"), None),
            (json!(""), None),
            (json!(true), None),
            (json!("."), None),
        ] {
            assert_eq!(quantity(&value), number, "{value}");
        }
    }
}
