use super::*;

fn parse(query: &str) -> Identifiers {
    Identifiers::parse(query).unwrap()
}

#[test]
fn keys_repeat_and_keep_their_order() {
    let identifiers =
        parse("ipv4=1.2.3.4&ipv4=5.6.7.8&ipv6=fd00::1&host=node-1&cidr=10.0.0.0/16&default-route=true&uid=7");
    assert_eq!(identifiers.ipv4, ["1.2.3.4", "5.6.7.8"]);
    assert_eq!(identifiers.ipv6, ["fd00::1"]);
    assert_eq!(identifiers.host, ["node-1"]);
    assert_eq!(identifiers.cidr, ["10.0.0.0/16"]);
    assert!(identifiers.default_route && identifiers.unknown.is_empty());
    assert_eq!(identifiers.hosts().collect::<Vec<_>>(), ["1.2.3.4", "5.6.7.8", "fd00::1", "node-1"]);
}

#[test]
fn the_empty_text_has_none() {
    assert_eq!(parse(""), Identifiers::default());
    assert_eq!(parse("&&"), Identifiers::default());
}

#[test]
fn values_are_unescaped_as_go_does() {
    assert_eq!(parse("host=a%2eb+c&ipv6=fd00%3A%3a1").host, ["a.b c"]);
    assert_eq!(parse("h%6Fst=x").host, ["x"]);
    assert_eq!(parse("host").host, [""]);
    for (query, expected) in [
        ("host=a;ipv4=1.2.3.4", IdentifiersError::Semicolon),
        ("host=%", IdentifiersError::Escape),
        ("host=%2", IdentifiersError::Escape),
        ("host=%zz", IdentifiersError::Escape),
        ("host=%ff", IdentifiersError::NotText),
    ] {
        assert_eq!(Identifiers::parse(query), Err(expected), "{query}");
    }
}

#[test]
fn more_identifiers_than_anybody_needs_are_refused() {
    let most = vec!["host=a"; MAX].join("&");
    assert_eq!(parse(&most).host.len(), MAX);
    for more in [format!("{most}&b"), "a".repeat(MAX_BYTES + 1)] {
        assert_eq!(Identifiers::parse(&more), Err(IdentifiersError::TooMany));
    }
}

#[test]
fn only_the_first_default_route_counts() {
    for (query, expected) in [
        ("default-route=T", true),
        ("default-route=1", true),
        ("default-route=yes", false),
        ("default-route=true&default-route=false", true),
        ("default-route=false&default-route=true", false),
        ("default-route", false),
    ] {
        assert_eq!(parse(query).default_route, expected, "{query}");
    }
}

#[test]
fn keys_that_do_not_exist_are_reported() {
    assert_eq!(parse("zone=a&host=b&rack=1").unknown, ["zone", "rack"]);
}

#[test]
fn networks_that_are_none_are_left_out() {
    let identifiers = parse("cidr=10.1.2.3/16&cidr=nonsense&cidr=fd00::/8&cidr=10.0.0.0/33");
    let networks: Vec<String> = identifiers.networks().map(|network| network.to_string()).collect();
    assert_eq!(networks, ["10.1.0.0/16", "fd00::/8"]);
}
