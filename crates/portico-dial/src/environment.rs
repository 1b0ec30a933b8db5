//! Which proxy the environment names, in curl's order (curl, "Environment": lower case goes before upper case, the scheme's variable
//! before the one for all; one that is empty does not count).
//!
//! A tunnel is what curl would call `https://`, with TLS inside or without: it is always asked for by CONNECT.

use crate::no_proxy::NoProxy;
use crate::setting::{Proxy, ProxyError};

const PROXY: [&str; 4] = ["https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"];

const NO_PROXY: [&str; 2] = ["no_proxy", "NO_PROXY"];

/// The proxy, if one is named.
pub(crate) fn proxy(environment: &impl Fn(&str) -> Option<String>) -> Result<Option<Proxy>, ProxyError> {
    first(environment, &PROXY).map(|(name, url)| Proxy::parse(name, &url)).transpose()
}

/// The exceptions. As with curl they count for a proxy that was given by hand, too.
pub(crate) fn no_proxy(environment: &impl Fn(&str) -> Option<String>) -> NoProxy {
    NoProxy::new(&first(environment, &NO_PROXY).map(|(_, list)| list).unwrap_or_default())
}

fn first(
    environment: &impl Fn(&str) -> Option<String>,
    names: &[&'static str],
) -> Option<(&'static str, String)> {
    names.iter().find_map(|name| {
        environment(name).filter(|value| !value.trim().is_empty()).map(|value| (*name, value))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(variables: &[(&str, &str)]) -> Option<String> {
        let environment = |name: &str| {
            variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
        };
        proxy(&environment).unwrap().map(|proxy| proxy.to_string())
    }

    #[test]
    fn lower_case_goes_first_then_the_scheme_then_all() {
        let mut variables = vec![
            ("https_proxy", "http://one:1"),
            ("HTTPS_PROXY", "http://two:2"),
            ("all_proxy", "http://three:3"),
            ("ALL_PROXY", "http://four:4"),
        ];
        for expected in ["http://one:1", "http://two:2", "http://three:3", "http://four:4"] {
            assert_eq!(chosen(&variables).as_deref(), Some(expected));
            // An empty one is as good as none.
            variables[0].1 = "";
            assert_ne!(chosen(&variables).as_deref(), Some(expected));
            variables.remove(0);
        }
        assert_eq!(chosen(&variables), None);
    }

    #[test]
    fn the_variable_for_plain_http_does_not_count() {
        assert_eq!(chosen(&[("http_proxy", "http://one:1"), ("HTTP_PROXY", "http://two:2")]), None);
    }

    #[test]
    fn a_variable_that_is_no_url_is_named() {
        let error =
            proxy(&|name: &str| (name == "ALL_PROXY").then(|| "socks5://x:1".to_owned())).unwrap_err();
        assert!(error.to_string().starts_with("ALL_PROXY \"socks5://x:1\": only http://"), "{error}");
    }
}
